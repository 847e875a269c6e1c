"""Gathered: gradients of several backward passes, held back until a step takes them all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oper.base import native
from oper.runtime.step.batch import PreparedBatch
from oper.runtime.tables.buckets import Bucket


@dataclass(frozen=True)
class HeldGradients:
    """Runs as a sort gives them (slots and prefix), and the sum of gradients of each, by bucket."""

    run_slot: torch.Tensor
    run_count: torch.Tensor
    grads: list[torch.Tensor]


def hold(
    held: HeldGradients | None,
    batch: PreparedBatch,
    grad: torch.Tensor,
    buckets: Sequence[Bucket],
    ranks: int,
    scale: float,
) -> HeldGradients:
    """What was held and a further batch's gradients together."""
    assert batch.runs is not None
    positions, run_start, run_slot, run_count = batch.runs
    prefix = run_count.tolist()
    codes = ranks + 1
    grads = []
    for b, bucket in enumerate(buckets):
        first, last = prefix[b * codes], prefix[(b + 1) * codes]
        out = torch.zeros(last - first, bucket.dim)
        if bucket.trained:
            native.ops().sum_gradients(
                grad, positions, run_start, first, last, batch.offsets, batch.weights,
                batch.features, batch.segment_offset, bucket.dim, scale, out,
            )  # fmt: skip
        grads.append(out)
    new = HeldGradients(run_slot, run_count, grads)
    return new if held is None else _merged(held, new, len(buckets), codes)


def _merged(a: HeldGradients, b: HeldGradients, buckets: int, codes: int) -> HeldGradients:
    slots, sizes, grads = [], [0], []
    before, after = a.run_count.tolist(), b.run_count.tolist()
    for bucket in range(buckets):
        rows = []
        for key in range(bucket * codes, (bucket + 1) * codes):
            mine = slice(before[key], before[key + 1])
            other = slice(after[key], after[key + 1])
            both = torch.cat([a.run_slot[mine], b.run_slot[other]])
            unique, index = both.unique(return_inverse=True)
            total = torch.zeros(len(unique), a.grads[bucket].shape[1])
            cut = mine.stop - mine.start
            total.index_add_(0, index[:cut], _rows(a, bucket, mine, before, codes))
            total.index_add_(0, index[cut:], _rows(b, bucket, other, after, codes))
            slots.append(unique)
            sizes.append(len(unique))
            rows.append(total)
        grads.append(torch.cat(rows))
    return HeldGradients(torch.cat(slots), torch.tensor(sizes).cumsum(0), grads)


def _rows(
    part: HeldGradients, bucket: int, runs: slice, prefix: Sequence[int], codes: int
) -> torch.Tensor:
    first = prefix[bucket * codes]
    return part.grads[bucket][runs.start - first : runs.stop - first]
