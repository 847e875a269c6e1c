"""Optimizer step with rows in the host's memory, from gradients with their slots."""

from collections.abc import Sequence

import torch

from oper.base.arrays import Ints
from oper.runtime.memory.device import Cpu
from oper.runtime.tables.optimizer_buckets import Bucket
from oper.runtime.tables.optimizers import update_rows
from oper.runtime.tables.row_gradients import RowGradients


def take_step(
    of: Bucket,
    parts: Sequence[tuple[Ints, torch.Tensor]],
    rows: torch.Tensor,
    states: torch.Tensor,
    rate: float,
    number: int,
) -> None:
    """Update a bucket's rows and their states, uint8 [slots, bytes], in step `number` at learning
    rate `rate`, by the sums over the parts: ascending slots [n] and gradients [n, dim] each."""
    sums = [RowGradients.of_rows(torch.from_numpy(slots), grads) for slots, grads in parts]
    updated = torch.zeros(1, dtype=torch.int64)
    update_rows(
        of.optimizer,
        sums,
        [0] * len(sums),
        rows,
        states,
        of.dim,
        of.dtype,
        rate,
        number,
        updated,
        Cpu(),
    )
