"""Holder sets: which ranks hold a row, and from which of them each rank reads it.

A holder may read another rank's copy, if its own memory is slower than the link to that rank. In
training it never does: each rank updates its own copy and reads it; and a row has one owner, a copy
on every rank, or one on each node, at the same position in all nodes. The cost depends only on the
sums over the rows of each holder set.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.topology.topology import Topology


@dataclass(frozen=True)
class HolderSets:
    """Sources and holders of the rows of G groups: rank i reads the rows of group g from rank
    `source[g, i]`, and stores a copy if `holds[g, i]`. Shapes [G, M]."""

    source: NDArray[np.uint16]
    holds: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def copies(self) -> NDArray[np.int64]:
        return self.holds.sum(axis=1)

    @property
    def everywhere(self) -> NDArray[np.bool_]:
        """True for groups of which all ranks, two or more, hold a copy, [G]."""
        return (self.copies == self.holds.shape[1]) & (self.copies > 1)

    @property
    def on_some(self) -> NDArray[np.bool_]:
        """True for groups of which several ranks, but not all, hold a copy, [G]: in training one
        per node."""
        return (self.copies > 1) & ~self.everywhere

    @property
    def owner(self) -> NDArray[np.int64]:
        """The only holder of each group, -1 if there are several."""
        return np.where(self.copies == 1, self.holds.argmax(axis=1), -1)

    @property
    def starts_with_single_owners(self) -> bool:
        """True if the first M sets are those of `single_owner_sets`."""
        ranks = self.source.shape[1]
        owners = np.arange(ranks, dtype=self.source.dtype)[:, None]
        first = self.source[:ranks]
        return len(first) == ranks and bool((first == owners).all())

    @property
    def readers(self) -> NDArray[np.int64]:
        """Number of ranks that read each group from each rank, [G, M]."""
        sets, ranks = self.source.shape
        read = np.arange(sets)[:, None] * ranks + self.source
        return np.bincount(read.ravel(), minlength=sets * ranks).reshape(sets, ranks)

    def __add__(self, other: "HolderSets") -> "HolderSets":
        return HolderSets(
            np.concatenate([self.source, other.source]), np.concatenate([self.holds, other.holds])
        )

    def take(self, index: Any) -> "HolderSets":
        return HolderSets(self.source[index], self.holds[index])


def single_owner_sets(ranks: int) -> HolderSets:
    """Return one group per rank: rows that it alone holds and all ranks read from it."""
    source = np.repeat(np.arange(ranks, dtype=np.uint16)[:, None], ranks, axis=1)
    return HolderSets(source, np.eye(ranks, dtype=bool))


def everywhere_set(ranks: int) -> HolderSets:
    """Return one group: rows on all ranks, each of which reads its own copy."""
    return HolderSets(np.arange(ranks, dtype=np.uint16)[None], np.ones((1, ranks), dtype=bool))


def cheapest_holder_sets(holds: NDArray[np.bool_], read_prices: Floats) -> HolderSets:
    """Return groups with the holders `holds` [G, M], each rank reading from the holder with the
    least of its `read_prices`, [reader, source], or [G, reader, source] per group. In ties a rank
    reads its own copy, else that of the lowest rank."""
    ranks = np.arange(holds.shape[1])
    price = np.where(holds[:, None, :], read_prices, np.inf)
    source = price.argmin(axis=2)
    own_price = read_prices.diagonal(axis1=-2, axis2=-1)
    reads_own = holds & (own_price <= price.min(axis=2))
    return HolderSets(np.where(reads_own, ranks, source).astype(np.uint16), holds)


def copies_over_nodes(topology: Topology, copies: int) -> NDArray[np.bool_]:
    """Return the ranks that hold one of `copies` copies, as a mask [M]: one rank of each node in
    turn, then the next of each, because copies on other nodes save most."""
    node_of = np.asarray(topology.node_of)
    turn = np.array([int((node_of[:r] == node_of[r]).sum()) for r in range(topology.ranks)])
    holds = np.zeros(topology.ranks, dtype=bool)
    holds[np.lexsort((node_of, turn))[:copies]] = True
    return holds


def per_node_sets(topology: Topology, read_prices: Floats) -> HolderSets:
    """Return groups with one copy per node, held by the t-th rank of every node, which serves its
    node if `read_prices` [reader, source] make that the cheapest."""
    node_of = np.asarray(topology.node_of)
    position = np.array([int((node_of[:r] == node_of[r]).sum()) for r in range(topology.ranks)])
    holds = np.stack([position == t for t in range(int(position.max()) + 1)])
    return cheapest_holder_sets(holds, read_prices)


def trained_node_sets(topology: Topology) -> HolderSets:
    """Return the per-node sets of training, in which a rank always reads the copy of its own node,
    because its gradient is added there."""
    other_node = topology.masks()["other_node"]
    return per_node_sets(topology, other_node.astype(np.float64))


@dataclass
class Sums:
    """Sums over the rows of each group, shapes [G]: the cost depends on nothing else.

    The sums of nodes, [G, K], have a column for each of the K sizes of nodes whose ranks read rows
    of other nodes through a relay (oper/topology/relays.py); their D is the chance that any rank of
    the node touches the row.
    """

    rows: Floats
    memory_bytes: Floats  # Σ m
    row_bytes: Floats  # Σ S
    accesses: Floats  # Σ accesses in the log
    read_rows: Floats  # Σ R
    read_bytes: Floats  # Σ S·R
    gradient_bytes: Floats  # Σ S·D
    union_bytes: Floats  # Σ S·U
    gather_bytes: Floats  # Σ (S + 4)·D, carried by an allgather of (id, row)
    node_rows: Floats  # Σ D of a node, [G, K]
    node_bytes: Floats  # Σ S·D of a node, [G, K]
    # The parts of read_rows, read_bytes and gradient_bytes that are of pooled tables, which no
    # relay reads.
    pooled_read_rows: Floats
    pooled_read_bytes: Floats
    pooled_gradient_bytes: Floats

    @property
    def memory_read_bytes(self) -> Floats:
        """Bytes that a rank reads from its own memory if the rows are there: rows of pooled tables
        once each, because repeats come from a cache."""
        return np.asarray(self.read_bytes - self.pooled_read_bytes + self.pooled_gradient_bytes)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Sums)))

    def append(self, other: "Sums") -> "Sums":
        """Return these groups followed by those of `other`."""
        return Sums(
            *(np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(Sums))
        )

    def total(self, which: NDArray[np.bool_]) -> "Sums":
        """Return the sums over the groups in `which` [G], as one entry without a dimension."""
        return Sums(*(np.asarray(getattr(self, f.name)[which].sum(axis=0)) for f in fields(Sums)))

    def by_row(self, weigh: Callable[[Floats], Floats]) -> "Sums":
        """Return these sums after `weigh`, [G] -> [groups], is applied to each, column by column
        for the sums of nodes."""
        return Sums(
            *(
                weigh(values)
                if values.ndim == 1
                else np.stack([weigh(of_size) for of_size in values.T], axis=1)
                if values.shape[1]
                else np.zeros((len(weigh(self.rows)), 0))
                for values in (getattr(self, f.name) for f in fields(Sums))
            )
        )

    @staticmethod
    def of_rows(
        row_bytes: Floats,
        memory_bytes: Floats,
        accesses: Floats,
        R: Floats,
        D: Floats,
        U: Floats,
        D_of_node: Floats,
        pooled: NDArray[np.bool_] | bool = False,
    ) -> "Sums":
        """Return one entry per row: rows of S = `row_bytes` bytes, which a rank reads R times per
        iteration and touches with chance D; any rank touches them with chance U, and any rank of a
        node with chance `D_of_node` [rows, K]. `pooled` marks the rows of pooled tables."""
        of_nodes = np.where(np.broadcast_to(pooled, row_bytes.shape)[:, None], 0.0, D_of_node)
        return Sums(
            rows=np.ones(len(row_bytes)),
            memory_bytes=memory_bytes,
            row_bytes=row_bytes,
            accesses=accesses,
            read_rows=R,
            read_bytes=row_bytes * R,
            gradient_bytes=row_bytes * D,
            union_bytes=row_bytes * U,
            gather_bytes=(row_bytes + 4) * D,
            node_rows=of_nodes,
            node_bytes=row_bytes[:, None] * of_nodes,
            pooled_read_rows=R * pooled,
            pooled_read_bytes=row_bytes * R * pooled,
            pooled_gradient_bytes=row_bytes * D * pooled,
        )

    @staticmethod
    def zeros(groups: int, sizes: int = 0) -> "Sums":
        """Return the sums of no rows, for `sizes` sizes of nodes."""
        of_nodes = ("node_rows", "node_bytes")
        shapes = ((groups, sizes) if f.name in of_nodes else groups for f in fields(Sums))
        return Sums(*map(np.zeros, shapes))
