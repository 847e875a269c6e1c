"""A training step's backward with row-wise Adagrad: the sort, the step, and FBGEMM's.

Rows of fp32 on one rank, as for the lookup. There sums and updates are one kernel; both are timed
apart as well, as several ranks have them. The sort is made a batch ahead, beside other work, so
that times are given with and without it. Bytes are those that must be moved: a gradient for each
bag, a key for each access, rows and states read and written. FBGEMM's backward sorts by itself; its
figures are null where it is not installed.
"""

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from scripts.gpu_check.lookup_case import FEATURES, LookupCase, fbgemms_table, measured_cases

SECONDS = 100.0
NEEDS = ("torch", "numpy", "pyarrow")
LR, EPS = 0.1, 1e-8


def records(**sizes: Any) -> Iterator[dict[str, Any]]:
    """`sizes` are those of measured_cases."""
    for found, copied in measured_cases(measure, **sizes):
        moved = found["bytes"] / copied
        yield {
            **found,
            "of_copy": moved / found["seconds"],
            "of_copy_with_sort": moved / (found["seconds"] + found["sort_seconds"]),
        }


def measure(arena: Any, ids: str, samples: int, length: int) -> dict[str, Any]:
    """One backward, checked against torch's sums and the optimizer's formula."""
    from scripts.gpu_check.timing import median_seconds

    backward = Backward(arena, ids, samples, length)
    # The processor has no kernel for both.
    step_by = backward.step if arena.is_cuda else backward.step_apart
    backward.sort()
    same = backward.is_right(backward.step_apart) and backward.is_right(step_by)
    sort, step, apart, sums = (
        median_seconds(work, arena.device)
        for work in (backward.sort, step_by, backward.step_apart, backward.sum)
    )
    distinct = int(backward.before[-1])
    width = 4 * arena.shape[1]
    moved = FEATURES * samples * width + 4 * backward.accesses + distinct * (2 * width + 16)
    of_fbgemm = fbgemms_seconds(arena, backward)
    return {
        "rows": backward.accesses,
        "distinct": distinct,
        "sort_seconds": sort,
        "seconds": step,
        "apart_seconds": apart,
        "sum_seconds": sums,
        "bytes": moved,
        "fbgemm_seconds": of_fbgemm,
        "times_fbgemm": None if of_fbgemm is None else of_fbgemm / step,
        "times_fbgemm_with_sort": None if of_fbgemm is None else of_fbgemm / (step + sort),
        "failed": not same,
    }


class Backward(LookupCase):
    """The backward of a lookup in its parts."""

    def __init__(self, arena: Any, ids: str, samples: int, length: int) -> None:
        import torch

        from oper.base import native
        from oper.runtime.tables.optimizers import Optimizer
        from scripts.gpu_check.timing import stream

        super().__init__(arena, ids, samples, length)
        self.arena = arena
        self.there = self.words.to(arena.device)
        self.segments = self.starts[::samples].contiguous()
        self.grad = torch.randn(samples, FEATURES * self.dim, device=arena.device)
        self.state = torch.zeros(len(arena), 1, device=arena.device)
        self.ops = native.device_ops() if arena.is_cuda else native.ops()
        self.stream = stream(arena.device)
        self.updated = torch.zeros(1, dtype=torch.int64, device=arena.device)
        self.settings = Optimizer("rowwise_adagrad", lr=LR, eps=EPS).settings(LR, 1)

    def sort(self) -> None:
        """Find the runs of accesses of one row."""
        import torch

        read = (self.addresses, self.segments, self.words, 0, 1, [len(self.arena)])
        found = self.ops.sort_accesses(*read, self.starts, self.stream)
        self.positions, self.run_start, self.run_slot, self.before = found
        self.groups = self.ops.lay_out_gradients(self.before, [self.dim], self.stream)
        self.values = torch.empty(len(self.run_slot) * self.dim + 16, device=self.arena.device)

    def step(self) -> None:
        """Sum the gradients of each row, and take the optimizer's step with it."""
        self.ops.update_runs(
            self.grad, self.positions, self.run_start, self.run_slot, self.before, 1, self.starts,
            None, self.there, self.segments, 1.0, True, *self._optimizer(), self.stream, False,
        )  # fmt: skip

    def step_apart(self) -> None:
        """Write the sums of each row's gradients, and take the step from what was written."""
        self.sum()
        self.ops.update_rows(
            [self.run_slot], [self.values], [self.groups], [1], *self._optimizer(), self.stream
        )

    def sum(self) -> None:
        """Sum the gradients of each row."""
        self.ops.sum_gradients(
            self.grad, self.positions, self.run_start, self.groups, 0, 0, 2, self.starts, None,
            self.there, self.segments, self.dim, 1.0, self.values, True, self.stream, False,
        )  # fmt: skip

    def _optimizer(self) -> tuple[Any, ...]:
        """What both operators take of it."""
        import torch

        rows, state = (part.view(torch.uint8) for part in (self.arena, self.state))
        return rows, state, self.dim, 0, "rowwise_adagrad", self.settings, self.updated

    def is_right(self, step: Callable[[], None]) -> bool:
        """Take a step, and see whether it is that of sums by torch."""
        import torch

        samples = len(self.grad)
        bags = self.grad.view(samples, FEATURES, self.dim).transpose(0, 1).reshape(-1, self.dim)
        slots, of = self.slots.unique(return_inverse=True)
        sums = torch.zeros(len(slots), self.dim, device=self.arena.device, dtype=torch.float64)
        sums.index_add_(0, of, bags.double().repeat_interleave(self.length, 0))
        squares = self.state[slots].double() + (sums**2).mean(1, keepdim=True)
        expected = self.arena[slots] - LR * sums / (squares.sqrt() + EPS)
        step()
        return bool(torch.allclose(self.arena[slots].double(), expected, rtol=1e-4, atol=1e-4))


def fbgemms_seconds(arena: Any, ours: Backward) -> float | None:
    """The median of FBGEMM's backward of the same lookup; None where it is not installed."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    from scripts.gpu_check.timing import seconds_of

    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    tbe = fbgemms_table(arena, optimizer=optimizer, learning_rate=LR, eps=EPS)
    found = []
    for _ in range(12):
        out = tbe(ours.slots, ours.starts)
        found.append(seconds_of(partial(out.backward, ours.grad), arena.device))
    return statistics.median(found[2:])
