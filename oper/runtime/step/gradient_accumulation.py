"""Gradient accumulation: gradients of several backward passes, held until one step takes all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oper.base import native
from oper.runtime.memory.batch import PreparedBatch
from oper.runtime.memory.sorted_accesses import NumberedRows, SortedRows
from oper.runtime.tables.optimizer_buckets import Bucket


@dataclass(frozen=True)
class HeldGradients:
    """Rows, and the sum of the gradients of each so far, by bucket: float32 [rows of it, dim]."""

    rows: SortedRows
    grads: list[torch.Tensor]


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
