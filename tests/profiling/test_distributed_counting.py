"""Counting under torchrun: ranks count parts of a log, and tell each other their errors."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oper.profiling import counting
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile

TORCHRUN = """
import sys
import typer
from oper.cli.profile_commands import profile
app = typer.Typer()
app.callback()(lambda: None)
profile.register(app)
app()
"""


def test_torchrun_ranks_count_parts(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    (tmp_path / "log").mkdir()
    for part in range(3):
        # Bags in one file alone: ranks differ in what they keep.
        lengths = random.integers(0, 4 if part == 1 else 2, 500).astype(np.int32)
        items = random.integers(0, 100 + part, int(lengths.sum()))
        np.savez(tmp_path / "log" / f"{part}.npz", item=items, lengths=lengths)
    (tmp_path / "main.py").write_text(TORCHRUN)
    arguments = ["--values", "item", "--lengths", "lengths", "--batch-size", "50", "--ranks", "2"]
    profile(tmp_path / "log", output=tmp_path / "one", values="item", lengths="lengths")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(tmp_path / "main.py"), "profile", str(tmp_path / "log"), *arguments, "--json"]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "both"), "--deadline", "60s"],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**clean, "PYTHONPATH": str(Path(counting.__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    one, both = Profile.load(tmp_path / "one"), Profile.load(tmp_path / "both", check=True)
    assert both.tables == one.tables
    assert both.samples == said["samples"] == 1500
    np.testing.assert_array_equal(both.accesses, one.accesses)
    np.testing.assert_array_equal(both.table_samples_with_row(0), one.table_samples_with_row(0))
    assert both.distinct is not None
    assert both.distinct.batches == 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["both", "log", "main.py", "one"]


def ranks_of(ranks: int, *arguments: object) -> list[tuple[int, str]]:
    """Run `oper profile` on ranks that nobody ends when one of them fails; return each rank's exit
    status and last line of standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        given = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        given |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": Path(counting.__file__).parents[2]}
        process = subprocess.Popen(
            [sys.executable, "-m", "oper", "profile", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **{name: str(value) for name, value in given.items()}},
        )
        started.append(process)
    try:
        said = [process.communicate(timeout=600)[1].splitlines() for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, lines[-1]) for p, lines in zip(started, said, strict=True)]


REFUSED = {
    "the output of rank 0": (0, "exists and was not written by oper"),
    "a row of rank 1's file": (1, "got 7000; give the table at least 7,001 rows"),
    "fewer files than ranks": (
        None,
        "expected at least one file of the log per rank, got 1 for 2 ranks",
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_a_refusal_by_one_rank_ends_all_ranks(tmp_path: Path, refused: str) -> None:
    """The deadline is an hour: ranks that waited for it would end the test by its time limit."""
    log, output = tmp_path / "log", tmp_path / "output"
    log.mkdir()
    for part in range(1 if refused.startswith("fewer") else 2):
        last = 7000 if "row of rank 1" in refused and part else 3
        (log / f"{part}.csv").write_text("item\n" + "1\n" * 99 + f"{last}\n")
    if "output" in refused:
        output.mkdir()
        (output / "letter.txt").write_text("dear")
    (tmp_path / "tables.yaml").write_text("tables:\n- {name: item, rows: 9, dim: 4}\n")
    tables = ["--tables", tmp_path / "tables.yaml"]
    who, why = REFUSED[refused]
    for rank, (status, line) in enumerate(ranks_of(2, log, "-o", output, *tables)):
        assert status == 2
        assert why in line
        assert line.startswith(f"error: rank {who} failed: ") == (rank != who and who is not None)
    assert not output.exists() or [path.name for path in output.iterdir()] == ["letter.txt"]


LATE = """
import os, sys, time
from pathlib import Path
from oper.base.errors import OperError
from oper.profiling.make_profile import profile
from oper.profiling.table_options import TableOptions

prepare = TableOptions.prepare

def late(*arguments):
    time.sleep(6 * int(os.environ["RANK"]))
    return prepare(*arguments)

TableOptions.prepare = late
folder = Path(sys.argv[1])
arrays = {"values": "item", "lengths": "lengths"}
try:
    profile(folder / "log", None, folder / "p", under_torchrun=True, deadline=2, **arrays)
except OperError as error:
    print(os.environ["RANK"], error, flush=True)
    sys.exit(2)
"""


@pytest.mark.slow
def test_torchrun_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for part in range(2):
        np.savez(tmp_path / "log" / f"{part}.npz", item=[1, 2], lengths=np.array([2], np.int32))
    (tmp_path / "main.py").write_text(LATE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "main.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(Path(counting.__file__).parents[2])},
    )
    assert done.returncode != 0
    assert "0 rank 0 lost another rank, or waited 2 s" in done.stdout
    assert "Ranks 1 failed" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "main.py"]
