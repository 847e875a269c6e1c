"""Row gradients: the sums of gradients of a batch's rows, by group, as ranks exchange them.

A group is the rows of one bucket and owner (prepared_batch.py); its gradients lie together, one
group after another, and each bucket's begin at a cache line. The starts of groups are in a tensor,
because on a device the host does not know them without waiting; tensors are as long as they may
become.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oper.base import native
from oper.base.arrays import Ints
from oper.base.native import Kernels
from oper.cost.step_memory import LINE_VALUES, most_values


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
        """Return slots [n] and their gradients [n, dim] as one group."""
        groups = torch.tensor([[0, slots.numel()], [0, gradients.numel()]])
        return cls(slots, groups, gradients.reshape(-1))

    @classmethod
    def of_pieces(
        cls, pieces: Sequence["Piece"], dims: Sequence[int], on: torch.device
    ) -> "RowGradients":
        """Return the pieces as one group each; the host knows the rows of each piece. A group
        begins at a line, as a bucket of its dim does."""
        before = torch.tensor([0, *(len(slots) for slots, _ in pieces)]).cumsum(0)
        groups = laid_out_on_host(before, dims)
        begins: list[int] = groups[1].tolist()
        padding = torch.zeros(LINE_VALUES, device=on)
        values, end = [padding[:0]], 0
        for (_, gradients), begin in zip(pieces, begins, strict=False):
            values += [padding[: begin - end], gradients.reshape(-1)]
            end = begin + gradients.numel()
        there = groups.to(on, non_blocking=True)
        slots = torch.cat([there.new_empty(0), *(slots for slots, _ in pieces)])
        return cls(slots, there, torch.cat([*values, padding[: begins[-1] - end]]))

    def piece(self, group: int, dim: int, groups: Ints) -> "Piece":
        """Return a group of a bucket of that dim; `groups` is a copy of these gradients' `groups`
        in the host's memory."""
        (begin, end), (value, _) = groups[:, group : group + 2].tolist()
        gradients = self.values[value : value + (end - begin) * dim]
        return self.slots[begin:end], gradients.view(end - begin, dim)

    def within(self, rows: int, values: int) -> "RowGradients":
        """Return these gradients, of which there are at most so many rows and values, without the
        room beyond that."""
        return RowGradients(self.slots[:rows], self.groups, self.values[:values])

    def gradients_of(self, groups: range, dim: int) -> torch.Tensor:
        """Return the gradients of groups of one bucket, [rows, dim]. The host must know the counts
        for it, and waits for a device's."""
        rows, values = self.groups[:, [groups.start, groups.stop]].tolist()
        count = rows[1] - rows[0]
        return self.values[values[0] :][: count * dim].view(count, dim)


# Slots [n] and their gradients [n, dim].
Piece = tuple[torch.Tensor, torch.Tensor]


def groups_on_host(parts: Sequence[RowGradients]) -> Ints:
    """Return the groups of parts of one shape, [parts, 2, G + 1]. The host waits for a device's,
    once."""
    groups: Ints = torch.stack([part.groups for part in parts]).cpu().numpy()
    return groups


def laid_out(before: torch.Tensor, dims: Sequence[int], on: Kernels) -> torch.Tensor:
    """Return the groups of rows of buckets of those dims, int64 [2, G + 1], from the rows before
    each of G groups; a bucket of dim 0 has no gradients."""
    groups: torch.Tensor = on.ops().lay_out_gradients(before, list(dims), on.stream)
    return groups


def laid_out_on_host(before: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return the groups as `laid_out` does, from counts in the host's memory."""
    groups: torch.Tensor = native.ops().lay_out_gradients(before, list(dims))
    return groups


def merged(parts: Sequence[RowGradients], dims: Sequence[int], on: Kernels) -> RowGradients:
    """Return the rows of any of the parts, and the sums of their gradients in the order of the
    parts; `dims` are the buckets'."""
    slots, groups, values = on.ops().merge_gradients(
        [part.slots for part in parts],
        [part.values for part in parts],
        [part.groups for part in parts],
        list(dims),
        on.stream,
    )
    return RowGradients(slots, groups, values)


def room(slots: torch.Tensor, groups: torch.Tensor, dims: Sequence[int], on: Kernels) -> int:
    """Return the number of values to reserve for rows of buckets of those dims that are laid out
    so. The host does not know the number of a device's rows in each bucket, so it counts as if all
    rows had the widest dim."""
    if on.kind == "cpu":
        return int(groups[1, -1])
    return most_values(len(slots), dims)
