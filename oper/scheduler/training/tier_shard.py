"""Shard of the tier on one rank: rows that it alone writes, and gradients that wait there.

A row that several workers trained at once takes one step with the sum of their gradients, once all
of them have been pushed; until then they wait here with the number of the step and its learning
rate.
"""

from collections.abc import Sequence

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.runtime.fetch_paths.row_source import Step
from oper.runtime.memory.heap import Heap
from oper.runtime.tables.optimizer_buckets import Bucket
from oper.scheduler.training.host_step import take_step

# `step` distinguishes steps; their numbers cannot, because a checkpoint may set them back.
_WAITING = np.dtype(
    [("missing", np.int64), ("step", np.int64), ("number", np.int64), ("rate", np.float64)]
)


class _Sums:
    """Gradients of a bucket's rows that wait for others of the same step. They are added in the
    order of the workers, because the order of their arrival depends on moves and flushes."""

    def __init__(self, slots: int, dim: int, workers: int) -> None:
        self.index_of = np.full(slots, -1, dtype=np.int32)  # by the row's slot
        self.waiting = np.zeros(0, dtype=_WAITING)
        self._steps = 0
        self._free = np.zeros(0, dtype=np.int64)
        # Index of each worker's gradient of a waiting row; -1 until it has come.
        self._part = np.full((0, workers), -1, dtype=np.int64)
        self._grads = torch.zeros(0, dim)
        self._free_grads = np.zeros(0, dtype=np.int64)

    def resize(self, slots: int) -> None:
        """Set the number of slots of rows."""
        more = max(slots - len(self.index_of), 0)
        self.index_of = np.append(self.index_of, np.full(more, -1, dtype=np.int32))

    def expect(self, slots: Ints, workers: Ints, number: int, rate: float) -> None:
        """Note that gradients of one step, from `workers` workers, will come for each of these
        rows."""
        more = _lacking(len(slots), self._free, len(self.waiting))
        if more:
            known = len(self.waiting)
            self.waiting = np.concatenate([self.waiting, np.zeros(more, dtype=_WAITING)])
            none = np.full((more, self._part.shape[1]), -1, dtype=np.int64)
            self._part = np.concatenate([self._part, none])
            self._free = np.concatenate([self._free, np.arange(known, known + more)])
        at, self._free = self._free[: len(slots)], self._free[len(slots) :]
        self.index_of[slots] = at
        self._steps += 1
        self.waiting["missing"][at], self.waiting["step"][at] = workers, self._steps
        self.waiting["number"][at], self.waiting["rate"][at] = number, rate

    def add(self, slots: Ints, worker: int, grads: torch.Tensor) -> Ints:
        """Take one worker's gradients, and return the slots of rows that are now complete."""
        at = self.index_of[slots].astype(np.int64)
        more = _lacking(len(slots), self._free_grads, len(self._grads))
        if more:
            known = len(self._grads)
            self._grads = torch.cat([self._grads, torch.zeros(more, self._grads.shape[1])])
            self._free_grads = np.concatenate([self._free_grads, np.arange(known, known + more)])
        part, self._free_grads = self._free_grads[: len(slots)], self._free_grads[len(slots) :]
        self._grads[torch.from_numpy(part)] = grads
        self._part[at, worker] = part
        self.waiting["missing"][at] -= 1
        return slots[self.waiting["missing"][at] == 0]

    def sums(self, at: Ints) -> torch.Tensor:
        """Return the sums of complete rows, by their waiting places, float32 [n, dim]."""
        sums = torch.zeros(len(at), self._grads.shape[1])
        for part in self._part[at].T:
            came = part >= 0
            sums[torch.from_numpy(came)] += self._grads[torch.from_numpy(part[came])]
        return sums

    def remove(self, slots: Ints) -> None:
        """Remove these rows from the waiting ones."""
        at = self.index_of[slots].astype(np.int64)
        parts = self._part[at]
        self._free = np.concatenate([self._free, at])
        self._free_grads = np.concatenate([self._free_grads, parts[parts >= 0]])
        self._part[at] = -1
        self.index_of[slots] = -1


def _lacking(wanted: int, free: Ints, known: int) -> int:
    """Return the number of places to add if `wanted` are needed, at least `known`, so that their
    number doubles."""
    lacking = wanted - len(free)
    return max(lacking, known) if lacking > 0 else 0


class TierShard:
    """Rows of buckets in this rank's part of the heap."""

    def __init__(self, heap: Heap, buckets: Sequence[Bucket]) -> None:
        self._heap, self._buckets = heap, buckets
        workers = heap.node.ranks
        self._sums = [_Sums(len(heap.rows(b.width)), b.dim, workers) for b in buckets]

    def resize(self) -> None:
        """Follow the heap, whose arenas may have grown."""
        for sums, bucket in zip(self._sums, self._buckets, strict=True):
            sums.resize(len(self._heap.rows(bucket.width)))

    def take_rows(self, bucket: int, slots: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows and of their states, as bytes."""
        rows, states = self._arenas(bucket)
        at = torch.from_numpy(slots)
        return rows[at], states[at]

    def put_rows(self, bucket: int, slots: Ints, rows: torch.Tensor, states: torch.Tensor) -> None:
        """Write rows and their states, given as bytes, into the rows' slots."""
        at = torch.from_numpy(slots)
        self._heap.touched.mark(self._buckets[bucket].width, slots)
        for arena, content in zip(self._arenas(bucket), (rows, states), strict=True):
            arena[at] = content

    def expect(self, bucket: int, slots: Ints, workers: Ints, step: Step, rate: float) -> None:
        """Note that gradients of this step will come for rows, from `workers` workers each."""
        self._sums[bucket].expect(slots, workers, step.number, rate)

    def add_gradients(self, bucket: int, slots: Ints, worker: int, grads: torch.Tensor) -> None:
        """Add one worker's gradients; rows that are then complete take their step."""
        sums = self._sums[bucket]
        done = np.sort(sums.add(slots, worker, grads))
        at = sums.index_of[done].astype(np.int64)
        steps = sums.waiting["step"][at]
        for step in np.unique(steps):
            now = steps == step
            grads = sums.sums(at[now])
            of_step = sums.waiting[at[now][0]]
            self.step(bucket, [done[now]], [grads], float(of_step["rate"]), int(of_step["number"]))
        sums.remove(done)

    def subtract(self, bucket: int, slots: Ints, steps: torch.Tensor) -> None:
        """Take steps of plain SGD, which already include their learning rates."""
        order = np.argsort(slots)
        self.step(bucket, [slots[order]], [steps[torch.from_numpy(order)]], 1.0, 1)

    def step(
        self,
        bucket: int,
        slots: Sequence[Ints],
        grads: Sequence[torch.Tensor],
        rate: float,
        number: int,
    ) -> None:
        """Take a step with the sums of gradients, lists of ascending slots and [n, dim] each."""
        of = self._buckets[bucket]
        for part in slots:
            self._heap.touched.mark(of.width, part)
        rows, states = self._heap.rows(of.width), self._heap.state(of.width)
        take_step(of, list(zip(slots, grads, strict=True)), rows, states, rate, number)

    def _arenas(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        of = self._buckets[bucket]
        size = of.optimizer.state_bytes(of.dim)
        return self._heap.rows(of.width), self._heap.state(of.width)[:, :size]
