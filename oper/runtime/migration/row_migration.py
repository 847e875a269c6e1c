"""The migration of one engine's rows, a part of them in each step.

A step is collective, and made between two training steps, when no rank reads or updates rows:

    read      each rank copies the rows that come to it, and their optimizer state, from the
              nearest rank that has them: by pointer if that rank shares memory with this one, else
              over the network
    write     once all ranks have read, it writes them into their slots, some of which other rows of
              the step have just left
    follow    the address map has the new places, which makes a new version of it (placement.py)

So every row is at one place at every moment at which anything can read it, and a step takes no more
memory in addition to the heap than the rows that come to a rank in it. Bytes are copied as they
are: a row that has moved trains on with the bits that it would have had.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from oper.base.arrays import Ints, as_int64
from oper.base.errors import OperError
from oper.plan.layout import Layout
from oper.plan.plan import Plan
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.engine_lifetime import EngineGuard
from oper.runtime.memory.heap import Heap, TableMemory
from oper.runtime.memory.placement import Placement
from oper.runtime.migration.changed_rows import ChangedRows
from oper.runtime.migration.movable_rows import MovableRows
from oper.runtime.migration.schedule import Schedule


class Mover(Protocol):
    """The engine whose rows move, and which follows them."""

    def rows_can_move(self) -> None:
        """Raise OperError if rows cannot move now."""

    def rows_begin_to_move(self, layout: Layout, rows: ChangedRows, schedule: Schedule) -> None:
        """Prepare for rows that are about to move, and are found by `layout` from now on."""

    def rows_leave(self, rows: ChangedRows, moving: Ints, schedule: Schedule) -> None:
        """Prepare reads of the rows with the numbers `moving` from their places."""

    def copies_moved(self) -> None:
        """Follow moved rows that have copies on some ranks, or had."""

    def rows_have_moved(self, plan: Plan, schedule: Schedule) -> None:
        """Take note that all rows are at their places in this plan."""


class RowMigration:
    """The migration of one engine's rows, of which `step` makes the next step. For all ranks to
    make and call together. Nothing has moved or changed before the first step."""

    def __init__(
        self,
        guard: EngineGuard,
        memory: TableMemory,
        placement: Placement,
        rows: ChangedRows,
        schedule: Schedule,
        plan: Plan,
        mover: Mover,
    ) -> None:
        self.plan = plan  # to which they move
        self.schedule, self.rows, self.steps_made = schedule, rows, 0
        self._guard, self._placement = guard, placement
        self._heap, self._node = memory.heap, memory.node
        self._signals, self._all_to_all = memory.signals, memory.all_to_all
        self._mover = mover
        self._source = _nearest(rows.sets.holds, Proxies(self._node).nodes)
        # Made now, because it takes longer than a step may.
        most = int(schedule.most_slots.max(initial=1))
        self._movable = MovableRows(placement.layout, rows, most) if schedule.steps else None

    @property
    def bytes(self) -> Ints:
        """Bytes that come to each rank from others, rows and state, [M]."""
        held = self.rows.sets.holds[self.rows.before[self.schedule.order]]
        ranks = range(self._node.ranks)
        return np.array([self._copied(r)[~held[:, r]].sum() for r in ranks], dtype=np.int64)

    def _copied(self, rank: int) -> Ints:
        """Return the bytes that a rank writes of each row, in the order in which rows move."""
        moving, rows = self.schedule.order, self.rows
        written = rows.sets.holds[rows.after[moving], rank] & ~self.schedule.stays[moving]
        return np.asarray(written * self._heap.slot_bytes[rows.width[moving]])

    @property
    def extra_bytes(self) -> int:
        """Bytes of this rank's memory that the migration takes in addition to the present heap: the
        rows that come in a step, and the slots by which arenas in the host's memory grow."""
        heap, first = self._heap, self.schedule.starts[:-1]
        received = self._copied(self._node.rank)
        most = int(np.add.reduceat(received, first).max()) if len(first) else 0
        grown = heap.bytes_at(np.maximum(self.schedule.most_slots, heap.slots)) - heap.bytes
        return most + max(grown, 0) * (heap.device.kind == "cpu")

    @property
    def done(self) -> bool:
        """True if all rows have moved."""
        return self.steps_made == self.schedule.steps

    @torch.inference_mode(mode=False)  # its tensors are written to later, outside of such modes
    def step(self) -> bool:
        """Move the rows of the next step. Return whether there is another. Raise OperError on all
        ranks if one of them does not come, or holds gradients back."""
        if self.done:
            return False
        self._guard.check()
        self._mover.rows_can_move()  # on all ranks or on none, before any has failed
        what = f"move rows (step {self.steps_made + 1} of {self.schedule.steps})"
        with (
            self._guard.failing_together(everywhere=True),
            self._placement.reading.closed(self._signals.deadline_seconds),
        ):
            self._barrier(what)
            assert self._movable is not None, "there are steps"
            if not self.steps_made:
                self._mover.rows_begin_to_move(self._movable.layout, self.rows, self.schedule)
            first, end = self.schedule.starts[self.steps_made : self.steps_made + 2]
            moving = self.schedule.order[first:end]
            self._mover.rows_leave(self.rows, moving, self.schedule)
            widths = np.unique(self.rows.width[moving]).tolist()
            copied = moving[~self.schedule.stays[moving]]
            self._leave(moving)
            came = [self._read(w, copied[self.rows.width[copied] == w], what) for w in widths]
            self._barrier(what)
            with self._heap.writable():
                for w, (slots, rows, state) in zip(widths, came, strict=True):
                    self._write(w, slots, rows, state)
            self._follow(self._movable, moving)
            on_some = self.rows.sets.on_some
            if on_some[self.rows.before[moving]].any() or on_some[self.rows.after[moving]].any():
                self._mover.copies_moved()
            self.steps_made += 1
            more = self.steps_made < self.schedule.steps
            if not more:
                self._mover.rows_have_moved(self.plan, self.schedule)
            self._barrier(what)
        return more

    def _barrier(self, what: str) -> None:
        self._heap.device.synchronize()
        self._signals.barrier(what)

    def _read(self, w: int, rows: Ints, what: str) -> tuple[Ints, torch.Tensor, torch.Tensor]:
        """Return the rows of a width that come to this rank: their slots here, rows and states."""
        mine = self._node.rank
        after = self.rows.sets.holds[self.rows.after[rows]]
        source = self._source[self.rows.before[rows]]  # [n, M]
        coming = np.flatnonzero(after[:, mine])
        slots, parts = [], []
        for r in self._node.peers:
            here = rows[coming[source[coming, mine] == r]]
            slots.append(self.schedule.slot[here])
            parts.append(self._copy(w, r, here))
        if self._all_to_all is not None:
            far, sent = [], []
            for r in range(self._node.ranks):
                shared = r in self._node.peers
                asked = after[:, r] & (source[:, r] == mine) & (not shared)
                sent.append(self._copy(w, mine, rows[asked]).cpu())
                here = rows[coming[(source[coming, mine] == r) & (not shared)]]
                far.append(self.schedule.slot[here])
            parts += self._all_to_all.send(sent, what)
            slots += far
        on = self._heap.device.torch_device
        both = torch.cat([part.to(on) for part in parts])
        row_bytes = self._heap.rows(w).shape[1]
        return np.concatenate(slots), both[:, :row_bytes], both[:, row_bytes:]

    def _copy(self, w: int, rank: int, rows: Ints) -> torch.Tensor:
        """Return rows and their states as a rank of the node has them, uint8 [n, bytes of both]."""
        slots = as_int64(self.rows.slot(rows, np.full(len(rows), rank)))
        slots = slots.to(self._heap.device.torch_device)
        return torch.cat([self._heap.rows(w, rank)[slots], self._heap.state(w, rank)[slots]], 1)

    def _write(self, w: int, slots: Ints, rows: torch.Tensor, state: torch.Tensor) -> None:
        at = as_int64(slots).to(self._heap.device.torch_device)
        self._heap.rows(w)[at], self._heap.state(w)[at] = rows, state

    def _leave(self, moving: Ints) -> None:
        """Keep rows touched whose slots are going to be marked for other rows."""
        rows, mine = self.rows, self._node.rank
        here = moving[rows.sets.holds[rows.before[moving], mine]]
        slots = rows.slot(here, np.full(len(here), mine))
        for w in np.unique(rows.width[here]).tolist():
            of = rows.width[here] == w
            self._heap.touched.leave(w, slots[of], rows.table[here[of]], rows.id[here[of]])

    def _follow(self, movable: MovableRows, moving: Ints) -> None:
        rows = self.rows
        index, codes = movable.move(moving, rows.after[moving], self.schedule.slot[moving])
        self._placement.moved(rows.table[moving], rows.id[moving], index, codes)


def _nearest(holds: np.ndarray, nodes: Sequence[Sequence[int]]) -> Ints:
    """Return the holder of each set from which each rank copies rows, [K, M]: itself, else a holder
    on its node, else any, ranks taking turns."""
    ranks = holds.shape[1]
    node_of = np.empty(ranks, dtype=np.int64)
    for n, members in enumerate(nodes):
        node_of[list(members)] = n
    nearest = np.empty(holds.shape, dtype=np.int64)
    for k, held in enumerate(holds):
        everywhere = np.flatnonzero(held)
        for r in range(ranks):
            near = everywhere[node_of[everywhere] == node_of[r]]
            candidates = near if len(near) else everywhere
            nearest[k, r] = r if held[r] else candidates[r % len(candidates)]
    return nearest


def check_room(heap: Heap, slots: Ints) -> None:
    """Raise OperError unless the arenas of a heap can grow to so many slots, [W, M]."""
    beyond = np.argwhere(slots > heap.most_slots)
    if not len(beyond):
        return
    w, rank = beyond[0].tolist()
    spare = "" if heap.device.kind == "cpu" else ", or shard with more spare memory (spare=…)"
    raise OperError(
        f"rank {rank} would come to have {int(slots[w, rank]):,} rows of "
        f"{int(heap.slot_bytes[w]):,} bytes with their state, and its memory was made to grow to "
        f"{int(heap.most_slots[w, rank]):,}: start from a checkpoint by the new plan{spare}"
    )
