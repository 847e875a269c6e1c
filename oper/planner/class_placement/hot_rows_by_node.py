"""Hot rows on many nodes: the hottest share nodes, the others go where least work is.

In: how many rows of each hot class have one owner. Out: rows of each class on each rank. Rows are
cheaper to read near by, so a rank whose hot row takes it long gets faster if its node serves
more of everything (`bounds/node_loads_bound.py`). One such rank a node would need that of every
node: so the M hottest rows fill one node after the other, a row on each rank.
"""

import heapq

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.topology.topology import Topology


def place_by_node(rows: Ints, traffic: Floats, topology: Topology) -> Ints:
    """Rows of each class on each rank, [C, M], of `rows` [C] with `traffic` [C] bytes each."""
    counts = np.zeros((len(rows), topology.ranks), dtype=np.int64)
    order = np.argsort(-traffic, kind="stable")
    hottest_first = np.repeat(order, rows[order]).tolist()
    ranks = np.argsort(topology.node_of, kind="stable").tolist()
    work = traffic.tolist()
    least: list[tuple[float, int]] = []
    for c, rank in zip(hottest_first, ranks, strict=False):
        counts[c, rank] += 1
        least.append((work[c], rank))
    heapq.heapify(least)
    for c in hottest_first[len(ranks) :]:
        load, rank = least[0]
        counts[c, rank] += 1
        heapq.heapreplace(least, (load + work[c], rank))
    return counts
