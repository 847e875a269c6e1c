"""Where rows are, as the simulator takes it: the holder set of each, and how tables are read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.plan.layout import Layout
from oper.tables.table import Table

FLOAT_BYTES = 4  # of a value of a pooled vector or a gradient
ROWS_AT_ONCE = 1 << 22


class Fetch(Enum):
    """How what a rank reads of a table comes to it.

    RAW: every access reads its row. DISTINCT: each row comes once a batch. POOLED_BY_NODE: the
    accesses of a bag to rows of another node are forwarded to this rank's proxy there, which adds
    up the rows and sends one vector for each bag that has any. POOLED_BY_RANK: each owner adds up
    its rows and sends a vector for every bag, as TorchRec's table-, column- and row-wise shards do.
    POOLED_BY_RANK_AND_NODE: those vectors are added up in the owners' node, as those of its
    table-row-wise shards are.
    """

    RAW = "raw"
    DISTINCT = "distinct"
    POOLED_BY_NODE = "pooled by node"
    POOLED_BY_RANK = "pooled by rank"
    POOLED_BY_RANK_AND_NODE = "pooled by rank and node"


@dataclass(frozen=True, eq=False)
class Part:
    """Columns of table number `table`, or all of it: the holder set of each row, [rows]. A row has
    `row_bytes` and `state_bytes` of the optimizer, and `dim` values."""

    table: int
    row_bytes: int
    state_bytes: int
    dim: int
    fetch: Fetch
    holder_set: NDArray[np.int32]


class Kind(NamedTuple):
    """What parts have in common that are counted together."""

    fetch: Fetch
    row_bytes: int
    state_bytes: int
    dim: int

    @property
    def vector_bytes(self) -> int:
        """Bytes of a pooled vector, or of a row's gradient."""
        return FLOAT_BYTES * self.dim


@dataclass(frozen=True, eq=False)
class Placement:
    """Holder set g is stored by the ranks that `holds[g]` marks, and rank i reads it from
    `source[g, i]`; both [G, M]. Rows that all hold are replicas, whose gradients go by an AllReduce
    of `allreduce` ("dense", "bitmap", "allgather"; anything where there are none). Others with
    several holders have one on each node, at one position, in training.
    relays: whether a distinct row of another node comes once a node, to the rank there at its
    owner's position, of which the others get it, and gradients go back the same way."""

    source: NDArray[np.integer]
    holds: NDArray[np.bool_]
    parts: Sequence[Part]
    allreduce: str = "none"
    relays: bool = True

    @cached_property
    def replicated(self) -> NDArray[np.bool_]:
        """Whether all of several ranks hold each set, [G]."""
        return np.asarray(self.holds.all(axis=1) & (self.holds.shape[1] > 1))

    @cached_property
    def copied(self) -> NDArray[np.bool_]:
        """Whether each holder set has several holders, but not all, [G]."""
        return np.asarray((self.holds.sum(axis=1) > 1) & ~self.replicated)

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """The first holder of each set, which is the only one of most, [G]."""
        return self.holds.argmax(axis=1)

    def kinds(self) -> Iterator[tuple[Kind, list[Part]]]:
        """The parts by kind."""
        found: dict[Kind, list[Part]] = {}
        for part in self.parts:
            kind = Kind(part.fetch, part.row_bytes, part.state_bytes, part.dim)
            found.setdefault(kind, []).append(part)
        return iter(found.items())


def of_layout(
    layout: Layout,
    tables: Sequence[Table],
    mode: str,
    fetch: Fetch,
    allreduce: str,
    pooled: Sequence[str] = (),
) -> Placement:
    """The placement of a plan; tables named in `pooled` are pooled by node."""
    groups, owners = len(layout.group_width), np.eye(layout.ranks, dtype=bool)
    ranks = np.arange(layout.ranks)
    source = np.concatenate(
        [layout.source.astype(np.int64), np.repeat(ranks[:, None], len(ranks), 1)]
    )
    parts = []
    for t, table in enumerate(tables):
        holder_set = np.empty(table.rows, dtype=np.int32)
        for first in range(0, table.rows, ROWS_AT_ONCE):
            rows = np.arange(first, min(first + ROWS_AT_ONCE, table.rows))
            found = layout.locate(t, rows)
            holder_set[rows] = np.where(found.group >= 0, found.group, groups + found.owner)
        how = Fetch.POOLED_BY_NODE if table.name in pooled else fetch
        parts.append(whole_table(t, table, mode, how, holder_set))
    return Placement(source, np.concatenate([layout.holds, owners]), parts, allreduce)


def whole_table(
    number: int, table: Table, mode: str, fetch: Fetch, holder_set: NDArray[np.int32]
) -> Part:
    """All columns of a table, whose rows have these holder sets, [rows]."""
    training = mode == "training"
    state = table.memory_bytes("training") - table.row_bytes if training else 0
    return Part(number, table.row_bytes, state, table.dim, fetch, holder_set)
