"""Mark the slots that a plan's rows use, and find slots that two rows share."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.checker.rank_address_maps import Addresses
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.plan import Plan


@dataclass
class SlotMarks:
    """Slots of the arenas that hold a row, and the first fault of each kind.

    astray: a row that is read from a place that does not hold it. unread: in training, a replica
    that its rank updates but does not read. unequal: a row on all ranks at unequal slots.
    misplaced: a slot beyond its arena, or shared by two rows. copied: a row of the tier on several
    ranks. copies: bytes beyond one copy of each row.
    """

    plan: Plan
    astray: str | None = None
    unread: str | None = None
    unequal: str | None = None
    misplaced: str | None = None
    copied: str | None = None
    copies: int = 0
    _taken: list[list[NDArray[np.bool_]]] = field(default_factory=list)
    _marked: Ints = field(init=False)

    def __post_init__(self) -> None:
        slots = self.plan.layout.slots
        self._taken = [[np.zeros(n, dtype=bool) for n in of_width] for of_width in slots]
        self._marked = np.zeros_like(slots)

    def add(self, chunk: Addresses) -> None:
        """Mark the slots of some rows of a table."""
        table, rows, addresses, copies = chunk
        held = copies >> SLOT_BITS == LOCAL
        owner = held.argmax(axis=0)
        at_owner = np.take_along_axis(copies, owner[None], axis=0)[0] & SLOT_MASK
        # Most rows have one owner that all others read from; only the rest need a closer look.
        plain = (held | (addresses == owner << SLOT_BITS | at_owner)).all(axis=0)
        plain &= held.sum(axis=0) == 1
        self._mark(table, rows[plain], owner[plain], at_owner[plain])
        if not plain.all():
            self._add_replicated(
                table, rows[~plain], addresses[:, ~plain], copies[:, ~plain] & SLOT_MASK,
                held[:, ~plain],
            )  # fmt: skip

    def clash(self) -> str | None:
        """Return the fault of the slots, after all rows have been added; None without one."""
        if self.misplaced is not None:
            return self.misplaced
        for width, arenas in enumerate(self._taken):
            for rank, taken in enumerate(arenas):
                shared = int(self._marked[width, rank]) - int(np.count_nonzero(taken))
                if shared:
                    return f"rank {rank}, width {width}: {shared} rows share slots with others"
        return None

    def unused(self) -> str | None:
        """Return the slots without a row, if any; they are allowed after a replan, which moves rows
        out of stripes."""
        if self.plan.layout.stripe_bitmap is not None:
            return None
        for width, arenas in enumerate(self._taken):
            for rank, taken in enumerate(arenas):
                holes = len(taken) - int(np.count_nonzero(taken))
                if holes:
                    return f"rank {rank}, width {width}: {holes:,} slots hold no row"
        return None

    def _add_replicated(
        self,
        table: int,
        rows: Ints,
        addresses: Ints,
        copy_slot: Ints,
        held: NDArray[np.bool_],
    ) -> None:
        """Mark rows with several holders: each must be read from a holder, at its slot. `copy_slot`
        [M, N] is the slot on each rank that has a copy, which `held` [M, N] marks."""
        ranks = np.arange(len(held))[:, None]
        slot, field = addresses & SLOT_MASK, addresses >> SLOT_BITS
        source = np.where(field == LOCAL, ranks, field)
        known = np.minimum(source, self.plan.ranks - 1)
        there = np.take_along_axis(held, known, axis=0) & (known == source)
        same = np.take_along_axis(copy_slot, known, axis=0) == slot
        for reader, n in np.argwhere(~(there & same))[:1]:
            self.astray = self.astray or (
                f"{self._name(table, int(rows[n]))}: rank {reader} reads slot {slot[reader, n]} "
                f"of rank {source[reader, n]}, which "
                + ("has it at another" if there[reader, n] else "does not hold it")
            )
        if self.plan.workload.training:
            for reader, n in np.argwhere(held & (source != ranks))[:1]:
                self.unread = self.unread or (
                    f"{self._name(table, int(rows[n]))}: rank {reader} has a replica, and reads "
                    f"that of rank {source[reader, n]}"
                )
        copies = held.sum(axis=0)
        together = held.all(axis=0)
        if self.plan.workload.training:  # holders send each other sums by slot to update them
            together = copies > 1
        first = np.take_along_axis(copy_slot, held.argmax(axis=0)[None], axis=0)
        for n in np.flatnonzero(together & (held & (copy_slot != first)).any(axis=0))[:1]:
            slots = sorted(set(copy_slot[held[:, n], n].tolist()))
            self.unequal = self.unequal or (
                f"{self._name(table, int(rows[n]))}: is on {copies[n]} of the ranks, at slots "
                f"{slots}"
            )
        if table in self.plan.tier:
            for n in np.flatnonzero(copies > 1)[:1]:
                self.copied = self.copied or (
                    f"{self._name(table, int(rows[n]))}: is in the tier, on {copies[n]} ranks"
                )
        self.copies += int((copies - 1).clip(0).sum()) * self._row_memory(table)
        holder, of_row = np.nonzero(held)
        self._mark(table, rows[of_row], holder, copy_slot[holder, of_row])

    def _mark(self, table: int, rows: Ints, rank: Ints, slot: Ints) -> None:
        width = int(self.plan.layout.width_of_table[table])
        for r in range(self.plan.ranks):
            taken, of_rank = self._taken[width][r], rank == r
            at = slot[of_rank]
            beyond = at >= len(taken)
            if beyond.any():
                self.misplaced = self.misplaced or (
                    f"{self._name(table, int(rows[of_rank][beyond][0]))}: slot {at[beyond][0]} of "
                    f"rank {r}, whose arena has {len(taken)}"
                )
                at = at[~beyond]
            elif taken[at].any():
                self.misplaced = self.misplaced or (
                    f"{self._name(table, int(rows[of_rank][taken[at]][0]))}: slot "
                    f"{at[taken[at]][0]} of rank {r} is shared with another row"
                )
            taken[at] = True
            self._marked[width, r] += len(at)

    def _row_memory(self, table: int) -> int:
        return self.plan.tables[table].memory_bytes(self.plan.workload.mode)

    def _name(self, table: int, row: int) -> str:
        return f"table {self.plan.tables[table].name!r}, row {row}"
