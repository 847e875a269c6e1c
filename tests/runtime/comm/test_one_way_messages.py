"""Segments that ranks send each other one way: when they are taken, how many may be on their way,
and what is told where a rank is gone."""

import signal
from functools import partial
from typing import Any

import pytest
import torch

from oper.base.errors import OperError
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.comm.shared_segment import Segment
from tests.support.runtime import mortal_ranks
from tests.support.runtime.shared_memory import open_descriptors

# A rank that died is found long before: these tests end in a minute.
DEADLINES = {signal.SIGKILL: 600.0, signal.SIGSTOP: 1.5}
MANY = 30  # more messages than a queue holds, unless the machine was set up for it


def numbered(value: int) -> Segment:
    """A segment that says a number."""
    segment = Segment.create(8, 8, "number")
    segment.tensor(0, [1], torch.int64).fill_(value)
    return segment


def number_of(segment: Segment) -> int:
    return int(segment.tensor(0, [1], torch.int64))


def send(node: Node, channel: int, number: int, value: int) -> None:
    segment = numbered(value)
    node.send(segment, channel, number)
    segment.close()


def receive(node: Node, channel: int, number: int, sender: int) -> int:
    segment = node.receive(numbered(0), channel, number, sender)
    value = number_of(segment)
    segment.close()
    return value


def test_a_rank_alone_sends_to_nobody() -> None:
    node = Node.join(None)
    node.send(numbered(1), node.new_channel(), 1)
    node.take_in()


def _send_among_rounds(rank: int, group: Any) -> Any:
    node = Node.join(group)
    one, other = node.new_channel(), node.new_channel()
    before = open_descriptors()
    node.gather(b"", "count")  # before anything is sent
    if rank == 0:
        send(node, one, 1, 11)
        send(node, other, 1, 12)
        send(node, one, 2, 13)
        send(node, one, 3, 14)
    shared = {peer: number_of(segment) for peer, segment in node.share(numbered(rank)).items()}
    if rank == 0:
        send(node, one, 4, 15)
    told = node.gather(b"%d" % rank, "say it")
    received = []
    if rank > 0:  # in another order than they were sent in; one of them never
        received = [receive(node, *which, 0) for which in [(one, 1), (other, 1), (one, 4)]]
    return shared, told, received, open_descriptors() - before


def test_segments_pass_between_rounds_in_any_order() -> None:
    shared, told = {0: 0, 1: 1, 2: 2}, {0: b"0", 1: b"1", 2: b"2"}
    received = (shared, told, [11, 12, 15], 0)
    assert mortal_ranks.run(3, _send_among_rounds) == [(shared, told, [], 0), received, received]


def _leave_unread(rank: int, group: Any) -> int:
    before = open_descriptors()
    node = Node.join(group)
    send(node, node.new_channel(), 1, rank)
    node.gather(b"", "send")
    node.close()
    return open_descriptors() - before


def test_what_was_never_taken_is_closed_with_the_node() -> None:
    assert mortal_ranks.run(2, _leave_unread) == [0, 0]


def _send_many(rank: int, group: Any, both: bool) -> list[int]:
    node = Node.join(group, deadline_seconds=60)
    signals, channel = Signals(node, ["sent"]), node.new_channel()
    if rank == 0 or both:
        for number in range(1, MANY + 1):
            send(node, channel, number, 100 * rank + number)
    signals.post("sent", 1)
    signals.wait("sent", 1, "send")
    if rank == 0 and not both:
        return []
    return [receive(node, channel, number, 1 - rank) for number in range(1, MANY + 1)]


@pytest.mark.parametrize("both", [False, True])
def test_more_than_a_queue_holds(both: bool) -> None:
    """Who waits for the sender's signal, or sends as much itself, makes room."""
    of_first, of_second = mortal_ranks.run(2, _send_many, both)
    assert of_second == list(range(1, MANY + 1))
    assert of_first == (list(range(101, 101 + MANY)) if both else [])


def _send_without_end(node: Node) -> None:
    channel = node.new_channel()
    for number in range(1, 10_000):
        send(node, channel, number, number)


def _send_while_rank_1(rank: int, group: Any, kind: signal.Signals) -> str:
    node = Node.join(group, DEADLINES[kind])
    if rank == 1:
        mortal_ranks.lose_this_process(kind)
    with pytest.raises(OperError) as error:
        _send_without_end(node)
    return str(error.value)


ENDINGS = {signal.SIGKILL: "rank 1 died", signal.SIGSTOP: "rank 1 did not come within 1.5 s"}


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_rank_that_does_not_take_what_is_sent_is_named(kind: signal.Signals) -> None:
    error = mortal_ranks.run(2, _send_while_rank_1, kind, silent=[1])[0]
    assert error.startswith(ENDINGS[kind])
    assert "while rank 0 waited for it to take memory that is handed to it" in error


def _receive_while_rank_1(rank: int, group: Any, kind: signal.Signals, sends: bool) -> str:
    node = Node.join(group, DEADLINES[kind])
    channel = node.new_channel()
    if rank == 1:
        if sends:
            send(node, channel, 1, 17)
        mortal_ranks.lose_this_process(kind)
    try:
        return f"received {receive(node, channel, 1, 1)}"
    except OperError as error:
        return str(error)


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_rank_that_does_not_send_is_named(kind: signal.Signals) -> None:
    run = partial(mortal_ranks.run, 2, _receive_while_rank_1, kind, silent=[1])
    error = run(False)[0]
    assert error.startswith(ENDINGS[kind])
    assert "while rank 0 waited for it to hand memory over" in error
    assert run(True)[0] == "received 17"  # what it sent before counts
