"""A training step's backward with row-wise Adagrad: the sort, the update, and FBGEMM's.

Rows of fp32 on one rank, as for the lookup. One rank sums and updates in one kernel; the two are
timed apart as well, because several ranks run them apart. A training job sorts a batch ahead,
during other work, so ratios are given with and without the sort. `bytes` are those that must be
moved: a gradient per bag, a key per access, rows and states read and written. FBGEMM's backward
sorts by itself; its figures are null if it is not installed.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts.gpu_check.lookup_case import (
    FEATURES,
    INPUTS,
    LookupCase,
    fbgemms_table,
    measured_cases,
)

SECONDS = 40.0
NEEDS = ("torch", "numpy", "pyarrow")
LR, EPS = 0.1, 1e-8


def records(library: str | None) -> Iterator[dict[str, Any]]:
    for record, copied in measured_cases(library, measure):
        moved = record["bytes"] / copied
        yield {
            **record,
            "of_copy": moved / record["seconds"],
            "of_copy_with_sort": moved / (record["seconds"] + record["sort_seconds"]),
        }


def measure(device: Any, arena: Any, ids: str, samples: int, length: int) -> dict[str, Any]:
    """Time one backward and check it against torch's sums and the optimizer's formula."""
    import torch

    from scripts.gpu_check.timing import timed

    state = torch.zeros(len(arena), 1, device=arena.device)
    grad = torch.randn(samples, FEATURES * arena.shape[1], device=arena.device)
    cases = [Backward(device, arena, state, grad, ids, length) for _ in range(INPUTS)]
    for case in cases:
        case.sort()
    same = cases[0].is_right(cases[0].step_apart) and cases[0].is_right(cases[0].step)
    sort, step, apart, sums = (
        timed(work, cases, arena.device)
        for work in (Backward.sort, Backward.step, Backward.step_apart, Backward.sum)
    )
    distinct = int(cases[0].before[-1])
    width = 4 * arena.shape[1]
    moved = FEATURES * samples * width + 4 * cases[0].accesses + distinct * (2 * width + 16)
    of_fbgemm = fbgemms_seconds(arena, grad, cases)
    return {
        "rows": cases[0].accesses,
        "distinct": distinct,
        "sort_seconds": sort.seconds,
        "seconds": step.seconds,
        "spread": step.spread,
        "apart_seconds": apart.seconds,
        "sum_seconds": sums.seconds,
        "bytes": moved,
        "fbgemm_seconds": of_fbgemm,
        "times_fbgemm": of_fbgemm and of_fbgemm / step.seconds,
        "times_fbgemm_with_sort": of_fbgemm and of_fbgemm / (step.seconds + sort.seconds),
        "failed": not same,
    }


class Backward(LookupCase):
    """The backward of a lookup in its parts. Cases of one arena share its optimizer's state and the
    output's gradient [samples, features * dim]."""

    def __init__(
        self, device: Any, arena: Any, state: Any, grad: Any, ids: str, length: int
    ) -> None:
        import torch

        from oper.runtime.tables.optimizers import Optimizer

        super().__init__(arena, ids, len(grad), length)
        self.arena, self.state, self.grad = arena, state, grad
        self.there = self.words.to(arena.device)
        self.segments = self.starts[:: self.samples].contiguous()
        self.ops, self.stream = device.ops(), device.stream
        self.updated = torch.zeros(1, dtype=torch.int64, device=arena.device)
        self.settings = Optimizer("rowwise_adagrad", lr=LR, eps=EPS).settings(LR, 1)

    def sort(self) -> None:
        """Find the runs of accesses of one row."""
        import torch

        read = (self.addresses, self.segments, self.words, 0, 1, [len(self.arena)])
        runs = self.ops.sort_accesses(*read, self.starts, self.stream)
        self.positions, self.run_start, self.run_slot, self.before = runs
        self.groups = self.ops.lay_out_gradients(self.before, [self.dim], self.stream)
        self.values = torch.empty(len(self.run_slot) * self.dim + 16, device=self.arena.device)

    def step(self) -> None:
        """Sum the gradients of each row, and take the optimizer's step with it."""
        self.ops.update_runs(
            self.grad, self.positions, self.run_start, self.run_slot, self.before, 1, self.starts,
            None, self.there, self.segments, 1.0, True, *self._optimizer(), self.stream, False,
        )  # fmt: skip

    def step_apart(self) -> None:
        """Write the sums of each row's gradients, and take the step from these sums."""
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
        """Return the optimizer's arguments of both operators."""
        import torch

        rows, state = (part.view(torch.uint8) for part in (self.arena, self.state))
        return rows, state, self.dim, 0, "rowwise_adagrad", self.settings, self.updated

    def is_right(self, step: Callable[[], None]) -> bool:
        """Take a step, and compare it with a step from torch's sums in double precision."""
        import torch

        samples = len(self.grad)
        bags = self.grad.view(samples, FEATURES, self.dim).transpose(0, 1).reshape(-1, self.dim)
        slots, inverse = self.slots.unique(return_inverse=True)
        sums = torch.zeros(len(slots), self.dim, device=self.arena.device, dtype=torch.float64)
        sums.index_add_(0, inverse, bags.double().repeat_interleave(self.length, 0))
        squares = self.state[slots].double() + (sums**2).mean(1, keepdim=True)
        expected = self.arena[slots] - LR * sums / (squares.sqrt() + EPS)
        step()
        return bool(torch.allclose(self.arena[slots].double(), expected, rtol=1e-4, atol=1e-4))


def fbgemms_seconds(arena: Any, grad: Any, cases: Sequence[Backward]) -> float | None:
    """Return the median of FBGEMM's backward of the same lookups; None without FBGEMM."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    from scripts.gpu_check.timing import timed

    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    tbe = fbgemms_table(arena, optimizer=optimizer, learning_rate=LR, eps=EPS)
    return timed(
        lambda out: out.backward(grad),
        cases,
        arena.device,
        before=lambda case: tbe(case.slots, case.starts),
    ).seconds
