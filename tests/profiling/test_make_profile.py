"""`oper.profile` does what `oper profile` does, in memory and on the disk."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import oper
from oper.base.errors import OperError, OperNotice
from oper.cli.profile_commands import profile as command
from oper.cli.shared import log_arguments as log_options
from oper.logs import LogKeywords, LogOptions
from oper.profiling.profile import Profile
from tests.support.commands import fine

DAY = 86_400
EVERY = {"by_column": "at", "every": "1d", "time_unit": "s"}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A log of 600 samples on three days, with a column that is no feature."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    bags = [random.integers(0, 40, random.integers(0, 4)).tolist() for _ in range(600)]
    table = pa.table(
        {
            "user": random.integers(0, 300, 600),
            "basket": pa.array(bags, pa.list_(pa.int64())),
            "price": random.random(600),
            "at": 1_600_000_000 // DAY * DAY + np.arange(600) * (3 * DAY // 600),
        }
    )
    pq.write_table(table, "log.parquet")
    return "log.parquet"


def same(one: Profile, other: Profile) -> None:
    assert one.digest == other.digest
    assert one.source == other.source


def typed(options: dict[str, Any]) -> list[str]:
    """The options as they are typed."""
    return [part for name, value in options.items() for part in (_flag(name), str(value))]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize(
    "options",
    [
        {"columns": "user", "rows": "10:90%"},
        {"columns": "user", "ids": "hash:50", "dim": 8, "optimizer": "sgd", "dtype": "fp16"},
        {"columns": "basket", "ids": "vocab", "min_count": 3, "memory_limit": "1B"},
        {"columns": "basket", "batch_size": 100, "ranks": 4},
        {"columns": "basket", "sample": "30%", "seed": 7},
        {"columns": "user", "windows": 3},
        {"columns": "basket", "windows": 2, "sample": 0.5},
        {"columns": "user", **EVERY},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()),
)
def test_python_and_the_command_write_equal_profiles(log: str, options: dict[str, Any]) -> None:
    fine("profile", log, "-o", "typed", *typed(options))
    counted = oper.profile(log, None, "called", **options)
    windows = counted if isinstance(counted, list) else [counted]
    typed_windows = Profile.load_windows("typed")
    assert isinstance(counted, list) == ("windows" in options or "by_column" in options)
    assert len(windows) == len(typed_windows)
    for mine, theirs in zip(windows, typed_windows, strict=True):
        same(mine, theirs)
    same(Profile.load("called"), Profile.load("typed"))
    if "memory_limit" not in options:
        held = oper.profile(log, **options)
        for mine, theirs in zip(held if isinstance(held, list) else [held], windows, strict=True):
            same(mine, theirs)


def test_columns_that_are_left_out_are_told_by_both(log: str) -> None:
    with pytest.warns(OperNotice, match=r"left out: price \(numbers, double\)"):
        counted = oper.profile(log, ids="hash:100", memory_limit=None)
    assert counted.left_out.keys() == {"price", "at"}
    assert counted.left_out["price"] == "numbers, double"
    assert counted.left_out["at"].startswith("times: first 600 values are dates from 2020-09-13")


def test_tables_in_all_forms(log: str) -> None:
    first = oper.profile(log, columns=["user", "basket"], dim=16)
    first.save("first")
    Path("tables.yaml").write_text(
        "[{name: user, rows: 300, dim: 16}, {name: basket, rows: 40, dim: 16}]"
    )
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=16, feature_names=[t.name]
        )
        for t in first.tables
    ]
    model = EmbeddingBagCollection(configs, device=torch.device("meta"))
    for tables in (first, "first", Path("first"), "tables.yaml", configs, model, first.tables):
        counted = oper.profile(log, tables, columns=["user", "basket"])
        np.testing.assert_array_equal(counted.accesses, first.accesses)
        assert [t.dim for t in counted.tables] == [16, 16]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"windows": 2, "by_column": "at"}, "give one of them"),
        ({"memory_limit": "1GB"}, "memory_limit='1GB': without a folder"),
        (
            {"under_torchrun": True},
            "output: expected the folder to write, under torchrun, got None",
        ),
        ({"ids": "dense:5"}, "ids='dense:5'"),
        ({"colums": "user"}, "colums: is no option of reading a log; known are columns, dense"),
        ({"sample": 2}, "`sample` '2'"),
        ({"deadline": "soon"}, "`deadline` 'soon'"),
        ({"columns": "nothing"}, "`columns` 'nothing'"),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_options_that_cannot_be(log: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OperError, match=words):
        oper.profile(log, **options)
    assert sorted(path.name for path in Path().iterdir()) == ["log.parquet"]


def test_a_folder_is_replaced_only_if_that_was_asked_for(log: str) -> None:
    oper.profile(log, output="p", columns="user")
    with pytest.raises(OperError, match="p: exists"):
        oper.profile(log, output="p", columns="user")
    same(oper.profile(log, output="p", columns="basket", overwrite=True), Profile.load("p"))


def test_names_and_defaults_are_those_of_the_command() -> None:
    mine = inspect.signature(oper.profile).parameters
    its = inspect.signature(command.profile).parameters
    renamed = {"force": "overwrite"}
    only_typed = {"context", "as_json", "reading", "output", "log"}
    for name in its.keys() - only_typed:
        assert mine[renamed.get(name, name)].default == its[name].default.default, name
    only_python = {"progress", "under_torchrun", "reading", "output", "log"}
    assert mine.keys() - only_python == {renamed.get(n, n) for n in its.keys() - only_typed}
    options = log_options._OPTIONS
    assert set(LogKeywords.__annotations__) == set(options)
    for name, (_, option) in options.items():
        assert getattr(LogOptions(), name) == (option.default or getattr(LogOptions(), name)), name


def test_rows_are_read_by_the_names_of_the_options(log: str) -> None:
    batches = list(oper.read(log, columns="user", rows="10:20"))
    assert sum(batch.samples for batch in batches) == 10
    assert list(batches[0].features) == ["user"]


def test_other_ranks_return_nothing(log: str, tmp_path: Path) -> None:
    for part in range(2):
        pq.write_table(pq.read_table(log).slice(300 * part, 300), f"part{part}.parquet")
    script = tmp_path / "count.py"
    script.write_text(
        "import json, os, oper\n"
        "parts, columns = ['part0.parquet', 'part1.parquet'], 'basket'\n"
        "options = dict(columns=columns, under_torchrun=True, deadline=60)\n"
        "found = oper.profile(parts, output='both', **options)\n"
        "said = json.dumps([int(os.environ['RANK']), found and found.digest])\n"
        # In one piece, where print may write the end of the line after another rank's line.
        "os.write(1, f'{said}\\n'.encode())\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        check=True,
        env={"PYTHONPATH": str(Path(oper.__file__).parents[1]), "PATH": "/usr/bin:/bin"},
    )
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert said == [[0, oper.profile(log, columns="basket").digest], [1, None]]
