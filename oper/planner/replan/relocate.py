"""Relocate: from flows between holder sets to single rows with slots, and the layout that results.

Every rank's arena stays dense, one slot a row, whatever moves:

* a row that becomes a replica takes the place of one that no longer is, in the same group; further
  ones get a block of slots behind the replicas that are there (equal on all ranks for rows held
  by all); rows in the block's way are displaced;
* where an arena shrinks, the rows beyond its new end are displaced;
* displaced rows and rows that come to a rank take the slots that rows left, or new ones at the end.
  They are listed in a group with base 0, so that their position is the slot;
* only if the replicas themselves would reach beyond an arena's end are all of that width laid out
  anew, from slot 0 on.

Striped rows that change place become explicit. The others stay where they are, as the old bitmap
goes on to number them (layout.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints
from oper.base.tensors import as_int64, as_tensor
from oper.plan.bitmap import ROWS_PER_LINE
from oper.plan.layout import Layout
from oper.plan.row_codes import pack_positions, unpack_codes
from oper.plan.row_locator import Chunk, RowLocator
from oper.plan.row_moves import ENTRY, RowMoves
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.replan.flows import Flows
from oper.planner.replan.migration_cost import MigrationCost
from oper.tables.table import Table, offsets

Flags = NDArray[np.bool_]


@dataclass
class _Rows:
    """The N rows that change, in global order."""

    row: Ints  # global id
    width: Ints
    before: Ints  # column
    after: Ints
    leaves: Flags  # whether the column changes; the others only change slots
    place: Ints  # in the old layout, with the offset from its first row
    offset: Ints
    old_slots: Ints  # [N, M], -1 where a rank holds no copy
    new_slots: Ints  # [N, M]
    group: Ints  # in the new layout
    position: Ints


@dataclass(frozen=True)
class _Block:
    """Slots for new replicas of one width and column: from `start[r]` on, `rows` of them."""

    column: int
    start: Ints  # [M]
    rows: int


class Relocation:
    """The rows of a plan and where they are to go."""

    def __init__(
        self,
        tables: tuple[Table, ...],
        places: RowLocator,
        finder: ClassFinder,
        width_of_class: Ints,
        counted: Ints,
        target: Ints,
        flows: Flows,
    ) -> None:
        """`counted` [C, K + M] rows are in the counted columns, `target` [C, K] are to be."""
        self._tables, self._places, self._finder = tables, places, finder
        self._layout, self._flows = places.layout, flows
        groups, ranks = places.groups, places.ranks
        widths, columns = len(self._layout.slots), len(groups)
        by_width = np.arange(widths)[:, None] == width_of_class[None]
        self._before = by_width @ places.together(counted)  # [W, K] rows
        self._after = by_width @ target
        self._live: Ints = self._after @ groups.holds.astype(np.int64)  # [W, M]
        self._leaving = self._quota(counted, flows, ranks, columns)
        self._repack = np.zeros(widths, dtype=bool)
        self._blocks: list[list[_Block]] = []
        for w, top in enumerate(self._replica_tops()):
            blocks, fit = self._make_blocks(w, top, self._after[w] - self._before[w])
            if not fit:
                self._repack[w] = True
                blocks, _ = self._make_blocks(w, np.zeros(ranks, dtype=np.int64), self._after[w])
            self._blocks.append(blocks)

    def carry_out(self, carriage: MigrationCost, row_memory: Ints) -> tuple[Layout, RowMoves]:
        """The new layout and the moves that lead to it; `row_memory` [T] bytes of a row."""
        rows = self._collect()
        if not len(rows.row):
            return self._layout, RowMoves.none()
        instances = _Instances(self._layout, self._places)
        for w in range(len(self._layout.slots)):
            released = self._place_replicas(w, rows, instances)
            self._place_singles(w, rows, released, instances)
        layout = self._new_layout(rows, instances)
        return layout, _moves(rows, carriage, row_memory, offsets(self._tables))

    @staticmethod
    def _quota(counted: Ints, flows: Flows, ranks: int, columns: int) -> Ints:
        """Rows that leave each counted column, [C, K + M]: listed ones before striped ones."""
        quota = np.zeros_like(counted)
        np.add.at(quota, (flows.row_class, flows.before), flows.rows)
        striped = np.clip(quota[:, :ranks] - counted[:, :ranks], 0, None)
        quota[:, :ranks] -= striped
        quota[:, columns:] = striped
        return quota

    def _replica_tops(self) -> Ints:
        """The end of the last replica's slot, [W, M]."""
        layout = self._layout
        group, position = unpack_codes(layout.codes, len(layout.group_width))
        last = np.full(len(layout.group_width), -1, dtype=np.int64)
        np.maximum.at(last, group, position)
        tops = np.zeros(layout.slots.shape, dtype=np.int64)
        several = (layout.holds.sum(axis=1) > 1) & (last >= 0)
        for g in np.flatnonzero(several):
            end = np.where(layout.holds[g], layout.base[g] + last[g] + 1, 0)
            tops[layout.group_width[g]] = np.maximum(tops[layout.group_width[g]], end)
        return tops

    def _make_blocks(self, w: int, top: Ints, rows: Ints) -> tuple[list[_Block], bool]:
        """Blocks for `rows[k]` more replicas in column k, behind `top` [M]; whether they fit."""
        holds, ranks = self._places.groups.holds, self._places.ranks
        columns = [k for k in range(ranks, len(holds)) if rows[k] > 0]
        blocks, top = [], top.copy()
        for k in sorted(columns, key=lambda k: not holds[k].all()):
            # Rows on all ranks have one slot on all.
            start = np.full(ranks, top.max()) if holds[k].all() else top.copy()
            blocks.append(_Block(k, start, int(rows[k])))
            top = np.where(holds[k], start + int(rows[k]), top)
        return blocks, bool((top <= self._live[w]).all())

    def _claimed(self, w: int, rank: Ints, slot: Ints) -> Flags:
        """Whether slots of ranks, [N] each, are in a block or beyond the arena's new end."""
        claimed: Flags = slot >= self._live[w, rank]
        for block in self._blocks[w]:
            holds = self._places.groups.holds[block.column]
            start = np.where(holds, block.start, 0)
            end = np.where(holds, block.start + block.rows, 0)
            claimed |= (slot >= start[rank]) & (slot < end[rank])
        return claimed

    def _collect(self) -> _Rows:
        """The rows that change: those that leave their column, and those in their way."""
        tables = range(len(self._tables))
        found = [self._changes(chunk) for t in tables for chunk in self._places.chunks(t)]
        row, width, place, offset, old_slots, row_class, leaves, striped = (
            np.concatenate(parts) for parts in zip(*found, strict=True)
        )
        before = self._places.column[place]
        rows = _Rows(
            row,
            width,
            before,
            before.copy(),
            leaves,
            place,
            offset,
            old_slots,
            np.full_like(old_slots, -1),
            np.full(len(row), -1, dtype=np.int64),
            np.full(len(row), -1, dtype=np.int64),
        )
        # The leaving rows of a cell, in order, are given to its flows, in order.
        leaving = np.flatnonzero(leaves)
        leaving = leaving[np.lexsort((striped[leaving], before[leaving], row_class[leaving]))]
        order = np.lexsort((self._flows.after, self._flows.before, self._flows.row_class))
        rows.after[leaving] = np.repeat(self._flows.after[order], self._flows.rows[order])
        return rows

    def _changes(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        places, w = self._places, int(self._layout.width_of_table[chunk.table])
        ranks = places.ranks
        row_class = self._finder.find(chunk)
        counted = places.counted[chunk.place]
        column = places.column[chunk.place]
        leaves = self._take(row_class, counted)
        changes = leaves.copy()
        if self._repack[w]:
            changes |= column >= ranks
        if self._blocks[w] or (self._live[w] < self._layout.slots[w]).any():
            single = np.flatnonzero(column < ranks)
            slot = places.owner_slots(chunk, single)
            changes[single] |= self._claimed(w, column[single], slot)
        index = np.flatnonzero(changes)
        first = int(offsets(self._tables)[chunk.table]) + chunk.first
        return (
            first + index,
            np.full(len(index), w),
            chunk.place[index],
            chunk.offset[index],
            places.slots(chunk, index),
            row_class[index].astype(np.int64),
            leaves[index],
            counted[index] >= len(places.groups),
        )

    def _take(self, row_class: NDArray[np.int32], counted: Ints) -> Flags:
        """The first rows of each class and counted column that are still to leave it."""
        quota = self._leaving.reshape(-1)
        cell = row_class * np.int64(self._leaving.shape[1]) + counted
        wanted = np.flatnonzero(quota[cell])
        wanted = wanted[np.argsort(cell[wanted], kind="stable")]
        cells, first, size = np.unique(cell[wanted], return_index=True, return_counts=True)
        number = np.arange(len(wanted)) - np.repeat(first, size)
        taken = np.zeros(len(cell), dtype=bool)
        taken[wanted[number < np.repeat(quota[cells], size)]] = True
        quota[cells] -= np.minimum(size, quota[cells])
        return taken

    def _place_replicas(self, w: int, rows: _Rows, instances: "_Instances") -> list[Ints]:
        """Slots for all rows that become replicas; those that former ones leave, by rank."""
        groups, ranks = self._places.groups, self._places.ranks
        blocks = {block.column: block for block in self._blocks[w]}
        released: list[list[Ints]] = [[] for _ in range(ranks)]
        mine = rows.width == w
        for k in range(ranks, len(groups)):
            holders = np.flatnonzero(groups.holds[k])
            arrives = mine & (rows.after == k)
            incoming = np.flatnonzero(arrives & (rows.leaves | self._repack[w]))
            freed = np.flatnonzero(mine & (rows.before == k) & (rows.leaves | self._repack[w]))
            freed = freed[np.argsort(rows.old_slots[freed, holders[0]], kind="stable")]
            reused = 0 if self._repack[w] else min(len(incoming), len(freed))
            into, out_of = incoming[:reused], freed[:reused]
            rows.new_slots[into] = rows.old_slots[out_of]
            rows.group[into], rows.position[into] = rows.place[out_of], rows.offset[out_of]
            for r in holders:
                released[r].append(rows.old_slots[freed[reused:], r])
            rest = incoming[reused:]
            if len(rest):
                start = np.where(groups.holds[k], blocks[k].start, -1)
                rows.group[rest] = instances.add(w, k, start)
                rows.position[rest] = np.arange(len(rest))
                for r in holders:
                    rows.new_slots[rest, r] = start[r] + np.arange(len(rest))
        return [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in released]

    def _place_singles(
        self, w: int, rows: _Rows, released: list[Ints], instances: "_Instances"
    ) -> None:
        """Slots for displaced rows and those that come to a single owner."""
        for r in range(self._places.ranks):
            mine = rows.width == w
            left = rows.old_slots[mine & (rows.before == r), r]
            grown = np.arange(self._layout.slots[w, r], self._live[w, r])
            free = np.concatenate([released[r], left, grown])
            free = np.sort(free[~self._claimed(w, np.full(len(free), r), free)])
            incoming = np.flatnonzero(mine & (rows.after == r))
            assert len(free) == len(incoming), "slots that are free, and rows that need one"
            if not len(incoming):
                continue
            # A former replica keeps its own slot where that is free; all others take the rest.
            own = rows.old_slots[incoming, r]
            stays = np.isin(own, free)
            slot = np.where(stays, own, -1)
            slot[~stays] = np.setdiff1d(free, own[stays], assume_unique=True)
            rows.new_slots[incoming, r] = slot
            rows.group[incoming] = instances.by_slot(w, r)
            rows.position[incoming] = slot

    def _new_layout(self, rows: _Rows, instances: "_Instances") -> Layout:
        layout = self._layout
        group, position = unpack_codes(layout.codes, len(layout.group_width))
        listed = listed_rows(layout)
        everyone = np.union1d(listed, rows.row)
        new_group = np.empty(len(everyone), dtype=np.int64)
        new_position = np.empty(len(everyone), dtype=np.int64)
        for ids, g, p in ((listed, group, position), (rows.row, rows.group, rows.position)):
            at = np.searchsorted(everyone, ids)
            new_group[at], new_position[at] = g, p
        used, new_group = np.unique(new_group, return_inverse=True)
        bitmap, stripe_bitmap = layout.bitmap, layout.stripe_bitmap
        if len(everyone) > len(listed):
            stripe_bitmap = bitmap if stripe_bitmap is None else stripe_bitmap
            bitmap = _marked(layout, rows.row, offsets(self._tables))
        return replace(
            layout,
            slots=self._live,
            group_width=np.array(instances.width, dtype=np.int64)[used],
            path=np.stack(instances.path)[used],
            holds=np.stack(instances.holds)[used],
            base=np.stack(instances.base)[used],
            bitmap=bitmap,
            stripe_bitmap=stripe_bitmap,
            codes=pack_positions(new_group, new_position, len(used)),
        )


class _Instances:
    """The groups of the new layout: the old one's, then those that rows need beside them."""

    def __init__(self, layout: Layout, places: RowLocator) -> None:
        self._groups = places.groups
        self.width = layout.group_width.tolist()
        self.path, self.holds, self.base = list(layout.path), list(layout.holds), list(layout.base)
        self._by_slot: dict[tuple[int, int], int] = {}
        for g, w in enumerate(self.width):
            if self.holds[g].sum() == 1 and self.base[g].max() == 0:
                self._by_slot[w, int(self.holds[g].argmax())] = g

    def add(self, w: int, column: int, base: Ints) -> int:
        """A group of a column's holders, with its first slots."""
        self.width.append(w)
        self.path.append(self._groups.path[column])
        self.holds.append(self._groups.holds[column])
        self.base.append(base)
        return len(self.width) - 1

    def by_slot(self, w: int, rank: int) -> int:
        """The group of a rank's rows whose position is the slot."""
        if (w, rank) not in self._by_slot:
            base = np.where(self._groups.holds[rank], 0, -1)
            self._by_slot[w, rank] = self.add(w, rank, base)
        return self._by_slot[w, rank]


def listed_rows(layout: Layout) -> Ints:
    """The global ids of the explicit rows, [E]."""
    first, found = 0, []
    for t, rows in enumerate(layout.rows.tolist()):
        words = layout.bitmap[layout.line_offset[t] : layout.line_offset[t + 1], 1:]
        marks = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
        found.append(first + np.flatnonzero(marks.reshape(-1)[:rows]))
        first += rows
    return np.concatenate(found)


def _marked(layout: Layout, rows: Ints, first_row: Ints) -> NDArray[np.uint64]:
    """The layout's bitmap with more rows (global ids) marked."""
    bitmap = np.array(layout.bitmap)
    table = np.searchsorted(first_row, rows, side="right") - 1
    line, bit = np.divmod(rows - first_row[table], ROWS_PER_LINE)
    line += layout.line_offset[table]
    mask = np.uint64(1) << (bit % 64).astype(np.uint64)
    np.bitwise_or.at(bitmap, (line, 1 + bit // 64), mask)
    native.ops().number_bitmap(as_tensor(bitmap.view(np.int64)), as_int64(layout.line_offset))
    return bitmap


def _moves(rows: _Rows, carriage: MigrationCost, row_memory: Ints, first_row: Ints) -> RowMoves:
    """The entries of all rows whose holders or slots differ."""
    differs = (rows.new_slots != rows.old_slots).any(axis=1)
    n, rank = np.nonzero((rows.new_slots >= 0) & differs[:, None])
    source = carriage.nearest[rows.before[n], rank]
    entries = np.zeros(len(n), ENTRY)
    entries["row"], entries["rank"], entries["source_rank"] = rows.row[n], rank, source
    entries["slot"] = rows.new_slots[n, rank]
    entries["source_slot"] = rows.old_slots[n, source]
    there = (source == rank) & (entries["slot"] == entries["source_slot"])
    table = np.searchsorted(first_row, entries["row"], side="right") - 1
    entries["bytes"] = np.where(there, 0, row_memory[table])
    return RowMoves(entries)
