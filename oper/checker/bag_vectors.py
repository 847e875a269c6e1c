"""Count of the vectors that a log's bags send between nodes, if their tables are pooled.

A rank reads the rows of a bag from the nodes in a plan's layout; each other node that it reads from
sends one vector. In: a layout, the node of each rank, the bags of a table. Out: bags by reading
rank and node. These are exact counts; oper/cost/vectors_per_bag.py has the expected ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Ints
from oper.logs import Jagged
from oper.plan.layout import Layout
from oper.plan.plan import Plan

_CELLS = 1 << 22  # bags times nodes that are marked at once, a byte each


class SourceNodes(NamedTuple):
    """Node from which each of N accesses is read, [K, N], for the K kinds of ranks that read every
    holder set from equal nodes; and the kind of each rank, [M]."""

    nodes: Ints
    kind: Ints


def source_nodes(layout: Layout, node_of: Ints, table: int, rows: Ints) -> SourceNodes:
    """Return the nodes from which ranks read rows of a table; `node_of` [M] is the node of each
    rank."""
    located = layout.locate(table, rows)
    # Striped rows have one owner for all readers.
    owner = node_of[np.maximum(located.owner, 0)]
    if not len(layout.source):
        return SourceNodes(owner[None], np.zeros(layout.ranks, dtype=np.int64))
    of_groups, kind = np.unique(
        node_of[layout.source.astype(np.int64)], axis=1, return_inverse=True
    )
    group = np.maximum(located.group, 0)
    nodes = np.stack(
        [np.where(located.group >= 0, of_kind[group], owner) for of_kind in of_groups.T]
    )
    return SourceNodes(nodes, kind.ravel())


def bags_by_node(source: SourceNodes, lengths: Ints, nodes: int) -> Ints:
    """Count the bags with any row that a rank reads from a node, int64 [M, nodes].

    Bag n has the `lengths[n]` accesses that follow those of the bags before it. The column of a
    rank's own node counts the bags with rows that it reads without a vector, including copies.
    """
    bag = np.repeat(np.arange(len(lengths)), lengths)
    counted = np.stack([_bags_with(bag, of_kind, len(lengths), nodes) for of_kind in source.nodes])
    return counted[source.kind]


def vectors_between_nodes(bags: Ints, node_of: Ints) -> Ints:
    """Return the number of vectors that each rank would get for the bags counted by `bags_by_node`,
    int64 [M]."""
    return bags.sum(axis=1) - bags[np.arange(len(node_of)), node_of]


@dataclass(frozen=True)
class TableVectors:
    """Vectors that bags of a pooled table need from other nodes: `a_bag` is the mean over bags and
    reading ranks."""

    table: str
    bags: int
    a_bag: float


class PooledBags:
    """Counter of the vectors of a plan's pooled tables while a log is read."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._node_of = np.array(plan.topology.node_of, dtype=np.int64)
        pooled = {plan.table_index(name) for name in plan.pooled_tables}
        self._bags = dict.fromkeys(sorted(pooled), 0)
        self._vectors = dict.fromkeys(self._bags, 0)  # of all ranks

    def add(self, table: int, ids: Jagged) -> None:
        """Count the bags of one feature of a table; ignore tables that are not pooled."""
        if table not in self._bags:
            return
        lengths = np.diff(ids.offsets())
        source = source_nodes(self._plan.layout, self._node_of, table, ids.values)
        counted = bags_by_node(source, lengths, self._plan.topology.nodes)
        self._bags[table] += len(lengths)
        self._vectors[table] += int(vectors_between_nodes(counted, self._node_of).sum())

    @property
    def found(self) -> tuple[TableVectors, ...]:
        """Counted vectors, by table."""
        ranks = self._plan.ranks
        return tuple(
            TableVectors(
                self._plan.tables[table].name, bags, self._vectors[table] / max(bags * ranks, 1)
            )
            for table, bags in self._bags.items()
        )


def _bags_with(bag: Ints, node: Ints, bags: int, nodes: int) -> Ints:
    """Count the bags that have an access at each node, int64 [nodes]; `bag` ascends."""
    counted = np.zeros(nodes, dtype=np.int64)
    chunk = max(_CELLS // nodes, 1)
    for first in range(0, bags, chunk):
        part = slice(*np.searchsorted(bag, (first, first + chunk)).tolist())
        marks = np.zeros((min(chunk, bags - first), nodes), dtype=bool)
        marks[bag[part] - first, node[part]] = True
        counted += marks.sum(axis=0)
    return counted
