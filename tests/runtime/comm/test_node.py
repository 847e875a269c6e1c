"""Nodes: who shares memory, what is passed on, and what is told when ranks differ or are gone."""

import os
import resource
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm.deadline import Deadline
from oper.runtime.comm.messages import Messages
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment
from tests.support.runtime import mortal_ranks


def share_rank_numbers(node: Node) -> dict[int, int]:
    """What each rank of the node wrote into its segment."""
    own = Segment.create(8, 8, "number")
    own.tensor(0, [1], torch.int64).fill_(node.rank)
    segments = node.share(own)
    return {r: int(s.tensor(0, [1], torch.int64)) for r, s in segments.items()}


def test_one_rank_is_a_node() -> None:
    node = Node.join(None)
    assert (node.rank, node.ranks, node.peers) == (0, 1, (0,))
    assert share_rank_numbers(node) == {0: 0}
    assert node.gather(b"it", "say it") == {0: b"it"}
    node.agree(b"plan", "the plan")
    assert node.liveness.alive(0)
    node.close()


def _join_with_many_descriptors(rank: int, group: Any) -> dict[int, int]:
    opened = [os.dup(0) for _ in range(1100)]
    node = Node.join(group)
    numbers = share_rank_numbers(node)
    node.close()
    for descriptor in opened:
        os.close(descriptor)
    return numbers


def test_ranks_meet_where_more_is_open_than_select_takes() -> None:
    """select() refuses descriptors above 1,023; engines of many ranks hold more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 1200:
        pytest.skip(f"1,200 open files are needed here, and {most} allowed")
    assert mortal_ranks.run(2, _join_with_many_descriptors) == [{0: 0, 1: 1}] * 2


@pytest.mark.parametrize("nodes", [(0,), (0, 0, 0), ("a", "b"), 5])
def test_node_numbers_that_are_not_one_a_rank(nodes: Any) -> None:
    for error in mortal_ranks.run(2, _join_error, nodes):
        assert error.startswith(
            "nodes: expected an integer for each of the 2 ranks, equal for ranks that "
        )


def _join_error(rank: int, group: Any, nodes: Any) -> str:
    with pytest.raises(OperError) as caught:
        Node.join(group, nodes=nodes)
    return str(caught.value)


def _join_in_groups(rank: int, group: Any) -> Any:
    before = len(os.listdir("/proc/self/fd"))
    whole = Node.join(group)
    numbers = share_rank_numbers(whole)
    told = whole.gather(f"I am {rank}".encode(), "introduce itself")
    whole.agree(b"plan", "the plan")
    whole.close()
    del whole
    left_open = len(os.listdir("/proc/self/fd")) - before
    parted = Node.join(group, nodes=[0, 1, 0])
    parted_numbers = share_rank_numbers(parted)
    # Ranks of a group are numbered within it.
    some = dist.new_group([1, 2])
    of_some = None
    if rank > 0:
        node = Node.join(some)
        of_some = node.rank, node.ranks, share_rank_numbers(node)
    else:
        with pytest.raises(OperError, match="no member"):
            Node.join(some)
    return numbers, told, left_open, parted_numbers, of_some


def test_ranks_share_memory_with_those_of_their_node_and_group() -> None:
    outcomes = mortal_ranks.run(3, _join_in_groups)
    everyone = {0: 0, 1: 1, 2: 2}
    told = {r: f"I am {r}".encode() for r in range(3)}
    both = {0: 0, 1: 1}
    assert outcomes == [
        (everyone, told, 0, {0: 0, 2: 2}, None),
        (everyone, told, 0, {1: 1}, (0, 2, both)),
        (everyone, told, 0, {0: 0, 2: 2}, (1, 2, both)),
    ]


def _share_late(rank: int, group: Any) -> int:
    node = Node.join(group)
    if rank == 0:
        time.sleep(0.3)
    return len(share_rank_numbers(node))


def test_more_ranks_than_a_queue_holds_messages() -> None:
    assert mortal_ranks.run(13, _share_late) == [13] * 13


def test_what_a_rank_did_before_it_died_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node.join(None)
    monkeypatch.setattr(node.liveness, "alive", lambda rank: False)
    answers = iter([[1, 2], [2], [1], []])
    with pytest.raises(OperError, match="rank 2 died while rank 0 waited for it to come"):
        node.liveness.check(lambda: next(answers), "come", Deadline(60))
    node.liveness.check(lambda: next(answers), "come", Deadline(60))


def _take_longer(rank: int, group: Any, extra_seconds: float) -> str:
    node = Node.join(group)
    node.deadline_seconds = 0.3
    if rank == 1:
        time.sleep(1)
    try:
        node.gather(b"", "work", extra_seconds)
    except OperError as error:
        return str(error)
    return "done"


def test_a_rank_may_be_given_more_time_for_its_work() -> None:
    assert mortal_ranks.run(2, _take_longer, 10.0) == ["done"] * 2
    error, _ = mortal_ranks.run(2, _take_longer, 0.1, silent=[1])
    assert error.startswith("rank 1 did not come within 0.4 s, while rank 0 waited for it to work")


def _disagree(rank: int, group: Any) -> None:
    Node.join(group).agree(b"plan B" if rank == 1 else b"plan A", "the plan")


def test_ranks_that_differ_are_named_on_all_ranks() -> None:
    for outcome in mortal_ranks.run(3, _disagree):
        assert isinstance(outcome, OperError)
        assert str(outcome).startswith("the plan: expected the same on all ranks")
        assert "ranks 0, 2: " in str(outcome)
        assert "rank 1: " in str(outcome)


def _join_while_rank_1(rank: int, group: Any, does: str) -> tuple[str, float]:
    if rank == 1:
        if does == "dies after telling its name":
            kill = partial(os.kill, os.getpid(), signal.SIGKILL)
            mock.patch.object(Messages, "exchange", side_effect=lambda *_: kill()).start()
        else:
            mortal_ranks.lose_this_process(signal.SIGKILL if does == "dies" else signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(OperError) as error:
        Node.join(group, deadline_seconds=1.5 if does == "stops" else 60)
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("does", ["dies", "dies after telling its name", "stops"])
def test_a_rank_that_does_not_join_is_named(does: str) -> None:
    first, _, last = mortal_ranks.run(3, _join_while_rank_1, does, silent=[1])
    for message, seconds in (first, last):
        assert message.startswith("rank 1 d")
        assert "to join" in message
        assert (1.4 if does == "stops" else 0) < seconds < 30


def _share_while_rank_1_dies(rank: int, group: Any) -> str:
    node = Node.join(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(OperError) as error:
        share_rank_numbers(node)
    return str(error.value)


def test_a_rank_that_dies_before_it_shares_is_named() -> None:
    first, dead, last = mortal_ranks.run(3, _share_while_rank_1_dies)
    assert dead is None
    for message in (first, last):
        assert message.startswith("rank 1 died while rank")


def _receive_from_strangers(rank: int, group: Any, folder: Path) -> Any:
    node = Node.join(group)
    # Other files are opened and closed meanwhile, by threads of the group.
    sent = os.open(folder / f"sent by {rank}", os.O_CREAT | os.O_RDWR)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for message in (b"", b"hello", bytes(28), bytes(70000)):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent.to_bytes(4, "little"))]
            stranger.sendmsg([message], rights, 0, node._messages._socket.getsockname())
    numbers = share_rank_numbers(node)
    os.close(sent)
    with os.scandir("/proc/self/fd") as open_files:
        targets = [target_of(file) for file in open_files]
    return numbers, [target for target in targets if "sent by" in target]


def target_of(file: os.DirEntry[str]) -> str:
    """Return the name of an open file; "" of one that is closed meanwhile."""
    try:
        return os.readlink(file.path)
    except FileNotFoundError:
        return ""


def test_messages_of_strangers_are_dropped(tmp_path: Path) -> None:
    """Their files are closed as well."""
    assert mortal_ranks.run(2, _receive_from_strangers, tmp_path) == [({0: 0, 1: 1}, [])] * 2


def _be_killed(rank: int, group: Any, folder: Path) -> None:
    node = Node.join(group)
    share_rank_numbers(node)
    (folder / str(rank)).write_bytes(node._messages._socket.getsockname()[1:])
    node.gather(b"", "write")
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_ranks_that_were_killed(tmp_path: Path) -> None:
    assert mortal_ranks.run(2, _be_killed, tmp_path) == [None, None]
    sockets = Path("/proc/net/unix").read_text()
    for rank in range(2):
        name = (tmp_path / str(rank)).read_text()
        assert name.startswith("oper-")
        assert name not in sockets
    assert not list(Path("/dev/shm").glob("oper*"))
