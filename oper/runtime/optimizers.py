"""The optimizers of embedding tables: settings, state of a slot, and the update of merged rows.

An optimizer sees each row's whole gradient once per step and touches only the rows that have one
(FBGEMM's fused sparse optimizers); §5 of the paper has owners apply it. The kernel is
csrc/include/oper/optimizers.h.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oper import native
from oper.errors import OperError

VALUE_BYTES = 4  # state is float32, whatever the rows are


@dataclass(frozen=True)
class State:
    """One part of an optimizer's state: float32, [rows, dim] or, row-wise, [rows]."""

    name: str
    rowwise: bool = False

    def values(self, dim: int) -> int:
        """Values a row of `dim` has of it."""
        return 1 if self.rowwise else dim


STATES: dict[str, tuple[State, ...]] = {
    "none": (),
    "sgd": (),
    "momentum_sgd": (State("momentum1"),),
    "adagrad": (State("momentum1"),),
    "rowwise_adagrad": (State("momentum1", rowwise=True),),
    "adam": (State("momentum1"), State("exp_avg_sq")),
    "partial_rowwise_adam": (State("momentum1"), State("exp_avg_sq", rowwise=True)),
}


@dataclass(frozen=True)
class Optimizer:
    """What a bucket of tables is trained with; kind "none" is for frozen tables."""

    kind: str = "sgd"
    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if self.kind not in STATES:
            raise OperError(
                f"optimizer {self.kind!r}: not one of {', '.join(STATES)}. Choose one of these."
            )

    @property
    def states(self) -> tuple[State, ...]:
        """The parts of a slot's state, in the order in which they lie there."""
        return STATES[self.kind]

    def state_bytes(self, dim: int) -> int:
        """Bytes of state of a slot."""
        return VALUE_BYTES * sum(state.values(dim) for state in self.states)

    def state_slices(self, dim: int) -> dict[str, slice]:
        """Where each part lies in a slot's state, in float32 values."""
        slices, first = {}, 0
        for state in self.states:
            slices[state.name] = slice(first, first + state.values(dim))
            first = slices[state.name].stop
        return slices

    def settings(self, lr: float, step: int) -> list[float]:
        """What the kernel takes, for the step numbered `step`, from 1, at learning rate `lr`."""
        return [lr, self.eps, self.weight_decay]


DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def update_rows(
    optimizer: Optimizer,
    slots: Sequence[Tensor],
    grads: Sequence[Tensor],
    rows: Tensor,
    state: Tensor,
    dim: int,
    dtype: torch.dtype,
    lr: float,
    step: int,
) -> int:
    """Sum the gradients of each row over the lists, in their order, and update the row once.

    Args:
        slots: of each rank, int64 [n_i], ascending.
        grads: of each rank, float32 [n_i, dim].
        rows, state: arenas, uint8 [slots, bytes].
        dtype: of the rows' values.
        lr: the learning rate of this step.
        step: the number of this step, from 1.

    Returns:
        The number of rows updated.
    """
    return native.ops().update_rows(
        list(slots),
        list(grads),
        rows,
        state,
        dim,
        DTYPES[dtype],
        optimizer.kind,
        optimizer.settings(lr, step),
    )
