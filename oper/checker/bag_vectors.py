"""Counts the vectors that a log's bags need between nodes, where their tables travel pooled.

A rank reads the rows of a bag from the nodes that a plan's layout says; each other node that it
reads any from sends one vector. In: a layout, the node of each rank, the bags of a table. Out: bags
by reading rank and node. Nothing here is expected: oper/cost/vectors_per_bag.py expects it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Ints
from oper.logs import Jagged
from oper.plan.layout import Layout
from oper.plan.plan import Plan

_CELLS = 1 << 22  # bags times nodes that are marked at a time, a byte each


class SourceNodes(NamedTuple):
    """The node that each of N accesses is read from, [K, N], by the K kinds of ranks that read all
    holder sets alike; and the kind of each rank, [M]."""

    nodes: Ints
    kind: Ints


def source_nodes(layout: Layout, node_of: Ints, table: int, rows: Ints) -> SourceNodes:
    """Where ranks read rows of a table; `node_of` [M] is the node of each rank."""
    found = layout.locate(table, rows)
    # Striped rows have one owner, whoever reads them.
    owner = node_of[np.maximum(found.owner, 0)]
    if not len(layout.source):
        return SourceNodes(owner[None], np.zeros(layout.ranks, dtype=np.int64))
    of_groups, kind = np.unique(
        node_of[layout.source.astype(np.int64)], axis=1, return_inverse=True
    )
    group = np.maximum(found.group, 0)
    nodes = np.stack([np.where(found.group >= 0, each[group], owner) for each in of_groups.T])
    return SourceNodes(nodes, kind.ravel())


def bags_by_node(source: SourceNodes, lengths: Ints, nodes: int) -> Ints:
    """How many bags have any row that a rank reads from a node, int64 [M, nodes].

    Bag n has the `lengths[n]` accesses that follow those of the bags before it. In the column of a
    rank's own node are the bags with rows that it reads without a vector, of copies too.
    """
    bag = np.repeat(np.arange(len(lengths)), lengths)
    counted = np.stack([_bags_with(bag, each, len(lengths), nodes) for each in source.nodes])
    return counted[source.kind]


def vectors_between_nodes(bags: Ints, node_of: Ints) -> Ints:
    """The vectors that each rank would get for the bags that `bags_by_node` counted, int64 [M]."""
    return bags.sum(axis=1) - bags[np.arange(len(node_of)), node_of]


@dataclass(frozen=True)
class TableVectors:
    """The vectors that bags of a pooled table need from other nodes: `a_bag` on average over them
    and the ranks that may read them."""

    table: str
    bags: int
    a_bag: float


class PooledBags:
    """Counts the vectors of a plan's pooled tables while a log is read."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._node_of = np.array(plan.topology.node_of, dtype=np.int64)
        pooled = {plan.table_index(name) for name in plan.pooled_tables}
        self._bags = dict.fromkeys(sorted(pooled), 0)
        self._vectors = dict.fromkeys(self._bags, 0)  # of all ranks

    def add(self, table: int, ids: Jagged) -> None:
        """Count the bags of one feature of a table; of tables that are not pooled, nothing."""
        if table not in self._bags:
            return
        lengths = np.diff(ids.offsets())
        source = source_nodes(self._plan.layout, self._node_of, table, ids.values)
        counted = bags_by_node(source, lengths, self._plan.topology.nodes)
        self._bags[table] += len(lengths)
        self._vectors[table] += int(vectors_between_nodes(counted, self._node_of).sum())

    @property
    def found(self) -> tuple[TableVectors, ...]:
        """What was counted, by table."""
        ranks = self._plan.ranks
        return tuple(
            TableVectors(
                self._plan.tables[table].name, bags, self._vectors[table] / max(bags * ranks, 1)
            )
            for table, bags in self._bags.items()
        )


def _bags_with(bag: Ints, node: Ints, bags: int, nodes: int) -> Ints:
    """How many bags have an access at each node, int64 [nodes]; `bag` ascends."""
    counted = np.zeros(nodes, dtype=np.int64)
    chunk = max(_CELLS // nodes, 1)
    for first in range(0, bags, chunk):
        mine = slice(*np.searchsorted(bag, (first, first + chunk)).tolist())
        marks = np.zeros((min(chunk, bags - first), nodes), dtype=bool)
        marks[bag[mine] - first, node[mine]] = True
        counted += marks.sum(axis=0)
    return counted
