"""Row gradients: the sums of gradients of a batch's rows, by group, as ranks exchange them.

A group is the rows of one bucket and owner (prepared_batch.py); its gradients lie together, one
group after another, and each bucket's begin where a line of the caches does. Where a group begins
is a tensor's to say, not the host's: on a device the host does not know it without waiting, and
tensors are as long as they may become.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oper.base.native import Kernels
from oper.cost.step_memory import most_values


@dataclass(frozen=True, eq=False)
class RowGradients:
    """Gradients of distinct rows.

    `groups` has the rows before each of G groups, and the values before its gradients, and last the
    ends of both.
    """

    slots: torch.Tensor  # int64 [rows or more], ascending in each group
    groups: torch.Tensor  # int64 [2, G + 1]
    values: torch.Tensor  # float32 [values or more]

    @classmethod
    def of_rows(cls, slots: torch.Tensor, gradients: torch.Tensor) -> "RowGradients":
        """Slots [n] and their gradients [n, dim], as one group."""
        groups = torch.tensor([[0, slots.numel()], [0, gradients.numel()]])
        return cls(slots, groups, gradients.reshape(-1))

    def within(self, rows: int, values: int) -> "RowGradients":
        """These gradients, of which there are at most so many rows and values, without the room
        beyond that."""
        return RowGradients(self.slots[:rows], self.groups, self.values[:values])

    def gradients_of(self, groups: range, dim: int) -> torch.Tensor:
        """Those of groups of one bucket, [rows, dim]. The host must know the counts for it, and
        waits for a device's."""
        rows, values = self.groups[:, [groups.start, groups.stop]].tolist()
        count = rows[1] - rows[0]
        return self.values[values[0] :][: count * dim].view(count, dim)


def laid_out(before: torch.Tensor, dims: Sequence[int], on: Kernels) -> torch.Tensor:
    """The groups of rows of buckets of those dims, int64 [2, G + 1], from the rows before each of G
    groups; a bucket of dim 0 has no gradients."""
    found: torch.Tensor = on.ops().lay_out_gradients(before, list(dims), on.stream)
    return found


def merged(parts: Sequence[RowGradients], dims: Sequence[int], on: Kernels) -> RowGradients:
    """The rows of any of the parts, and the sums of their gradients in the order of the parts;
    `dims` are the buckets'."""
    slots, groups, values = on.ops().merge_gradients(
        [part.slots for part in parts],
        [part.values for part in parts],
        [part.groups for part in parts],
        list(dims),
        on.stream,
    )
    return RowGradients(slots, groups, values)


def room(slots: torch.Tensor, groups: torch.Tensor, dims: Sequence[int], on: Kernels) -> int:
    """How many values to have room for, of rows of buckets of those dims that are laid out so. The
    host does not know how many a device has of which bucket: as many as if all had the widest."""
    if on.kind == "cpu":
        return int(groups[1, -1])
    return most_values(len(slots), dims)
