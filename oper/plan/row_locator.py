"""Places of the rows of an existing plan, by holder set and by slot.

A layout has P = G + M extents, runs of consecutive slots at each of their holders: its groups of
listed rows, then the stripes of each rank. The address map itself finds them: a map in which group
g begins at (g, 0) and the stripes of rank r at (G + r, 0) gives every row's extent and its offset
there. With the class of each row a plan becomes a matrix, rows of class c in holder set k, in which
the cost of §3.2 is linear. The K holder sets are the M single owners, then one for each combination
of several holders and the sources of their readers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor
from oper.cost.holder_sets import HolderSets, single_owner_sets
from oper.plan.layout import SLOT_BITS, SLOT_MASK, RankMap
from oper.plan.plan import Plan

_CHUNK_ROWS = 1 << 20  # a few arrays of 8 MiB at a time


@dataclass(frozen=True)
class Chunk:
    """Places of rows first … first + n - 1 of a table: each row's extent and its offset there,
    packed like rank and slot in an address, int64 [n]."""

    table: int
    first: int
    address: Ints

    def __len__(self) -> int:
        return len(self.address)

    @cached_property
    def extent(self) -> Ints:
        return self.address >> SLOT_BITS

    @cached_property
    def offset(self) -> Ints:
        return self.address & SLOT_MASK


class RowClassifier(Protocol):
    """Assignment of rows to `classes` classes."""

    classes: int

    def find(self, chunk: Chunk) -> NDArray[np.int32]:
        """Return the class of each row of a chunk, int32 [n]."""


class RowLocator:
    """Extents of a plan's rows, and the K holder sets by which they are counted."""

    def __init__(self, plan: Plan, candidates: HolderSets | None = None) -> None:
        """Index a plan's rows; `candidates` are further holder sets, which the plan need not
        use."""
        from oper.plan.address_map import AddressMap

        layout = plan.layout
        self.layout = layout
        listed, ranks = len(layout.group_width), layout.ranks
        number = np.arange(listed + ranks, dtype=np.int64) << SLOT_BITS
        # A rank map of no real rank: the "address" of a row is its extent and offset.
        marker = RankMap(
            0,
            number[:listed],
            np.broadcast_to(number[listed:], layout.stripe_base.shape),
        )
        self._map = AddressMap(plan.tables, layout, marker)

        sets = single_owner_sets(ranks)
        column = np.empty(listed + ranks, dtype=np.int64)
        column[listed:] = np.arange(ranks)
        # On heterogeneous links equal holders may have different sources.
        known = {_key(sets, k): k for k in range(ranks)}
        used = HolderSets(layout.source, layout.holds)
        for source in (used, candidates) if candidates is not None else (used,):
            for g in range(len(source)):
                key = _key(source, g)
                if key not in known:
                    known[key] = len(sets)
                    sets = sets + source.take([g])
                if source is used:
                    column[g] = known[key]
        self.holder_sets = sets  # [K]
        self.holder_set_of = column  # [P]

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @cached_property
    def count_column(self) -> Ints:
        """Column of each extent, int64 [P], in counts that separate striped rows: K columns of
        holder sets for listed rows, then M columns of owners for striped ones."""
        listed = len(self.layout.group_width)
        stripes = len(self.holder_sets) + np.arange(self.ranks)
        return np.concatenate([self.holder_set_of[:listed], stripes])

    def chunks(self, table: int) -> Iterator[Chunk]:
        """Yield all rows of a table, in order, in chunks."""
        import torch

        rows = int(self.layout.rows[table])
        for first in range(0, rows, _CHUNK_ROWS):
            ids = torch.arange(first, min(first + _CHUNK_ROWS, rows))
            addresses: Ints = self._map.translate(table, ids).numpy()
            yield Chunk(table, first, addresses)

    def slots(self, chunk: Chunk, index: NDArray[np.integer[Any]]) -> Ints:
        """Return the slots of rows `index` [N] of a chunk on each rank, int64 [N, M]; -1: not
        there."""
        extent, offset = chunk.extent[index], chunk.offset[index]
        listed = len(self.layout.group_width)
        striped = extent >= listed
        slots = np.full((len(extent), self.ranks), -1, dtype=np.int64)
        base = self.layout.base[extent[~striped]]
        slots[~striped] = np.where(base >= 0, base + offset[~striped, None], -1)
        owner = extent[striped] - listed
        slots[striped, owner] = self.layout.stripe_base[chunk.table, owner] + offset[striped]
        return slots

    def owner_slots(self, chunk: Chunk, index: NDArray[np.integer[Any]]) -> Ints:
        """Return the slots, at their owners, of rows `index` of a chunk with one owner each: int64
        [N]."""
        listed = len(self.layout.group_width)
        owner = self.layout.holds.argmax(axis=1)
        first = np.concatenate(
            [self.layout.base[np.arange(listed), owner], self.layout.stripe_base[chunk.table]]
        )
        return np.asarray(first[chunk.extent[index]] + chunk.offset[index])

    def count_table(self, table: int, finder: RowClassifier) -> Ints:
        """Count the rows of a table by class and `count_column`, int64 [C, K + M]."""
        shape = (finder.classes, len(self.holder_sets) + self.ranks)
        counts = np.zeros(shape, dtype=np.int64)
        for chunk in self.chunks(table):
            count_rows(chunk, self.count_column, finder.find(chunk), counts)
        return counts

    def count(self, finder: RowClassifier) -> Ints:
        """Count the rows of all tables by class and `count_column`, int64 [C, K + M]."""
        tables = range(len(self.layout.rows))
        return np.asarray(sum(self.count_table(table, finder) for table in tables))

    def by_holder_set(self, counts: Ints) -> Ints:
        """Return counts by `count_column` as counts by holder set, int64 [C, K]."""
        whole = counts[:, : len(self.holder_sets)].copy()
        whole[:, : self.ranks] += counts[:, len(self.holder_sets) :]
        return whole

    def counts_in(self, sets: HolderSets, counts: Ints) -> Ints:
        """Return `by_holder_set` with a column for each of `sets`, which include all of this
        plan's."""
        place = {_key(sets, k): k for k in reversed(range(len(sets)))}
        counts_of_sets = np.zeros((len(counts), len(sets)), dtype=np.int64)
        for k, rows in enumerate(self.by_holder_set(counts).T):
            counts_of_sets[:, place[_key(self.holder_sets, k)]] += rows
        return counts_of_sets


def count_rows(chunk: Chunk, column: Ints, row_class: NDArray[np.int32], counts: Ints) -> None:
    """Add the rows of a chunk to `counts` [C, K], given each one's class, int32 [n], and the column
    of each extent, int64 [P]."""
    native.ops().count_rows(
        as_int64(chunk.address), as_int64(column), as_tensor(row_class), as_int64(counts)
    )


def _key(sets: HolderSets, g: int) -> tuple[bytes, bytes]:
    return sets.holds[g].tobytes(), sets.source[g].astype(np.uint16).tobytes()
