"""What a method of the replicas' AllReduce has to do; the methods are in dense.py, bitmap.py and
allgather.py."""

from typing import Protocol

import torch

from oper.runtime.tables.row_gradients import RowGradients

Tensors = list[torch.Tensor]


class Method(Protocol):
    """The parts of a step, between which the ranks of the node wait for each other.

    Lists have an element for each bucket. Replicas are given by number within their bucket.
    """

    read_bytes: int  # in this step, from memory that other ranks of the node wrote

    @property
    def shared_bytes(self) -> int:
        """Of this rank's shared memory."""

    def mark(self, numbers: Tensors) -> None:
        """Let the other ranks know which replicas were touched here, int64 ascending."""

    def write(self, numbers: Tensors, grads: Tensors) -> None:
        """Let the other ranks read their gradients, float32 [touched, dim], once all have
        marked."""

    def reduce(self) -> None:
        """Do this rank's part of the sums, once all ranks of the node have written."""

    def read(self) -> list[RowGradients]:
        """The replicas that any rank touched, by number, and their sums, once all ranks of the
        node have reduced."""
