"""Places: where the rows of a plan that exists are, counted under the counters of any profile.

A layout has P = G + M places: its groups of explicit rows, then the stripes of each rank. The
address map itself finds them: read with "group g begins at (g, 0)" and "the stripes of rank r at
(G + r, 0)" it gives every row's place and its offset from the place's first row. With the class
of each row that makes a plan a matrix again, rows of class c in column k, in which §3.2 is linear
(classes.py). Columns are the M single owners, then one for each set of several holders
and the paths along which it is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets, single_owner_sets
from oper.plan.layout import SLOT_BITS, SLOT_MASK, RankMap
from oper.plan.plan import Plan

_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows first … first + n - 1 of a table, [n] each."""

    table: int
    first: int
    place: Ints
    offset: Ints


class RowClassifier(Protocol):
    """Says of rows which of its `classes` they are of."""

    classes: int

    def find(self, chunk: Chunk) -> NDArray[np.int32]:
        """The class of each row of a chunk, int32 [n]."""


class RowLocator:
    """The places of a plan's rows, and the K columns that they are counted in."""

    def __init__(self, plan: Plan, candidates: HolderSets | None = None) -> None:
        """`candidates` are holder sets that get a column though the plan may not use them."""
        from oper.plan.address_map import AddressMap

        layout = plan.layout
        self.layout = layout
        listed, ranks = len(layout.group_width), layout.ranks
        number = np.arange(listed + ranks, dtype=np.int64) << SLOT_BITS
        # A rank map that no rank has: the "address" of a row is its place and offset.
        marker = RankMap(
            0,
            number[:listed],
            np.broadcast_to(number[listed:], layout.stripe_base.shape),
        )
        self._map = AddressMap(plan.tables, layout, marker)

        groups = single_owner_sets(ranks)
        column = np.empty(listed + ranks, dtype=np.int64)
        column[listed:] = np.arange(ranks)
        # On unlike links the same holders may be read along other paths.
        known = {_key(groups, k): k for k in range(ranks)}
        used = HolderSets(layout.path, layout.holds)
        for source in (used, candidates) if candidates is not None else (used,):
            for g in range(len(source)):
                key = _key(source, g)
                if key not in known:
                    known[key] = len(groups)
                    groups = groups + source.take([g])
                if source is used:
                    column[g] = known[key]
        self.groups = groups  # [K]
        self.column = column  # [P]

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @cached_property
    def counted(self) -> Ints:
        """The column of each place in counts that tell striped rows from listed ones, [P]:
        K columns for listed rows, then M for the stripes."""
        listed = len(self.layout.group_width)
        stripes = len(self.groups) + np.arange(self.ranks)
        return np.concatenate([self.column[:listed], stripes])

    def chunks(self, table: int) -> Iterator[Chunk]:
        """All rows of a table, in order."""
        import torch

        rows = int(self.layout.rows[table])
        for first in range(0, rows, _CHUNK_ROWS):
            ids = torch.arange(first, min(first + _CHUNK_ROWS, rows))
            found: Ints = self._map.translate(table, ids).numpy()
            yield Chunk(table, first, found >> SLOT_BITS, found & SLOT_MASK)

    def slots(self, chunk: Chunk, index: NDArray[np.integer[Any]]) -> Ints:
        """The slots of rows `index` [N] of a chunk on each rank, [N, M]; -1 where there is none."""
        place, offset = chunk.place[index], chunk.offset[index]
        listed = len(self.layout.group_width)
        striped = place >= listed
        slots = np.full((len(place), self.ranks), -1, dtype=np.int64)
        base = self.layout.base[place[~striped]]
        slots[~striped] = np.where(base >= 0, base + offset[~striped, None], -1)
        owner = place[striped] - listed
        slots[striped, owner] = self.layout.stripe_base[chunk.table, owner] + offset[striped]
        return slots

    def owner_slots(self, chunk: Chunk, index: NDArray[np.integer[Any]]) -> Ints:
        """The slots of rows `index` [N] of a chunk, all with one owner, there."""
        listed = len(self.layout.group_width)
        owner = self.layout.holds.argmax(axis=1)
        first = np.concatenate(
            [self.layout.base[np.arange(listed), owner], self.layout.stripe_base[chunk.table]]
        )
        return np.asarray(first[chunk.place[index]] + chunk.offset[index])

    def count_table(self, table: int, finder: RowClassifier) -> Ints:
        """Rows of a table by class and counted column, int64 [C, K + M]."""
        shape = (finder.classes, len(self.groups) + self.ranks)
        counts = np.zeros(shape, dtype=np.int64)
        for chunk in self.chunks(table):
            cell = finder.find(chunk) * np.int64(shape[1]) + self.counted[chunk.place]
            counts += np.bincount(cell, minlength=counts.size).reshape(shape)
        return counts

    def count(self, finder: RowClassifier) -> Ints:
        """The same for all tables together."""
        tables = range(len(self.layout.rows))
        return np.asarray(sum(self.count_table(table, finder) for table in tables))

    def together(self, counts: Ints) -> Ints:
        """Counts with striped rows among their owners' others, [C, K]."""
        whole = counts[:, : len(self.groups)].copy()
        whole[:, : self.ranks] += counts[:, len(self.groups) :]
        return whole


def _key(groups: HolderSets, g: int) -> tuple[bytes, bytes]:
    return groups.holds[g].tobytes(), groups.path[g].astype(np.uint16).tobytes()
