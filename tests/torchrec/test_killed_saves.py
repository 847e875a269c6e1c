"""Ranks that are killed while they save: the checkpoint before stays, whole, and is found; so do a
base and its deltas."""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oper.checkpoint.soundness import open_chain
from oper.checkpoint.verify import verify
from tests.support.runtime.forkserver import context
from tests.support.torchrec import deltas_till_killed, save_till_killed

_RANKS = 2
_START_SECONDS = 600.0  # until ranks have loaded what is there, however busy the machine is
_SAVING_SECONDS = 1.2  # in which a rank saves some times, on a busy disk too


def killed_once(folder: Path, drawn: random.Random, save: Callable[..., None]) -> int:
    """Start ranks on what is at `folder` and kill them at a random moment, all at once or one
    before the others. The step that they found there."""
    exchange, together = drawn.random() < 0.7, drawn.random() < 0.7
    with tempfile.TemporaryDirectory() as place:
        pipes, processes = [], []
        for rank in range(_RANKS):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, _RANKS, str(Path(place) / "store"), folder, exchange, there)
            processes.append(context.Process(target=save, args=arguments))
            processes[-1].start()
            there.close()
            pipes.append(here)
        try:
            assert all(pipe.poll(_START_SECONDS) for pipe in pipes), "a rank does not start"
            steps = [pipe.recv() for pipe in pipes]  # EOFError where a rank has failed
            time.sleep(drawn.random() * _SAVING_SECONDS)
            drawn.shuffle(processes)
            if not together:
                processes[0].kill()
                time.sleep(drawn.random() * _SAVING_SECONDS)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    assert len({*steps}) == 1
    return steps[0]


def killed_often(
    folder: Path,
    kills: int,
    save: Callable[..., None] = save_till_killed.save_on,
) -> None:
    """Each start finds a whole checkpoint, which is never older than the one before."""
    drawn = random.Random(0)
    found = [killed_once(folder / "made", drawn, save) for _ in range(kills)]
    assert found == sorted(found)
    assert found[-1] > kills // 2, "hardly anything was saved"
    # What the kills left is removed by the saves after them, but for that of the last.
    left = [path.name for path in folder.iterdir()]
    assert len(left) <= 3, left


def test_a_killed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    killed_often(tmp_path, 3)


@pytest.mark.slow
def test_sixty_killed_saves_leave_the_checkpoint_before(tmp_path: Path) -> None:
    killed_often(tmp_path, 60)


def deltas_killed_often(folder: Path, kills: int) -> None:
    """The same of deltas; and all of them, by which steps went on, are whole."""
    killed_often(folder, kills, deltas_till_killed.save_on)
    links = [path for path in (folder / "made").iterdir() if path.name.isdigit()]
    newest = max(links, key=lambda path: int(path.name))
    assert len(open_chain(newest).links) == len(links)
    assert verify(newest).ok


def test_a_killed_delta_leaves_the_chain_before(tmp_path: Path) -> None:
    deltas_killed_often(tmp_path, 3)


@pytest.mark.slow
def test_thirty_killed_deltas_leave_the_chain_before(tmp_path: Path) -> None:
    deltas_killed_often(tmp_path, 30)
