"""Groups: what ranks are told of one that fails, dies, stops or is interrupted in a collective."""

import os
import signal
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm.deadline import Deadline
from oper.runtime.comm.group import Group
from oper.runtime.comm.lost_ranks import LostRankError, told
from tests.support.runtime import mortal_ranks


def _lose_rank_1(rank: int, process_group: Any, does: str) -> tuple[str, float, bool]:
    """What a rank is told, after how long, and whether nothing is under way then."""
    group = Group(process_group, deadline_seconds=6 if does in ("stops", "sleeps") else 60)
    assert [int.from_bytes(m) for m in group.gather(bytes([rank]), "join")] == [0, 1, 2]
    if rank == 1:
        if does == "fails":
            group.fail(OperError("no such row: 7"))
            time.sleep(60)
        if does == "fails after another":
            group.fail(LostRankError("rank 2 failed: no such row: 7"))
            time.sleep(60)
        if does == "sleeps":
            time.sleep(60)
        if does == "is interrupted":
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        else:
            mortal_ranks.lose_this_process(signal.SIGSTOP if does == "stops" else signal.SIGKILL)
    elif does == "is interrupted":
        time.sleep(0.6 if rank == 0 else 0)
    works = []

    def collective(*arguments: Any, **options: Any) -> Any:
        works.append(dist.all_to_all_single(*arguments, **options))
        return works[0]

    began = time.monotonic()
    with pytest.raises((OperError, KeyboardInterrupt)) as error:
        group.run(collective, torch.empty(3), torch.ones(3), action="sum")
    seconds = time.monotonic() - began
    time.sleep(0.3)
    return str(error.value), seconds, works[0].is_completed()


ENDINGS = {
    "dies": "rank 1 died while rank ",
    "stops": "rank 1 did not come within 6 s, while rank ",
    "sleeps": "rank 1 did not come within 6 s, while rank ",
    "fails": "rank 1 failed: no such row: 7",
    "fails after another": "rank 2 failed: no such row: 7",
    "is interrupted": "rank 1 was interrupted",
}


@pytest.mark.parametrize("does", ENDINGS)
def test_all_others_are_told_at_once_and_leave(does: str) -> None:
    silent = [] if does == "is interrupted" else [1]
    first, interrupted, last = mortal_ranks.run(3, _lose_rank_1, does, silent=silent)
    for message, seconds, ended in (first, last):
        assert message.startswith(ENDINGS[does])
        assert ("equally many steps" in message) == (does in ("stops", "sleeps"))
        assert seconds < 30  # half of the deadline
        assert ended
    if interrupted:
        _, seconds, ended = interrupted
        assert seconds < 30
        assert ended


def _wait_for_different_things(rank: int, process_group: Any) -> str:
    group = Group(process_group, deadline_seconds=1.5)

    def wait() -> None:
        if rank:
            group.run(dist.all_to_all_single, torch.empty(2), torch.ones(2), action="exchange rows")
        for _ in range(100):  # as in a wait for signals
            group.heartbeat("say hello", 1.0)
            time.sleep(0.1)

    with pytest.raises(LostRankError) as error:
        wait()
    return str(error.value)


def test_ranks_that_wait_for_different_things() -> None:
    for message in mortal_ranks.run(2, _wait_for_different_things):
        assert message.startswith("all ranks wait, and not for the same (rank 0 for others to say ")
        assert "; rank 1 for others to exchange rows)" in message


def _lose_the_store(rank: int, process_group: Any) -> str:
    group = Group(process_group, deadline_seconds=1.0)
    if rank == 1:
        mortal_ranks.lose_this_process(signal.SIGSTOP)

    class Stopped:
        """A store whose host is stopped."""

        def clone(self) -> None:
            time.sleep(20)

    group._failures._store = Stopped()
    with pytest.raises(LostRankError) as error:
        group.gather(b"it", "join")
    return str(error.value)


def test_a_store_that_does_not_answer() -> None:
    for message in mortal_ranks.run(3, _lose_the_store, silent=[1])[::2]:
        assert message.startswith("ranks ")
        assert "did not come within 1 s" in message
        assert "store, which rank 0 serves where no launcher does, does not answer" in message


def _stop_one_after_another(rank: int, process_group: Any, loses_store: bool) -> tuple[str, float]:
    group = Group(process_group, deadline_seconds=3.0)
    if rank == 1:
        mortal_ranks.lose_this_process(signal.SIGSTOP)
    if rank == 2:
        threading.Timer(1.5, mortal_ranks.lose_this_process, [signal.SIGSTOP]).start()
    if loses_store:
        store, began = group._failures._store, time.monotonic()

        class Stops:
            """A store whose host stops just before the deadline."""

            def clone(self) -> Any:
                time.sleep(20 if time.monotonic() > began + 2.3 else 0)
                return store.clone()

        group._failures._store = Stops()
    began = time.monotonic()
    with pytest.raises(LostRankError) as error:
        group.gather(b"it", "join")
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("loses_store", [False, True])
def test_all_that_stopped_are_named_at_once_and_in_time(loses_store: bool) -> None:
    outcomes = mortal_ranks.run(4, _stop_one_after_another, loses_store, silent=[1, 2])
    for message, seconds in outcomes[::3]:
        if loses_store:
            assert "1, 2" in message.split(" did not come within 3 s")[0]
        else:
            assert message.startswith("ranks 1, 2 did not come within 3 s")
        assert seconds < 4.5  # on a busy machine; 6.5 where each question to the store may take 3


def test_time_in_which_a_process_is_paused_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(3.0)
    for seconds, ended in [(1.0, False), (1.5, False), (1.0, True)]:
        now += seconds
        assert deadline.ended() == ended
    deadline = Deadline(60.0)
    now += 3600
    assert not deadline.ended()


def test_what_others_are_told() -> None:
    assert told(2, OperError("no room")) == "rank 2 failed: no room"
    assert told(2, ValueError("no room")) == "rank 2 failed: ValueError: no room"
    assert told(2, ValueError()) == "rank 2 failed: ValueError"
    assert told(2, KeyboardInterrupt()) == "rank 2 was interrupted"
    assert told(2, LostRankError("rank 1 failed: no room")) == "rank 1 failed: no room"


def test_groups_of_a_process_group_do_not_read_each_others_failures() -> None:
    assert mortal_ranks.run(2, _fail_and_start_anew) == [["rank 0 failed: once", b"\1"]] * 2


def _fail_and_start_anew(rank: int, process_group: Any) -> list[Any]:
    failed = Group(process_group, deadline_seconds=10)
    if rank == 0:
        failed.fail(OperError("once"))
    failed.gather(b"0", "fail")
    with pytest.raises(LostRankError) as error:
        failed.check()
    return [str(error.value), Group(process_group, 10).gather(b"\1", "start")[1 - rank]]


class _DeviceWork:
    """NCCL's work, whose `wait` has the stream wait and not the host, and which ends after so many
    looks at it; where `fails` is given, it raises that then."""

    def __init__(self, looks: int, fails: str = "") -> None:
        self.looks, self.waited, self._fails = looks, False, fails

    def is_completed(self) -> bool:
        self.looks -= 1
        if self.looks < 0 and self._fails:
            raise RuntimeError(self._fails)
        return self.looks < 0

    def wait(self, *timeout: Any) -> bool:
        assert not timeout, "NCCL's wait with a timeout may end the process"
        assert self.looks < 0, "it would wait without end"
        self.waited = True
        return True


class _WithNccl:
    """A process group with a backend for devices, which may be ended."""

    def __init__(self, group: Any) -> None:
        self._group, self.aborted = group, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _get_backend(self, device: torch.device) -> "_WithNccl":
        assert device.type == "cuda"
        return self

    def abort(self) -> None:
        self.aborted = True


def _on_device(
    rank: int, process_group: Any, looks: int, fails: str, dies: bool
) -> tuple[str, bool, int]:
    """A collective of a tensor that is on no CPU, by work that stands for NCCL's."""
    never_ends = looks == 10**9
    group, taken = Group(process_group, deadline_seconds=2 if never_ends else 60), list[int]()
    group.take_in = lambda: taken.append(1)
    group.gather(b"0", "join")
    if dies and rank == 1:
        mortal_ranks.lose_this_process(signal.SIGKILL)
    work, with_nccl = _DeviceWork(looks, fails), _WithNccl(process_group)
    there, error = torch.empty(3, device="meta"), ""
    finish = group.start(lambda *_, **__: work, there, action="sum")
    group._group, gloo = with_nccl, process_group  # type: ignore[assignment]
    try:
        with patch.object(group, "_abandon", lambda: None):  # of gloo's, which has nothing here
            finish()
    except LostRankError as lost:
        error = str(lost)
    group._group = gloo
    assert with_nccl.aborted == bool(error)
    return error, work.waited, len(taken)


@pytest.mark.parametrize("looks", [0, 3, 20_000])
def test_the_host_looks_for_the_end_of_a_devices_work(looks: int) -> None:
    for error, waited, taken in mortal_ranks.run(2, _on_device, looks, "", False):
        assert (error, waited) == ("", True)
        assert (taken > 0) == (looks > 3), "what others send is taken in while this rank waits"


@pytest.mark.parametrize(
    ("looks", "fails"), [(10**9, ""), (3, "NCCL error: remote process exited")]
)
def test_a_rank_that_dies_in_a_devices_work_is_named(looks: int, fails: str) -> None:
    found = mortal_ranks.run(2, _on_device, looks, fails, True, silent=[1])
    assert "rank 1" in found[0][0]
    assert not found[0][1]


def test_a_devices_work_that_does_not_end_is_told() -> None:
    for error, waited, _ in mortal_ranks.run(2, _on_device, 10**9, "", False):
        assert "all ranks wait" in error or "did not come within 2 s" in error
        assert not waited
