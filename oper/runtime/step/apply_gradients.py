"""Gradients: one optimizer step of all tables, from the gradient of a lookup's output (§5.3).

The gradients of each row are summed over its accesses into this rank's mailbox. Owners add up the
gradients that all mailboxes hold for them, in the order of ranks, and update each row once;
replicas go through the sparse AllReduce and are updated on every rank. Between nodes, if distinct
rows are fetched, the owner's relay (relayed_rows.py) adds up its node's gradients for the owner, in
the order of its ranks, and sends one gradient per row; owners add up node by node, in the order of
the nodes' first ranks, and their own node mailbox by mailbox. Rows with a copy on each node are
added up among their holders (node_copies.py). Every sum has a fixed order, so that equal runs give
equal bits. If a device has the only rank, no other gradients come: the threads that sum a row's
gradients update it at once.

Four counters of the signals order the ranks; each is the number of the step that a rank finished:

    marked      the bitmap says which replicas were touched
    published   the mailbox is written, and all rows of this step have been read
    reduced     this rank's slice of the replicas' gradients is summed
    applied     this rank's rows are updated: they may be read again, mailboxes may be overwritten
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from oper.cost.step_memory import most_values
from oper.runtime.allreduce.replica_allreduce import NoReplicas, ReplicaAllReduce
from oper.runtime.comm.node import Node
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.fetch_path import FetchPath
from oper.runtime.fetch_paths.row_source import RowSource, Step
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.memory.gradient_mailbox import (
    DeviceMailboxes,
    Mailbox,
    Mailboxes,
)
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import NumberedRows, PreparedBatch, Runs, SortedRows
from oper.runtime.step.captured_settings import CapturedSettings
from oper.runtime.step.equal_settings import EqualSettings, StepSettings
from oper.runtime.step.node_copies import NoCopies, NodeCopies
from oper.runtime.tables.kernel_structs import DTYPE_CODE
from oper.runtime.tables.optimizer_buckets import Bucket
from oper.runtime.tables.optimizers import update_rows
from oper.runtime.tables.row_gradients import RowGradients, laid_out, merged, room

COUNTERS = ("marked", "published", "reduced", "applied")


@dataclass(frozen=True)
class HeldGradients:
    """Rows, and the sum of the gradients of each row so far."""

    rows: SortedRows
    sums: RowGradients


class Gradients:
    """The training of one engine's buckets. Rows of the first `in_heap` buckets are in the heap,
    all others in `source`. Gradients go to other nodes by `path`.

    `steps` counts this engine's steps; `optimizer_steps` as well, unless it was loaded from a
    checkpoint.
    """

    trains = True

    def __init__(
        self,
        memory: TableMemory,
        path: FetchPath,
        source: RowSource,
        in_heap: int,
        replicas: ReplicaAllReduce | NoReplicas,
        copies: NodeCopies | NoCopies,
        counters: Counters,
        scale: float,
        means: bool,
        settings: EqualSettings,
    ) -> None:
        self._buckets, self._in_heap = memory.buckets, memory.buckets[:in_heap]
        self._settings = settings
        self._heap, self._node, self._signals = memory.heap, memory.node, memory.signals
        self._path, self._source = path, source
        self._in_tier = range(in_heap, len(memory.buckets))
        self._replicas, self._copies = replicas, copies
        self._counters, self._scale = counters, scale
        self._means = means
        self._device = memory.heap.device
        self.mailboxes = _mailboxes(self._node, self._device, self._in_heap)
        settings.carried = path.carry(settings.digests)
        # Not a method of this object, which the counters would keep, with all memory, until garbage
        # is collected.
        dims = np.array([of.dim if of.trained else 0 for of in self._in_heap], dtype=np.int64)
        self._sent = partial(_sent, dims)
        self.learning_rates = [bucket.optimizer.lr for bucket in self._buckets]
        self.steps = self.optimizer_steps = 0
        self._accumulating = False
        self._held: HeldGradients | None = None
        self.frozen: tuple[str, ...] = ()  # tables, in the batch of the next gradients
        self._frozen: list[tuple[str, ...]] = []  # in each batch since the last update
        self.captured: CapturedSettings | None = None  # of the step that is captured now

    @property
    def _most_held(self) -> tuple[int, int]:
        """The most rows and values that held gradients can have, whatever the number of batches: on
        devices the host does not know their number."""
        slots = [self._heap.all_slots(bucket.width) for bucket in self._buckets]
        values = sum(n * bucket.dim for n, bucket in zip(slots, self._buckets, strict=True))
        lines = most_values(0, [bucket.dim for bucket in self._buckets])
        return sum(slots), values + lines

    def wait_for_rows(self) -> None:
        """Wait until the rows of all ranks are those after the last step."""
        self._signals.wait("applied", self.steps, "update its rows")

    def rates_are_used(self) -> bool:
        """Return whether the step that is captured has updated rows. If so, learning rates that are
        taken from now on belong to the next step, and no other update of this step may follow."""
        return self.captured is not None and self.captured.rates_are_used()

    def settings_to_come(self) -> CapturedSettings:
        """Return the settings of a step that is going to be captured."""
        return CapturedSettings(self._buckets, self._device, self.optimizer_steps + 1)

    @property
    def memory(self) -> list[object]:
        """The memory through which gradients of devices go now; parts of it are replaced when they
        must grow, or rows move."""
        segments: list[object] = [*self._replicas.segments]
        if isinstance(self.mailboxes, DeviceMailboxes):
            segments = [*self.mailboxes.segments, *segments]
        return segments

    @property
    def holding(self) -> bool:
        """True while gradients of earlier batches are held back."""
        return self._held is not None or self._accumulating

    def drop_held(self) -> None:
        """Forget the gradients that are held back."""
        self._held = None

    def follow(
        self, replicas: ReplicaAllReduce | NoReplicas, copies: NodeCopies | NoCopies
    ) -> None:
        """Use these replicas and copies on nodes from now on, because rows move. For all ranks,
        between two steps."""
        self._replicas = replicas
        self.follow_copies(copies)

    def follow_copies(self, copies: NodeCopies | NoCopies) -> None:
        """Use these copies on nodes from now on, and the same replicas."""
        self._copies = copies

    @property
    def shared_bytes(self) -> dict[str, int]:
        """Bytes of this rank's shared memory through which a step's gradients pass."""
        mailbox = 0 if self.mailboxes is None else self.mailboxes.bytes
        return {"mailbox": mailbox, "allreduce": self._replicas.shared_bytes}

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold back the gradients of steps inside; the next step outside adds them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def step(self, batch: PreparedBatch, grad: torch.Tensor) -> None:
        """Take the optimizer's step from the gradient of a batch's output, flat."""
        assert batch.rows is not None
        rows: SortedRows = batch.rows
        held = None
        self._frozen.append(self.frozen)
        if self._accumulating or self._held is not None:
            held = self._accumulated(batch, grad)
            self._held = held if self._accumulating else None
            if self._accumulating:
                return
            rows = held.rows
        self._update_heap(batch, grad, rows.first(len(self._in_heap)), held)
        if self._in_tier:
            self._update_tier(batch, grad, rows, held)

    def _accumulated(self, batch: PreparedBatch, grad: torch.Tensor) -> HeldGradients:
        """Return the sum of the gradients that are held and of a batch."""
        assert batch.rows is not None
        dims, rows = [bucket.dim for bucket in self._buckets], batch.rows
        sums = _no_sums(rows, dims, self._device)
        self._sum(batch, grad, range(len(self._buckets)), sums)
        if self._held is not None:
            sums = merged([self._held.sums, sums], dims, self._device)
        if self._device.kind != "cpu":
            sums = sums.within(*self._most_held)
        return HeldGradients(SortedRows(sums.slots, sums.groups[0], rows.ranks), sums)

    def _sum(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        buckets: range,
        out: RowGradients,
    ) -> None:
        """Sum the gradients of the rows of these buckets, as far as they are trained."""

        def sum_groups(grad: torch.Tensor, groups: slice) -> None:
            options = (self._scale, out, self._device, self._means, groups)
            for b in buckets:
                if self._buckets[b].trained:
                    sum_gradients(batch, grad, b, self._buckets[b].dim, *options)

        self._path.sum_gradients(batch, grad, sum_groups)

    def _update_tier(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        rows: SortedRows,
        held: HeldGradients | None,
    ) -> None:
        """Update the rows of the source's buckets, by held gradients or a batch's."""
        tier = self._in_tier
        dims = [bucket.dim * (b in tier) for b, bucket in enumerate(self._buckets)]
        sums = _no_sums(rows, dims, self._device) if held is None else held.sums
        if held is None:
            self._sum(batch, grad, tier, sums)
        grads = [sums.gradients_of(rows.groups(b), dims[b]) for b in tier]
        step = Step(self.optimizer_steps, self.learning_rates)
        self._source.update(batch, rows, grads, step)

    def _update_heap(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        rows: SortedRows,
        held: HeldGradients | None,
    ) -> None:
        step = self.steps + 1
        # All updates add to one counter: on a device each further one takes two kernels per step.
        updated = torch.zeros(1, dtype=torch.int64, device=self._device.torch_device)
        if self.mailboxes is None:
            self._count(rows)
            self._apply_alone(batch, grad, held, updated)
        else:
            self._send_and_apply(step, self.mailboxes, batch, grad, rows, held, updated)
        self._counters.add_later(updated, _updated_rows)
        self.steps = step
        self._counters.add(steps=1)
        self._signals.post("applied", step)
        self._path.updated(step)

    @property
    def _bucket_numbers(self) -> range:
        return range(len(self._in_heap))

    def _own_group(self, b: int) -> int:
        """Return the group of a bucket's rows that this rank owns."""
        return b * (1 + self._node.ranks) + 1 + self._node.rank

    def _apply_alone(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        held: HeldGradients | None,
        updated: torch.Tensor,
    ) -> None:
        """Update the rows of a device's only rank, by held gradients or a batch's."""
        self.optimizer_steps += 1
        for b in self._bucket_numbers:
            if held is None:
                self._update_by_runs(b, batch, grad, updated)
            else:
                self._update(b, [held.sums], [self._own_group(b)], updated)

    def _send_and_apply(
        self,
        step: int,
        mailboxes: Mailbox,
        batch: PreparedBatch,
        grad: torch.Tensor,
        rows: SortedRows,
        held: HeldGradients | None,
        updated: torch.Tensor,
    ) -> None:
        """Leave gradients for the rows' owners, and update this rank's rows by those of all."""
        self._replicas.begin(step, rows)
        self._signals.wait("applied", self.steps, "update its rows")
        mine = mailboxes.open(rows)
        if held is None:
            self._sum(batch, grad, self._bucket_numbers, mine)
        else:
            # The groups and buckets are the same: buckets in the heap come first.
            size = min(len(mine.values), len(held.sums.values))
            mine.values[:size] = held.sums.values[:size]
        self._replicas.contribute(step, mine)
        self._count(rows)
        # Settings of a captured step lie in the device's memory, and are not known here.
        compares = self.captured is None and self._node.ranks > 1
        if compares:
            counts = any(bucket.optimizer.counts_steps for bucket in self._buckets)
            before = self.optimizer_steps - self.steps if counts else 0
            now = StepSettings(tuple(self.learning_rates), before, tuple(self._frozen))
            self._settings.offer(now)
        self._frozen = []
        self._signals.post("published", step)
        self._signals.wait("published", step, "send its gradients")
        self._apply(step, mailboxes, compares, updated)

    def _apply(self, step: int, mailboxes: Mailbox, compares: bool, updated: torch.Tensor) -> None:
        """Update this rank's rows by the gradients of all ranks, then its copies of the replicas,
        whose sums come last. `compares`: all ranks compare their settings before."""
        arrived = self._path.exchange_gradients(mailboxes.read, step)
        if compares:
            self._settings.check()
        trained = [b for b in self._bucket_numbers if self._buckets[b].trained]
        separated = self._copies.separate(
            [mailboxes.read(rank) for rank in self._node.peers],
            [self._own_group(b) for b in trained],
            f"add up the gradients of copies (step {step})",
        )
        mine = dict(zip(self._node.peers, separated.own, strict=True))
        copies = separated.copies
        self._replicas.reduce(step)
        self.optimizer_steps += 1
        for b, group in zip(trained, separated.groups, strict=True):
            parts, of_parts = arrived.of_bucket(b, mine, group)
            of_copies = [group] * len(copies)
            self._update(b, [*parts, *copies], [*of_parts, *of_copies], updated)
        for sums in self._replicas.sums(step):
            for b in self._bucket_numbers:
                self._update(b, [sums], [b], updated)
            self._counters.add_later(self._replicas.bytes, _allreduce_bytes)

    def _update(
        self,
        b: int,
        parts: Sequence[RowGradients],
        groups: Sequence[int],
        updated: torch.Tensor,
    ) -> None:
        """Update the rows of a bucket by a group of each part, and add their number to
        `updated`."""
        bucket = self._buckets[b]
        if not bucket.trained:
            return
        update_rows(
            bucket.optimizer,
            parts,
            groups,
            self._heap.rows(bucket.width),
            self._heap.state(bucket.width),
            bucket.dim,
            bucket.dtype,
            self.learning_rates[b],
            self.optimizer_steps,
            updated,
            self._device,
            self._heap.touched.marks(bucket.width),
            self._packed(b),
        )

    def _packed(self, b: int) -> torch.Tensor | None:
        """Return the memory for a bucket's settings of this update in the step that is captured;
        None outside a capture."""
        if self.captured is None:
            return None
        return self.captured.of(b, self.optimizer_steps)

    def _update_by_runs(
        self, b: int, batch: PreparedBatch, grad: torch.Tensor, updated: torch.Tensor
    ) -> None:
        """Sum the gradients of each row of a bucket over its accesses in a batch, on a device, and
        update it. Add the number of rows to `updated`."""
        bucket, rows = self._buckets[b], batch.rows
        if not bucket.trained:
            return
        assert isinstance(rows, Runs)
        self._device.ops().update_runs(
            grad,
            rows.positions,
            rows.starts,
            rows.slots,
            rows.before,
            self._own_group(b),
            batch.offsets,
            batch.weights,
            batch.features_there,
            batch.segment_offset,
            self._scale,
            rows.by_bag,
            self._heap.rows(bucket.width),
            self._heap.state(bucket.width),
            bucket.dim,
            DTYPE_CODE[bucket.dtype],
            bucket.optimizer.kind,
            bucket.optimizer.settings(self.learning_rates[b], self.optimizer_steps),
            updated,
            self._device.stream,
            self._means,
            self._heap.touched.marks(bucket.width),
            self._packed(b),
        )

    def _count(self, rows: SortedRows) -> None:
        self._counters.add_later(rows.before.diff().view(-1, 1 + rows.ranks), self._sent)


def _sent(dims: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """Return counters from rows by bucket and owner, replicas first, of buckets of those dims: 0
    for frozen ones, whose rows have no gradients though they may have been sorted."""
    sent = np.where(dims[:, None] > 0, rows[:, 1:], 0)
    return {"gradient_rows": sent.sum(axis=0), "gradient_bytes": 4 * dims @ sent}


def _allreduce_bytes(read: np.ndarray) -> dict[str, Any]:
    return {"allreduce_bytes": int(read[0])}


def _updated_rows(updated: np.ndarray) -> dict[str, Any]:
    return {"updated_rows": int(updated[0])}


def _mailboxes(node: Node, device: Device, buckets: Sequence[Bucket]) -> Mailbox | None:
    """Return the mailboxes of a node's ranks; None for a device's only rank, whose gradients no
    other rank reads."""
    dims = [bucket.dim for bucket in buckets]
    if isinstance(device, Cpu):
        return Mailboxes(node, dims)
    return None if node.ranks == 1 else DeviceMailboxes(node, device, dims)


def _no_sums(rows: SortedRows, dims: Sequence[int], device: Device) -> RowGradients:
    """Return gradients of rows of buckets of those dims, all zero."""
    groups = laid_out(rows.before, dims, device)
    size = room(rows.slots, groups, dims, device)
    return RowGradients(rows.slots, groups, torch.zeros(size, device=device.torch_device))


def sum_gradients(
    batch: PreparedBatch,
    grad: torch.Tensor,
    bucket: int,
    dim: int,
    scale: float,
    out: RowGradients,
    device: Device,
    means: bool = True,
    chosen: slice = slice(None),
) -> None:
    """Sum the gradients of each row of a bucket over its accesses in a batch; `grad` is the
    gradient of the batch's output. `means`: tables may be pooled by their mean. `chosen`: the
    groups of the bucket to sum, if accesses are sorted."""
    rows = batch.rows
    assert rows is not None
    groups = rows.groups(bucket)[chosen]
    of_bucket = (out.groups, bucket, groups.start, groups.stop)
    accesses = (batch.offsets, batch.weights, batch.features_there, batch.segment_offset)
    sums = (dim, scale, out.values)
    ops, stream, bags = device.ops(), device.stream, batch.forwarded
    of_clients = (
        (None, 0) if bags is None or bags.grad is None else (bags.grad.values, len(bags.features))
    )
    if isinstance(rows, NumberedRows):
        ops.add_gradients(grad, rows.row_of, *of_bucket, *accesses, *sums, *of_clients)
    else:
        runs, options = (rows.positions, rows.starts), (rows.by_bag, stream, means)
        ops.sum_gradients(grad, *runs, *of_bucket, *accesses, *sums, *options, *of_clients)
