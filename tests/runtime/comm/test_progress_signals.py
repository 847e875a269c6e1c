"""Boards: posting, waiting, and how waits end when a rank does not come."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from tests.support.runtime import mortal_ranks


def test_a_board_of_one_rank() -> None:
    signals = Signals(Node.join(None), ["published", "applied"])
    signals.wait("applied", 0, "begin")
    signals.post("published", 3)
    signals.wait("published", 3, "publish its gradients")
    signals.node.deadline_seconds = 0.3
    with pytest.raises(OperError, match=r"rank 0 did not come within 0.3 s"):
        signals.wait("applied", 1, "apply")
    signals.fail(OperError("out of luck"))
    with pytest.raises(OperError, match="rank 0 failed: out of luck"):
        signals.wait("published", 3, "publish its gradients")


def test_signals_are_waited_for_in_order() -> None:
    ops = native.ops()
    lines = torch.zeros(5 * 16 * 3 + 16, dtype=torch.int32)
    lines = lines[-lines.data_ptr() // 4 % 16 :][: 3 * 16].view(3, 16)
    for index, value in enumerate([5, 4, 6]):
        ops.post_signal(lines, index, value)
    assert lines[:, 0].tolist() == [5, 4, 6]
    assert not lines[:, 1:].any()
    assert ops.wait_signals(lines, 4, 0) == -1
    assert ops.wait_signals(lines, 5, 0) == 1
    assert ops.wait_signals(lines, 6, 0) == 0
    began = time.monotonic()
    assert ops.wait_signals(lines, 5, 80) == 1
    assert not lines[:, 1:].any()  # nobody is counted among those who sleep any more
    assert 0.07 < time.monotonic() - began < 30
    ops.post_signal(lines, 2, -1)  # failed: no sleep
    assert ops.wait_signals(lines, 4, 60_000) == 2
    with pytest.raises(IndexError):
        ops.post_signal(lines, 3, 0)
    with pytest.raises(ValueError, match="int32"):
        ops.post_signal(lines, 0, 1 << 31)
    with pytest.raises(ValueError, match=r"expected \[signals, 16\]"):
        ops.wait_signals(lines.view(-1), 0, 0)
    with pytest.raises(TypeError, match="expected dtype int32"):
        ops.wait_signals(lines.float(), 0, 0)
    with pytest.raises(ValueError, match="cache line"):
        ops.wait_signals(torch.zeros(64, dtype=torch.int32)[1 : 1 + 48].view(3, 16)[:1], 0, 0)


def _take_turns(rank: int, group: Any, turns: int) -> list[int]:
    """Each turn, one rank adds its number to a value that another one wrote before."""
    node = Node.join(group)
    signals = Signals(node, ["turn", "end"])
    shared = signals._segment.tensor(0, [16], torch.int32)[2:3]  # unused, beside a counter
    seen = []
    for turn in range(turns):
        if turn % node.ranks == rank:
            shared += rank + 1
        signals.post("turn", turn + 1)
        signals.wait("turn", turn + 1, "take its turn")
        seen.append(int(shared))
        signals.post("end", turn + 1)
        signals.wait("end", turn + 1, "end its turn")
    return seen


def test_what_was_written_before_a_post_is_seen_after_the_wait() -> None:
    turns = 300
    outcomes = mortal_ranks.run(3, _take_turns, turns)
    expected = torch.tensor([1, 2, 3]).repeat(turns // 3).cumsum(0).tolist()
    assert outcomes == [expected] * 3


def _wait_while_rank_1(rank: int, group: Any, does: str) -> tuple[str, float]:
    signals = Signals(Node.join(group, deadline_seconds=6 if does == "stops" else 60), ["done"])
    signals.post("done", 1)
    signals.wait("done", 1, "begin")
    if rank == 1:
        if does == "dies, and its worker lives on" and os.fork() == 0:
            time.sleep(40)  # longer than the others may take
            os._exit(0)
        time.sleep(0.2)  # the others are asleep by now
        if does == "fails":
            signals.fail(OperError("no room for its mailbox: 7 bytes are free"))
            signals.post("done", 2)  # comes too late
            time.sleep(60)
        if does == "leaves":
            signals.node.close()
            time.sleep(60)
        mortal_ranks.lose_this_process(signal.SIGSTOP if does == "stops" else signal.SIGKILL)
    signals.post("done", 2)
    began = time.monotonic()
    messages = set()
    for _ in range(2):  # a wait that failed fails again
        with pytest.raises(OperError) as error:
            signals.wait("done", 2, "publish its gradients (step 17)")
        messages.add(str(error.value))
    return sorted(messages)[0], time.monotonic() - began


DIED = "rank 1 died while rank {} waited for it to publish its gradients (step 17): see"
ENDINGS = {
    "dies": DIED,
    "dies, and its worker lives on": DIED,
    "leaves": "rank 1 left while rank {} waited for it to publish its gradients (step 17): the ",
    "stops": "rank 1 did not come within 6 s, while rank {} waited for it to publish its "
    "gradients (step 17) (rank 1, process ",
    "fails": "rank 1 failed: no room for its mailbox: 7 bytes are free",
}


@pytest.mark.parametrize("does", ENDINGS)
def test_a_rank_that_does_not_come_is_named(does: str) -> None:
    first, _, last = mortal_ranks.run(3, _wait_while_rank_1, does, silent=[1])
    for rank, (message, seconds) in ((0, first), (2, last)):
        assert message.startswith(ENDINGS[does].format(rank))
        assert message.endswith("is stopped)") == (does == "stops")
        assert "deadline_seconds" not in message
        assert (11.9 if does == "stops" else 0) < seconds < 30


def _finish_before_others(rank: int, group: Any) -> str:
    signals = Signals(Node.join(group), ["done"])
    if rank == 1:
        signals.post("done", 1)
        signals.node.close()
        return "left early"
    if rank == 2:
        time.sleep(0.5)
    signals.post("done", 1)
    signals.wait("done", 1, "finish")
    return "done"


def test_a_rank_may_leave_when_it_has_done_its_part() -> None:
    assert mortal_ranks.run(3, _finish_before_others) == ["done", "left early", "done"]


def _be_interrupted(rank: int, group: Any) -> float:
    signals = Signals(Node.join(group), ["done"])
    if rank == 1:
        time.sleep(60)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        signals.wait("done", 1, "finish")
    return time.monotonic() - began


def test_ctrl_c_ends_a_wait() -> None:
    seconds, _ = mortal_ranks.run(2, _be_interrupted, silent=[1])
    assert seconds < 30  # half of the deadline


def _use_in_forked_children(rank: int, group: Any) -> list[str]:
    node = Node.join(group)
    signals = Signals(node, ["done"])

    class Uses(torch.utils.data.Dataset[str]):
        """What signals say to workers that are forked while they are there."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> str:
            uses = [
                lambda: signals.post("done", 9),
                lambda: signals.wait("done", 1, "finish"),
                lambda: node.agree(b"", "nothing"),
                lambda: node.gather(b"", "say nothing"),
            ]
            with pytest.raises(OperError) as error:
                uses[index]()
            signals.fail(OperError("only a worker"))
            return str(error.value)

    loader = DataLoader(Uses(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    messages = list(loader)
    # The ranks go on as if nothing had been.
    signals.post("done", 1)
    signals.wait("done", 1, "finish")
    node.agree(b"plan", "the plan")
    assert all(node.liveness.alive(peer) for peer in node.peers)
    return messages


def test_forked_workers_get_an_error_and_do_no_harm() -> None:
    for outcome in mortal_ranks.run(2, _use_in_forked_children):
        assert len(outcome) == 4
        for message in outcome:
            assert "this process was forked from it" in message
