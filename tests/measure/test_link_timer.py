"""Links: all ranks read rows of each other, in a node and between nodes, and sum replicas."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oper.measure.link_timer import Amounts, LinkTimer
from oper.runtime.comm.node import Node
from tests.support.runtime import mortal_ranks


def _measure(rank: int, group: Any, nodes: tuple[int, ...]) -> list[float]:
    node = Node.join(group, 20.0, nodes)
    amounts = Amounts(1 << 18, 1 << 16, 1 << 12)
    links = LinkTimer(node, group, partial(dist.barrier, group), 64, amounts)
    slots = torch.randint((1 << 16) // 64, (links.read_rows,))
    for source in node.peers:
        assert (links._read(source, slots) == 1).all()
    assert (links._copy(slots).view(torch.float32) == 1).all()
    seconds = [links.read_seconds(offset, repetitions=2) for offset in range(3)]
    seconds += [links.reduce_seconds(replicas, repetitions=2) for replicas in (100, 1)]
    assert [len(of_kind) for of_kind in seconds] == [2] * 5
    return [second for of_kind in seconds for second in of_kind]


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 1, 0)])
def test_all_ranks_read_from_all(nodes: tuple[int, ...]) -> None:
    for seconds in mortal_ranks.run(3, _measure, nodes):
        assert min(seconds) > 0
