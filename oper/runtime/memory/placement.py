"""The present places of the rows: the layout, and the address map by which a rank reads them.

Both change when rows migrate. Each change makes a new VERSION of the map: a batch is prepared under
one, and is prepared again before it is used under another. Readers of the map and its changes wait
for each other, within this rank; the migration makes sure that no other rank reads meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.plan.layout import Layout
from oper.plan.plan import Plan
from oper.runtime.comm.deadline import SLICE_SECONDS, Deadline
from oper.runtime.memory.device import Device
from oper.runtime.memory.runtime_plan import FLAT_BYTES, runtime_map


class Reading:
    """A context for any number of threads at a time, and for none while the placement changes."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._readers, self._closed = 0, False

    def __enter__(self) -> None:
        with self._turn:
            while self._closed:
                self._turn.wait()
            self._readers += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._turn:
            self._readers -= 1
            if self._closed:
                self._turn.notify_all()

    @contextmanager
    def closed(self, deadline_seconds: float) -> Iterator[None]:
        """Let nobody in, once all are out."""
        deadline = Deadline(deadline_seconds)
        with self._turn:
            self._closed = True
            while self._readers and not deadline.ended():
                self._turn.wait(SLICE_SECONDS)
        try:
            if self._readers:
                raise OperError(
                    f"rows were to move, and {self._readers} lookups of other threads went on for "
                    f"{deadline.seconds:g} s: call it where no lookup waits for other ranks"
                )
            yield
        finally:
            with self._turn:
                self._closed = False
                self._turn.notify_all()


class Placement:
    """The placement of one engine's rows: `plan` has its tables in the engine's order, and its
    layout has the rows' places."""

    def __init__(self, plan: Plan, rank: int, device: Device) -> None:
        self.reading = Reading()
        self.version = 0
        self._rank, self._device = rank, device
        self._set(plan)

    def _set(self, plan: Plan) -> None:
        self.plan = plan
        self._compact = runtime_map(plan, self._rank)
        self.map = self._compact.flattened(FLAT_BYTES).to(self._device.torch_device)

    @property
    def layout(self) -> Layout:
        """The layout of the rows at their present places."""
        return self.plan.layout

    def replace(self, layout: Layout) -> None:
        """Describe the same rows at the same places by another layout."""
        self._set(replace(self.plan, layout=layout))

    def resized(self, slots: Ints) -> None:
        """Take note that arenas have these slots, [W, M]; rows stay at their places, and are found
        as before."""
        self.plan = replace(self.plan, layout=replace(self.layout, slots=slots))

    def planned_from(self, profile: str) -> None:
        """Take note that the rows are at their places in a plan from this profile."""
        self.plan = replace(self.plan, profile=profile)

    def moved(self, tables: Ints, rows: Ints, index: Ints, codes: np.ndarray) -> None:
        """Follow rows that have moved, and whose codes in the layout, at `index`, have changed: [n]
        each. Batches that were prepared before are out of date."""
        self.version += 1
        for t in np.intersect1d(tables, self.map.flat_tables):
            ids = torch.from_numpy(rows[tables == t])
            self.map.follow(int(t), ids, self._compact.translate(int(t), ids))
        self.map.follow_codes(index, codes)
