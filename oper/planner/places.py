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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper import native
from oper.cost import Floats, Groups, single_groups
from oper.layout import SLOT_BITS, SLOT_MASK, RankMap
from oper.plan import Plan
from oper.planner.classes import Classes, Ints
from oper.planner.profile import Profile
from oper.tensors import as_int64, as_tensor
from oper.topology import Topology

_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows first … first + n - 1 of a table, [n] each."""

    table: int
    first: int
    place: Ints
    offset: Ints


class Places:
    """The places of a plan's rows, and the K columns that they are counted in."""

    def __init__(self, plan: Plan, candidates: Groups | None = None) -> None:
        """`candidates` are holder sets that get a column though the plan may not use them."""
        from oper.address_map import AddressMap

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

        groups = single_groups(ranks)
        column = np.empty(listed + ranks, dtype=np.int64)
        column[listed:] = np.arange(ranks)
        # On unlike links the same holders may be read along other paths.
        known = {_key(groups, k): k for k in range(ranks)}
        used = Groups(layout.path, layout.holds)
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

    def count_table(self, table: int, finder: "ClassFinder") -> Ints:
        """Rows of a table by class and counted column, int64 [C, K + M]."""
        shape = (finder.classes, len(self.groups) + self.ranks)
        counts = np.zeros(shape, dtype=np.int64)
        for chunk in self.chunks(table):
            cell = finder.find(chunk) * np.int64(shape[1]) + self.counted[chunk.place]
            counts += np.bincount(cell, minlength=counts.size).reshape(shape)
        return counts

    def count(self, finder: "ClassFinder") -> Ints:
        """The same for all tables together."""
        tables = range(len(self.layout.rows))
        return np.asarray(sum(self.count_table(table, finder) for table in tables))

    def together(self, counts: Ints) -> Ints:
        """Counts with striped rows among their owners' others, [C, K]."""
        whole = counts[:, : len(self.groups)].copy()
        whole[:, : self.ranks] += counts[:, len(self.groups) :]
        return whole


def _key(groups: Groups, g: int) -> tuple[bytes, bytes]:
    return groups.holds[g].tobytes(), groups.path[g].astype(np.uint16).tobytes()


class ClassFinder:
    """The class of any row of a profile."""

    def __init__(self, profile: Profile, classes: Classes) -> None:
        self._profile = profile
        self.classes = len(classes)
        tables = len(profile.tables)
        order = np.argsort(classes.entry_table, kind="stable")
        entries = classes.entry_class[order]
        per_table = np.bincount(classes.entry_table, minlength=tables)
        self._entries = (
            as_int64(np.concatenate([[0], np.cumsum(per_table)])),
            as_int64(classes.accesses[entries]),
            as_int64(classes.containing[entries]),
            as_int64(entries),
        )

    def find(self, chunk: Chunk) -> NDArray[np.int32]:
        """The class of each row of a chunk, int32 [n]."""
        rows = slice(chunk.first, chunk.first + len(chunk.place))
        offsets = np.zeros(len(self._profile.tables) + 1, dtype=np.int64)
        offsets[chunk.table + 1 :] = len(chunk.place)
        found: NDArray[np.int32] = (
            native.ops()
            .find_classes(
                as_tensor(self._profile.table_accesses(chunk.table)[rows]),
                as_tensor(self._profile.table_containing(chunk.table)[rows]),
                as_int64(offsets),
                *self._entries,
            )
            .numpy()
        )
        return found


@dataclass(frozen=True)
class Carriage:
    """What it takes to bring a row from one holder set to another: every new holder copies it
    from the nearest old one."""

    nearest: Ints  # [K, M] the holder that a rank copies a row of column k from; itself if it holds
    seconds: Floats  # [K, K'] seconds per byte, summed over the new holders

    @staticmethod
    def of(before: Groups, after: Groups, topology: Topology) -> "Carriage":
        """Between the columns of two placements."""
        price = np.where(before.holds[:, None, :], topology.link_cost[None], np.inf)
        own = np.eye(topology.ranks, dtype=bool)[None] & before.holds[:, None, :]
        nearest = np.where(own, -1.0, price).argmin(axis=2)
        ranks = np.arange(topology.ranks)
        link = np.where(before.holds, 0.0, topology.link_cost[ranks[None], nearest])
        return Carriage(nearest, link @ after.holds.T.astype(np.float64))


def link_bytes(
    moved_bytes: Floats, before: Groups, after: Groups, topology: Topology
) -> NDArray[np.float64]:
    """Bytes that each rank copies from each other, [M, M] (reader by source), when rows of
    `moved_bytes[k, l]` in all go from column k of `before` to column l of `after`."""
    carriage = Carriage.of(before, after, topology)
    matrix = np.zeros((topology.ranks, topology.ranks))
    arriving = np.where(before.holds, 0.0, moved_bytes @ after.holds.astype(np.float64))
    readers = np.broadcast_to(np.arange(topology.ranks), carriage.nearest.shape)
    np.add.at(matrix, (readers, carriage.nearest), arriving)
    return matrix


def compare(old: Places, new: Places, profile: Profile, memory_bytes: Ints) -> tuple[int, Floats]:
    """Rows that the new placement brings to ranks that did not hold them, and the memory bytes of
    rows by old and new column, float64 [K, K']; `memory_bytes` [T] is a row's of each table."""
    shape = (len(old.groups), len(new.groups))
    arrives = (~old.groups.holds).astype(int) @ new.groups.holds.T.astype(int) > 0
    moved_rows, moved_bytes = 0, np.zeros(shape)
    for table in range(len(profile.tables)):
        for before, after in zip(old.chunks(table), new.chunks(table), strict=True):
            cell = old.column[before.place] * shape[1] + new.column[after.place]
            rows = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)
            moved_rows += int(rows[arrives].sum())
            moved_bytes += rows * float(memory_bytes[table])
    return moved_rows, moved_bytes
