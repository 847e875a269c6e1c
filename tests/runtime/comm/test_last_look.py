"""The last look at the other ranks: scripts that end in collectives which are not OPER's, by an
exception or by a launcher's SIGTERM, name the rank that died, and none that ended otherwise."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.runtime.scripts import Script

# It looks twice a second otherwise: here only as it ends.
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from oper.runtime.comm import liveness
from oper.runtime.comm.node import Node

liveness._WATCH_SECONDS = 1000
rank, ranks, does = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
if does == "handles":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=ranks)
nodes = [Node.join(dist.group.WORLD) for _ in range(2)]
print("joined", flush=True)
if does == "forks":
    child = os.fork() if rank == 0 else 0
    if child > 0:
        sys.stdin.readline()
        os.kill(child, signal.SIGTERM)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 100)
    time.sleep(60)
if does == "stalls":
    os.set_blocking(2, False)
    try:
        while os.write(2, b"." * 4096):
            pass
    except BlockingIOError:
        os.set_blocking(2, True)
if does == "leaves":
    for number, node in enumerate(nodes):
        reused = node.liveness._lock
        node.liveness.leave()
        os.dup2(os.open(f"{sys.argv[3]}-{rank}-{number}", os.O_RDWR | os.O_CREAT), reused)
    os.kill(os.getpid(), signal.SIGTERM)
if does != "ends" and (rank == 1 or does in ("computes", "handles", "stalls")):
    time.sleep(60)
if does == "catches":
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        sys.exit(1)
if does == "receives" and rank == 0:
    dist.recv(torch.ones(1), src=ranks - 1)
if does != "ends":
    dist.all_reduce(torch.ones(1))
"""


@contextmanager
def _ranks(count: int, store: Path, does: str) -> Iterator[list[Script]]:
    """Ranks that have joined and are in a collective, or do what `does` says."""
    with ExitStack() as started:
        ranks = []
        for rank in range(count):
            ranks.append(Script(SCRIPT, rank, count, store, does))
            started.callback(ranks[-1].close)
        for script in ranks:
            assert script.stdout.readline() == "joined\n"
        yield ranks


def _end(rank: Script, number: int) -> str:
    """Send it a signal; what it said when it has ended."""
    rank.send_signal(number)
    return rank.errors()


def _deaths(errors: str) -> list[str]:
    return re.findall(r".*died.*\n", errors)


def _named(rank: int, ranks: list[Script]) -> list[str]:
    text = f"rank {rank} (process {ranks[rank].pid}) died: see its last output\n"
    return [text]


@pytest.mark.parametrize("does", ["reduces", "catches"])
def test_an_exception_out_of_a_collective(tmp_path: Path, does: str) -> None:
    with _ranks(3, tmp_path / "store", does) as ranks:
        _end(ranks[1], signal.SIGKILL)
        for rank in (0, 2):
            assert _deaths(ranks[rank].errors()) == _named(1, ranks)
            assert ranks[rank].returncode == 1


@pytest.mark.parametrize("does", ["receives", "computes"])
def test_sigterm_of_a_launcher(tmp_path: Path, does: str) -> None:
    with _ranks(3, tmp_path / "store", does) as ranks:
        _end(ranks[1], signal.SIGKILL)
        for rank in (0, 2):
            # One whose collective fails may be ended between saying it and noting that it was said.
            assert set(_deaths(_end(ranks[rank], signal.SIGTERM))) == set(_named(1, ranks))
            if does == "computes":
                assert ranks[rank].returncode == -signal.SIGTERM


def test_ranks_that_sigterm_ends_are_not_said_to_have_died(tmp_path: Path) -> None:
    with _ranks(3, tmp_path / "store", "computes") as ranks:
        for rank in ranks:
            assert _end(rank, signal.SIGTERM) == ""
            assert rank.returncode == -signal.SIGTERM


def test_last_words_are_not_written_into_files_that_reuse_a_lock_s_number(tmp_path: Path) -> None:
    with _ranks(2, tmp_path / "store", "leaves") as ranks:
        for rank in ranks:
            assert rank.errors() == ""
            assert rank.returncode == -signal.SIGTERM
    assert [(tmp_path / f"store-{rank}-0").read_text() for rank in range(2)] == ["", ""]


def test_who_was_ended_by_sigterm_is_told_by_who_was_not(tmp_path: Path) -> None:
    with _ranks(2, tmp_path / "store", "reduces") as ranks:
        ranks[1].send_signal(signal.SIGTERM)
        assert "rank 1 was ended by SIGTERM\n" in ranks[0].errors()


def test_a_reader_of_errors_that_has_stopped_does_not_keep_a_rank(tmp_path: Path) -> None:
    with _ranks(2, tmp_path / "store", "stalls") as ranks:
        time.sleep(0.5)  # till its pipe is full
        _end(ranks[1], signal.SIGKILL)
        ranks[0].send_signal(signal.SIGTERM)
        assert ranks[0].wait(10) == -signal.SIGTERM


def test_ranks_that_end_in_order_are_not_named(tmp_path: Path) -> None:
    with _ranks(3, tmp_path / "store", "ends") as ranks:
        assert [(rank.errors(), rank.returncode) for rank in ranks] == [("", 0)] * 3


def test_a_handler_of_the_script_is_left_alone(tmp_path: Path) -> None:
    with _ranks(2, tmp_path / "store", "handles") as ranks:
        _end(ranks[1], signal.SIGKILL)
        assert _deaths(_end(ranks[0], signal.SIGTERM)) == _named(1, ranks)
        assert ranks[0].returncode == 7


def test_a_forked_child_says_nothing(tmp_path: Path) -> None:
    with _ranks(2, tmp_path / "store", "forks") as ranks:
        _end(ranks[1], signal.SIGKILL)
        assert ranks[0].errors("\n") == ""
        assert ranks[0].returncode == 100 - signal.SIGTERM
