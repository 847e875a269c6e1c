"""`oper` commands run in this process, and a folder with a log, profiles and plans for them."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oper import cli

# What the fixture `before` is: (a function of `oper.files.storage`, what happens before it runs).
Before = Callable[[str, Callable[[], object]], None]
SYNTH = "synth criteo-kaggle --scale 0.0001 --samples 50"


class Said(NamedTuple):
    status: int
    out: str
    errors: str


def oper(*arguments: object) -> Said:
    """Run `oper ARGUMENTS` in this process."""
    out, errors = io.StringIO(), io.StringIO()
    status = 0
    argv, sys.argv = sys.argv, ["oper", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            cli.main()
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = argv
    assert not [line for line in out.getvalue().split("\n") if line.endswith(" ")]
    return Said(status, out.getvalue(), errors.getvalue())


def fine(*arguments: object) -> str:
    said = oper(*arguments)
    assert said.status == 0, said
    return said.out


def shell(command: str, first: str = "", **more: str) -> tuple[int, str]:
    """The exit status of `oper COMMAND` in a process of its own, and standard error. Redirections
    of a shell may follow the command, and `first` is what the shell does before it."""
    line = f'{first}"{sys.executable}" -m oper {command}'
    done = subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | more,
    )
    return done.returncode, done.stderr


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below `folder`, hidden ones too, with its content."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def hidden(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def write_log(path: Path, seed: int = 0, samples: int = 600) -> None:
    random = np.random.default_rng(seed)
    columns = {
        "C1": (random.zipf(1.3, samples) - 1) % 90,
        "C2": (random.zipf(1.1, samples) - 1) % 40,
        "day": np.arange(samples) // 100 * 86_400,
    }
    pq.write_table(pa.table(columns), path)


def refused(command: str, *words: str) -> None:
    before = tree(Path.cwd())
    said = oper(*command.split())
    assert said.status == 2, said
    assert said.out == ""
    assert said.errors.startswith("error: "), said.errors
    assert said.errors.count("\n") == 1
    for word in words:
        assert word in said.errors, said.errors
    assert tree(Path.cwd()) == before


def make_folder(folder: Path) -> None:
    """A log, its profiles p and w (two windows), and plans of p: q in training, r in inference."""
    write_log(folder / "log.parquet")
    for name, more in (("p", ()), ("w", ("--windows", 2))):
        fine("profile", folder / "log.parquet", "-o", folder / name, "--columns", "C*", *more)
    for name, mode in (("q", "training"), ("r", "inference")):
        fine("plan", folder / "p", "-o", folder / name, "--topology", "2x2-a100", "--mode", mode)
