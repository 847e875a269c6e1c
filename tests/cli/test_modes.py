"""Modes of what commands write: what the umask leaves, and what was there where it is replaced."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oper.measure import launch
from oper.measure.measurement import Measurement
from oper.topology.latency import DEVICES
from tests.cli.test_writes import WRITERS
from tests.support.commands import fine


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(path: Path) -> dict[str, int]:
    """Return the modes of a file or folder and of its content."""
    return {str(p): mode(p) for p in (path, *path.rglob("*"))}


@pytest.mark.parametrize("name", [*WRITERS, "page", "topology"])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_new_files_and_folders_follow_the_umask(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, mask: int
) -> None:
    same, none = [[8e9, 8e9]] * 2, [[0.0, 0.0]] * 2
    measured = Measurement([0, 0], same, none, 2e9, DEVICES, [2**30] * 2, 1, 256)
    monkeypatch.setattr(launch, "measure_local", lambda ranks, **_: measured)
    others = {"page": "report q -o", "topology": "topology measure --ranks 2 -o"}
    places = {"synth": "new.parquet", "page": "new.html", "topology": "new.yaml"}
    place = Path("above", places.get(name, "new"))
    with umask(mask):
        fine(*(WRITERS | others)[name].split(), place)
    assert modes(Path("above")) == {
        path: (0o777 if Path(path).is_dir() else 0o666) & ~mask for path in modes(Path("above"))
    }


@pytest.mark.parametrize("was", [0o700, 0o2775, 0o555])
def test_a_folder_that_is_replaced_keeps_its_mode(here: Path, steps: str, was: int) -> None:
    Path("empty").mkdir()
    for place in ("q", "empty"):
        Path(place).chmod(was)
        fine(*["plan", "p", "--topology", "cpu:2", "--force", "-o"], place)
        assert mode(Path(place)) == was


@pytest.mark.parametrize("was", [0o600, 0o664, 0o444])
def test_a_file_that_is_replaced_keeps_its_mode(here: Path, was: int) -> None:
    fine(*f"{WRITERS['synth']} made.parquet".split())
    Path("made.parquet").chmod(was)
    fine(*f"{WRITERS['synth']} made.parquet --force".split())
    assert mode(Path("made.parquet")) == was


def test_nobody_reads_what_replaces_a_secret(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while it is written."""
    seen: list[int] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        seen.extend(mode(p) for p in here.iterdir() if p.name.startswith((".q.", ".made.parquet.")))
        real(handle)

    fine(*f"{WRITERS['synth']} made.parquet".split())
    monkeypatch.setattr(os, "fsync", fsync)
    Path("q").chmod(0o700)
    fine(*["plan", "p", "--topology", "cpu:2", "--force", "-o", "q"])
    Path("made.parquet").chmod(0o600)
    fine(*f"{WRITERS['synth']} made.parquet --force".split())
    assert {0o700, 0o600} <= set(seen)
    assert not any(each & 0o077 for each in seen)
