"""Gradients of rows: which rows of an arena, and the gradient of each."""

from typing import NamedTuple

import torch


class RowGradients(NamedTuple):
    """Slots, int64 [n] ascending, and the gradients of their rows, float32 [n, dim]."""

    slots: torch.Tensor
    grads: torch.Tensor
