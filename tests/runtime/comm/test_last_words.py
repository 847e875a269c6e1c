"""Last words: what the living are told of a rank that has ended, by whatever, and how soon."""

import _thread
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm import failure_store
from oper.runtime.comm.failure_store import FailureStore
from oper.runtime.comm.group import Group
from oper.runtime.comm.lost_ranks import LostRankError
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from tests.support.runtime import mortal_ranks
from tests.support.runtime.scripts import Script

ENDS: dict[str, tuple[Any, str]] = {
    "by status 0": (SystemExit(0), "rank 1 left while rank 0 waited for it to finish: the script"),
    "by another status": (SystemExit(3), "rank 1 failed: SystemExit: 3"),
    "by an error of its own": (ValueError("no such file"), "rank 1 failed: ValueError: no such f"),
    "by an error of ours": (OperError("no room"), "rank 1 failed: no room"),
    "by what it was told": (LostRankError("rank 2 died"), "rank 2 died"),
    "by os._exit": (None, "rank 1 died while rank 0 waited for it to finish"),
}


class _Stopped:
    """A store whose host is gone."""

    def clone(self) -> None:
        time.sleep(20)


def _end_by(rank: int, group: Any, name: str, waits_in_group: bool) -> tuple[str, float] | None:
    node = Node.join(group)
    signals = Signals(node, ["done"])
    assert node.group is not None
    if rank == 1:
        time.sleep(0.1)  # it has ended, or left its words, when the store would be asked first
        if ENDS[name][0] is None:
            os._exit(0)
        raise mortal_ranks.EndsBy(ENDS[name][0])
    store: Any = _Stopped()
    node.group._failures._store = store
    began = time.monotonic()
    gather, wait = node.group.gather, signals.wait
    with pytest.raises(LostRankError) as told:
        gather(b"1", "finish") if waits_in_group else wait("done", 1, "finish")
    return str(told.value), time.monotonic() - began


@pytest.mark.parametrize("waits_in_group", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_how_a_rank_ended_is_known_without_the_store(name: str, waits_in_group: bool) -> None:
    told, seconds = mortal_ranks.run(2, _end_by, name, waits_in_group, silent=[1])[0]
    assert told.startswith(ENDS[name][1])
    assert seconds < 2.5  # not the 3 s that a store may take


def _live_on(rank: int, group: Any) -> tuple[str, float] | None:
    node = Node.join(group)
    assert node.group is not None
    if rank == 1:
        node.liveness.leave_words("rank 1 failed: no room")
        time.sleep(20)
    store: Any = _Stopped()
    node.group._failures._store = store
    began = time.monotonic()
    with pytest.raises(LostRankError) as told:
        node.group.gather(b"1", "finish")
    return str(told.value), time.monotonic() - began


def test_the_words_of_a_rank_that_has_not_ended_are_read_before_the_store() -> None:
    told, seconds = mortal_ranks.run(2, _live_on, silent=[1])[0]
    assert told == "rank 1 failed: no room"
    assert seconds < 2.5


def _leave(rank: int, group: Any) -> str | None:
    node = Node.join(group, deadline_seconds=2)
    assert node.group is not None
    if rank == 1:
        node.close()
        time.sleep(20)
    with pytest.raises(LostRankError) as told:
        node.group.gather(b"1", "finish")
    return str(told.value)


def test_a_rank_that_left_is_named_where_it_was_waited_for_until_the_deadline() -> None:
    told = mortal_ranks.run(2, _leave, silent=[1])[0]
    assert told.startswith("rank 1 left while rank 0 waited for it to finish: the script ended")


def _say_much(rank: int, group: Any, cut: int) -> str:
    node = Node.join(group)
    if rank == 1:
        node.liveness.leave_words("a" * cut + "é" * 2000)
        time.sleep(20)
    deadline = time.monotonic() + 60
    while not (words := node.liveness.words()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return words


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_long_words_end_with_a_mark(cut: int) -> None:
    """Wherever a character of two bytes ends."""
    told = mortal_ranks.run(2, _say_much, cut, silent=[1])[0]
    assert told.endswith("éé…")
    assert len(told.encode()) <= 1024


_FORKS = """
import contextlib, os
from oper.runtime.comm.liveness import Liveness

class Group:
    ranks = 2
    def fail(self, error):
        print("told the others:", error, flush=True)

liveness = Liveness(0, Group())
with contextlib.ExitStack() as stack:
    liveness.take_lock(stack)
    if os.fork() == 0:
        raise ValueError("of the child")
    os.wait()
    print("goes on")
"""


def test_the_error_of_a_forked_child_is_its_own() -> None:
    ran = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, check=True)
    assert ran.stdout == "goes on\n"
    assert "ValueError: of the child" in ran.stderr


def _follow(rank: int, group: Any) -> str | None:
    signals = Signals(Node.join(group), ["done"])
    if rank == 2:
        mortal_ranks.lose_this_process(signal.SIGKILL)
    if rank == 1:
        time.sleep(1.5)  # the others have ended by now
    with pytest.raises(LostRankError) as told:
        signals.wait("done", 1, "finish")
    if rank == 0:
        raise mortal_ranks.EndsBy(told.value)
    return str(told.value)


def test_who_failed_because_of_another_is_not_named() -> None:
    assert mortal_ranks.run(3, _follow, silent=[0, 2])[1].startswith("rank 2 died while rank 0 ")


def _log_deaths(rank: int, group: Any, dies: bool) -> tuple[list[str], float]:
    """What is logged while this rank waits in a collective that is not OPER's, and how soon."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper").addHandler(handler)
    nodes = [Node.join(group) for _ in range(2)]  # as of two collections
    began = time.monotonic()
    if rank == 1:
        if dies:
            mortal_ranks.lose_this_process(signal.SIGKILL)
        nodes.clear()  # its tables are released, and it goes on
        time.sleep(20)
    while not said and time.monotonic() - began < (30 if dies else 3):
        time.sleep(0.05)
    seconds = time.monotonic() - began
    time.sleep(1.2)
    return said, seconds


def test_deaths_are_logged_once_by_all_others_whatever_they_wait_in() -> None:
    outcomes = mortal_ranks.run(3, _log_deaths, True, silent=[1])
    for said, seconds in (outcomes[0], outcomes[2]):
        (text,) = said
        assert text.startswith("rank 1 (process ")
        assert "died: see its last output; what is not OPER's" in text
        assert seconds < 30


def test_ranks_that_leave_are_not_said_to_have_died() -> None:
    assert mortal_ranks.run(2, _log_deaths, False, silent=[1])[0][0] == []


def _fail_without_room(rank: int, process_group: Any, megabytes: int) -> tuple[str, float]:
    group = Group(process_group, deadline_seconds=60)
    group.gather(b"1", "join")
    began = time.monotonic()
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        group.fail(OperError("no addresses are left"))
        return "", time.monotonic() - began
    with pytest.raises(LostRankError) as told:
        group.run(dist.all_to_all_single, torch.empty(2), torch.ones(2), action="finish")
    return str(told.value), time.monotonic() - began


@pytest.mark.parametrize("megabytes", [0, 2, 9])
def test_a_rank_without_addresses_tells_the_others(megabytes: int) -> None:
    """Room for no thread, for none of its stacks, for one and not much more."""
    (told, _), (_, seconds) = mortal_ranks.run(2, _fail_without_room, megabytes)
    assert told == "rank 1 failed: no addresses are left"
    assert seconds < 30  # half of the deadline


def test_a_thread_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python makes it, and it has no memory for its first step: threading.Thread would wait."""
    said: dict[str, str] = {}

    class Store:
        def clone(self) -> "Store":
            return self

        def check(self, keys: list[str]) -> bool:
            return keys[0] in said

        def set(self, key: str, value: str) -> None:
            said[key] = value

    failures: Any = object.__new__(FailureStore)
    failures._prefix, failures._store, failures._answered = "oper/0", Store(), None
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 1)
    monkeypatch.setattr(failure_store, "_ANSWER_SECONDS", 0.5)
    began = time.monotonic()
    for _ in range(2):
        failures.fail("no addresses are left")
    assert said == {"oper/0/failure": "no addresses are left"}
    assert time.monotonic() - began < 30  # about 1 s, and room for a busy machine


SCRIPT = """
import sys
import torch.distributed as dist
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
signals = Signals(Node.join(dist.group.WORLD), ["done"])
if rank == 1:
    sys.argv[3] == "fails" and 1 / 0
else:
    signals.wait("done", 1, "finish")
"""


@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("fails", "rank 1 failed: ZeroDivisionError: division by zero"),
        ("ends", "rank 1 left while rank 0 waited for it to finish"),
    ],
)
def test_scripts_that_end(tmp_path: Path, does: str, text: str) -> None:
    """Processes that are not of multiprocessing end in another way."""
    with ExitStack() as started:
        ranks = [Script(SCRIPT, rank, tmp_path / "store", does) for rank in range(2)]
        for rank in ranks:
            started.callback(rank.close)
        errors = ranks[0].errors(timeout=600)
    assert f"LostRankError: {text}" in errors


def _end_after_all_others(rank: int, group: Any, folder: Path) -> None:
    """Rank 1 dies, rank 0 catches that and drops its node, all others die, and rank 0 ends."""
    node = Node.join(group)
    signals = Signals(node, ["done"])
    caught = folder / "caught"
    if rank:
        while rank > 1 and not caught.exists():
            time.sleep(0.01)
        mortal_ranks.lose_this_process(signal.SIGKILL)
    logging.getLogger("oper").addHandler(logging.FileHandler(folder / "log"))
    processes = node.liveness.processes()
    with pytest.raises(LostRankError):
        signals.wait("done", 1, "finish")
    node.fail(LostRankError("rank 1 died"))
    node.close()
    del node, signals
    caught.touch()
    while not all(_has_ended(process) for process in processes.values()):
        time.sleep(0.01)
    raise mortal_ranks.EndsBy(SystemExit(1))


def _has_ended(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:
        return True
    # Its other threads end after the first one, and hold its lock until then.
    return status.rpartition(")")[2].split()[0] in "ZX" and len(threads) == 1


def test_all_ranks_that_died_are_named_after_a_caught_error(tmp_path: Path) -> None:
    mortal_ranks.run(6, _end_after_all_others, tmp_path)
    log = (tmp_path / "log").read_text(encoding="utf-8")
    for rank in range(1, 6):
        assert f"rank {rank} (process " in log
