"""Touched rows: the rows that got other values since a moment, as far as one rank knows.

Rows are marked by their slots in this rank's arenas, one byte per slot, by the kernels that update
them. Rows that were written by their ids, and marked rows that leave their slots when rows migrate,
are set aside by table and id. A row is touched if any rank has it marked or set aside
(runtime/table_io.py unites them). Before `begin` nothing is kept, and nothing costs time.
"""

import numpy as np
import torch

from oper.base.arrays import Ints, as_int64
from oper.runtime.memory.device import Device


class TouchedRows:
    """The touched rows of one engine that this rank knows of. Tables are the plan's, by number."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[torch.Tensor] | None = None  # by width, bool [slots]
        self._aside: dict[int, list[Ints]] = {}
        self._compacted: dict[int, int] = {}  # ids that were left by the last compaction

    @property
    def begun(self) -> bool:
        """True if rows are being marked."""
        return self._marks is not None

    def begin(self, slots: Ints) -> None:
        """Mark rows from now on, with none touched so far; `slots` [W] are those of this rank's
        arenas."""
        place = self._device.torch_device
        self._marks = [torch.zeros(int(n), dtype=torch.bool, device=place) for n in slots]
        self._aside, self._compacted = {}, {}

    def end(self) -> None:
        """Keep nothing any more."""
        self._marks, self._aside, self._compacted = None, {}, {}

    def resize(self, slots: Ints) -> None:
        """Follow the arenas, which have these slots now, [W]; marks of slots that stay are kept."""
        if self._marks is None:
            return
        for w, (marks, size) in enumerate(zip(self._marks, slots.tolist(), strict=True)):
            kept = min(len(marks), size)
            self._marks[w] = marks.new_zeros(size)
            self._marks[w][:kept] = marks[:kept]

    def marks(self, width: int) -> torch.Tensor | None:
        """Return the marks of a width's rows, which kernels set, bool [slots]; None before
        `begin`."""
        return None if self._marks is None else self._marks[width]

    @property
    def all_marks(self) -> list[torch.Tensor]:
        """The marks of all widths; none before `begin`."""
        return self._marks or []

    def mark(self, width: int, slots: Ints) -> None:
        """Mark rows by their slots."""
        if self._marks is not None:
            self._marks[width].index_fill_(0, as_int64(slots), True)

    def marked(self, width: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the marks of these slots, bool [n] in the host's memory."""
        assert self._marks is not None
        return self._marks[width][slots.to(self._device.torch_device)].cpu()

    def set_aside(self, table: int, ids: Ints) -> None:
        """Take rows of a table for touched, wherever they are."""
        if self._marks is None or not len(ids):
            return
        held = self._aside.setdefault(table, [])
        held.append(ids)
        if sum(map(len, held)) > 2 * self._compacted.get(table, 0) + (1 << 16):
            self._compact(table)

    def leave(self, width: int, slots: Ints, tables: Ints, ids: Ints) -> None:
        """Keep rows of a width touched that leave these slots, which other rows may get, [n]
        each."""
        if self._marks is None:
            return
        at = as_int64(slots)
        touched = self.marked(width, at).numpy()
        self._marks[width].index_fill_(0, at.to(self._device.torch_device), False)
        for table in np.unique(tables[touched]).tolist():
            self.set_aside(table, ids[touched & (tables == table)])

    def aside(self, table: int, first: int, rows: int) -> Ints:
        """Return the rows [first, first + rows) of a table that are set aside, counted from
        `first`."""
        held = self._compact(table)
        begin, end = np.searchsorted(held, [first, first + rows])
        return held[begin:end] - first

    def _compact(self, table: int) -> Ints:
        held: Ints = np.unique(np.concatenate([np.zeros(0, np.int64), *self._aside.get(table, [])]))
        if len(held):
            self._aside[table], self._compacted[table] = [held], len(held)
        return held
