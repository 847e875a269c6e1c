"""Gradients: one optimizer step of all tables, from the gradient of a lookup's output (§5.3).

The gradients of each row are summed over its accesses into this rank's mailbox. Owners add up what
all mailboxes hold for them, in the order of ranks, and update each row once; replicas go through
the sparse AllReduce and are updated on every rank. Every sum has a fixed order, so that equal runs
give equal bits.

Four counters of the signals order the ranks; each is the number of the step that a rank finished:

    marked      the bitmap says which replicas were touched
    published   the mailbox is written, and all rows of this step have been read
    reduced     this rank's slice of the replicas' gradients is summed
    applied     this rank's rows are updated: they may be read again, mailboxes may be overwritten
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from oper.base import native
from oper.runtime.allreduce.replica_allreduce import ReplicaAllReduce
from oper.runtime.memory.gradient_mailbox import Mailboxes
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import NumberedRows, PreparedBatch, SortedRows
from oper.runtime.step.access_counters import Counters
from oper.runtime.step.row_source import RowSource, Step, buckets_in_heap
from oper.runtime.tables.optimizer_buckets import Bucket
from oper.runtime.tables.optimizers import RowGradients, update_rows

COUNTERS = ("marked", "published", "reduced", "applied")


@dataclass(frozen=True)
class HeldGradients:
    """Rows, and the sum of the gradients of each so far, by bucket: float32 [rows of it, dim]."""

    rows: SortedRows
    grads: list[torch.Tensor]


class Gradients:
    """The training of one engine's buckets; `replicas` is None where there are none. Rows of the
    tier's tables are in `source`, if there is one, and all others in the heap.

    `steps` counts this engine's; `optimizer_steps` too, unless it was loaded from a checkpoint.
    """

    def __init__(
        self,
        memory: TableMemory,
        source: RowSource | None,
        replicas: ReplicaAllReduce | None,
        counters: Counters,
        scale: float,
    ) -> None:
        self._buckets, self._in_heap = memory.buckets, buckets_in_heap(memory.buckets, source)
        self._heap, self._node, self._signals = memory.heap, memory.node, memory.signals
        self._all_to_all, self._source = memory.all_to_all, source
        self._replicas, self._counters, self._scale = replicas, counters, scale
        self.mailboxes = Mailboxes(self._node, [bucket.dim for bucket in self._in_heap])
        self.learning_rates = [bucket.optimizer.lr for bucket in self._buckets]
        self.steps = self.optimizer_steps = 0
        self._accumulating = False
        self._held: HeldGradients | None = None

    @property
    def shared_bytes(self) -> dict[str, int]:
        """Bytes of this rank's shared memory that a step's gradients pass through."""
        allreduce = 0 if self._replicas is None else self._replicas.shared_bytes
        return {"mailbox": self.mailboxes.bytes, "allreduce": allreduce}

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Steps inside hold their gradients back; the next one outside adds them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def step(self, batch: PreparedBatch, grad: torch.Tensor) -> None:
        """Take the optimizer's step from the gradient of a batch's output, flat."""
        assert batch.rows is not None
        rows: SortedRows = batch.rows
        total = None
        if self._accumulating or self._held is not None:
            total = accumulate(self._held, batch, grad, self._buckets, self._scale)
            self._held = total if self._accumulating else None
            if self._accumulating:
                return
            rows = total.rows
        self._update_heap(batch, grad, rows.first(len(self._in_heap)), total)
        if self._source is not None:
            grads = []
            for b in range(len(self._in_heap), len(self._buckets)):
                of_bucket = rows.bucket(b)
                out = torch.empty(of_bucket.stop - of_bucket.start, self._buckets[b].dim)
                self._sum(batch, grad, b, total, out)
                grads.append(out)
            step = Step(self.optimizer_steps, self.learning_rates)
            self._source.update(batch, rows, grads, step)

    def _sum(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        b: int,
        total: HeldGradients | None,
        out: torch.Tensor,
    ) -> None:
        """The gradients of a bucket's rows, or those that were accumulated, [rows, dim]."""
        if total is not None:
            out.copy_(total.grads[b])
        elif self._buckets[b].trained:
            sum_gradients(batch, grad, b, self._buckets[b].dim, self._scale, out)

    def _update_heap(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        rows: SortedRows,
        total: HeldGradients | None,
    ) -> None:
        step, replicas = self.steps + 1, [self._replica_rows(rows, b) for b in self._bucket_numbers]
        if self._replicas is not None:
            self._replicas.begin(step, [rows.slots[of_bucket] for of_bucket in replicas])
        self._signals.wait("applied", self.steps, "update its rows")
        grads = self.mailboxes.open(rows)
        for b, out in enumerate(grads):
            self._sum(batch, grad, b, total, out)
        if self._replicas is not None:
            # A bucket's replicas are its first rows.
            sums = [g[: r.stop - r.start] for g, r in zip(grads, replicas, strict=True)]
            self._replicas.contribute(step, sums)
        self._count(rows)
        self._signals.post("published", step)
        received = self._received(rows, grads)
        self._signals.wait("published", step, "send its gradients")
        self._apply(step, received)
        self.steps = step
        self._counters.add(steps=1)
        self._signals.post("applied", step)

    @property
    def _bucket_numbers(self) -> range:
        return range(len(self._in_heap))

    def _replica_rows(self, rows: SortedRows, bucket: int) -> slice:
        """The replicas of a bucket whose gradients are summed: none of a frozen one."""
        found = rows.replicas(bucket)
        return found if self._buckets[bucket].trained else slice(found.start, found.start)

    def _apply(self, step: int, received: list[list[RowGradients]]) -> None:
        """Update this rank's rows, then its copies of the replicas, whose sums come last."""
        if self._replicas is not None:
            self._replicas.reduce(step)
        self.optimizer_steps += 1
        parts: list[list[RowGradients]] = [[] for _ in self._in_heap]
        for rank in range(self._node.ranks):
            mapped = rank in self._node.peers
            found = self.mailboxes.read(rank, self._node.rank) if mapped else received[rank]
            for mine, part in zip(parts, found, strict=True):
                if len(part.slots):
                    mine.append(part)
        for b, mine in enumerate(parts):
            self._update(b, mine)
        if self._replicas is not None:
            for b, part in enumerate(self._replicas.result(step)):
                self._update(b, [part])
            self._counters.add(allreduce_bytes=self._replicas.bytes)

    def _received(self, rows: SortedRows, grads: list[torch.Tensor]) -> list[list[RowGradients]]:
        """What ranks that share no memory with this one have for it, by rank and bucket."""
        received: list[list[RowGradients]] = [[] for _ in range(self._node.ranks)]
        if self._all_to_all is None:
            return received
        for b, of_bucket in enumerate(grads):
            base, slots_out, grads_out = rows.bucket(b).start, [], []
            for rank in range(self._node.ranks):
                theirs = rows.range(b, rank)
                first, last = theirs.start, theirs.stop
                if rank in self._node.peers:
                    last = first
                slots_out.append(rows.slots[first:last])
                grads_out.append(of_bucket[first - base : last - base])
            action = f"exchange gradients (step {self.steps + 1})"
            slots_in = self._all_to_all.send(slots_out, action)
            grads_in = self._all_to_all.send(grads_out, action)
            for mine, part in zip(received, zip(slots_in, grads_in, strict=True), strict=True):
                mine.append(RowGradients(*part))
        return received

    def _update(self, b: int, parts: list[RowGradients]) -> None:
        bucket = self._buckets[b]
        if not parts or not bucket.trained:
            return
        updated = update_rows(
            bucket.optimizer,
            [part.slots for part in parts],
            [part.grads for part in parts],
            self._heap.rows(bucket.width),
            self._heap.state(bucket.width),
            bucket.dim,
            bucket.dtype,
            self.learning_rates[b],
            self.optimizer_steps,
        )
        self._counters.add(updated_rows=updated)

    def _count(self, rows: SortedRows) -> None:
        sent = rows.row_counts()[:, 1:]
        dims = np.array([bucket.dim for bucket in self._in_heap], dtype=np.int64)
        self._counters.add(gradient_rows=sent.sum(axis=0), gradient_bytes=4 * dims @ sent)


def accumulate(
    held: HeldGradients | None,
    batch: PreparedBatch,
    grad: torch.Tensor,
    buckets: Sequence[Bucket],
    scale: float,
) -> HeldGradients:
    """Add a batch's gradients, times `scale`, to those that are held."""
    assert batch.rows is not None
    grads = []
    for b, bucket in enumerate(buckets):
        of_bucket = batch.rows.bucket(b)
        out = torch.zeros(of_bucket.stop - of_bucket.start, bucket.dim)
        if bucket.trained:
            sum_gradients(batch, grad, b, bucket.dim, scale, out)
        grads.append(out)
    rows = batch.rows
    new = HeldGradients(SortedRows(rows.slots, rows.before, rows.ranks), grads)
    return new if held is None else _merged(held, new)


def sum_gradients(
    batch: PreparedBatch, grad: torch.Tensor, bucket: int, dim: int, scale: float, out: torch.Tensor
) -> None:
    """Sum the gradients of each row of a bucket over its accesses in a batch, into `out`
    [rows, dim]; `grad` is that of the batch's output."""
    rows = batch.rows
    assert rows is not None
    of_bucket = rows.bucket(bucket)
    if isinstance(rows, NumberedRows):
        native.ops().add_gradients(
            grad,
            rows.row_of,
            bucket,
            of_bucket.start,
            batch.offsets,
            batch.weights,
            batch.features,
            batch.segment_offset,
            dim,
            scale,
            out,
        )
        return
    native.ops().sum_gradients(
        grad,
        rows.positions,
        rows.starts,
        of_bucket.start,
        of_bucket.stop,
        batch.offsets,
        batch.weights,
        batch.features,
        batch.segment_offset,
        dim,
        scale,
        out,
        rows.by_bag,
    )


def _merged(a: HeldGradients, b: HeldGradients) -> HeldGradients:
    """The rows of either, and the sums of their gradients."""
    slots, sizes, grads = [], [0], []
    for bucket in range(a.rows.buckets):
        sums = []
        of_a, of_b = _parts(a.rows, bucket), _parts(b.rows, bucket)
        for mine, other in zip(of_a, of_b, strict=True):
            both = torch.cat([a.rows.slots[mine], b.rows.slots[other]])
            unique, index = both.unique(return_inverse=True)
            total = torch.zeros(len(unique), a.grads[bucket].shape[1])
            cut = mine.stop - mine.start
            total.index_add_(0, index[:cut], _grads(a, bucket, mine))
            total.index_add_(0, index[cut:], _grads(b, bucket, other))
            slots.append(unique)
            sizes.append(len(unique))
            sums.append(total)
        grads.append(torch.cat(sums))
    before = torch.tensor(sizes).cumsum(0)
    return HeldGradients(SortedRows(torch.cat(slots), before, a.rows.ranks), grads)


def _parts(rows: SortedRows, bucket: int) -> list[slice]:
    """The replicas of a bucket, and the rows of each rank."""
    owners = range(rows.ranks)
    return [rows.replicas(bucket), *(rows.range(bucket, owner) for owner in owners)]


def _grads(held: HeldGradients, bucket: int, rows: slice) -> torch.Tensor:
    base = held.rows.bucket(bucket).start
    return held.grads[bucket][rows.start - base : rows.stop - base]
