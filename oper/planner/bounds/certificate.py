"""Certificate: how far a plan's objective is from a lower bound on that of every plan.

In: `ClassProblem`, an objective in seconds. Out: `Certificate`, with gap = (objective - bound) /
bound. The bound is that of `lagrangian_bound.py`. Where that leaves a gap and single rows are hot,
the bound of `hot_rows_bound.py` is tried too, which takes longer and knows that rows cannot be
split.
"""

from dataclasses import dataclass, replace
from typing import Any

from oper.planner.bounds.hot_rows_bound import hot_rows_bound
from oper.planner.bounds.lagrangian_bound import Bound, lower_bound
from oper.planner.problem.problem import ClassProblem

# Above this gap the bound with whole hot rows is tried; a smaller one is good enough.
HOT_ROWS_FROM_GAP = 1e-3


@dataclass(frozen=True)
class Certificate:
    """A plan's objective and its lower bound, both in seconds."""

    objective_seconds: float
    bound: Bound
    hot_row: str | None = None  # a sentence, where a single row is what binds
    # The bound for all that the devices' memory allows, where the plan was to use less of it.
    full_memory_seconds: float | None = None

    @property
    def gap(self) -> float:
        """(objective - bound) / bound; 0 where nothing is ever read."""
        bound = self.bound.seconds
        return (self.objective_seconds - bound) / bound if bound > 0 else 0.0

    def of(self, objective_seconds: float) -> "Certificate":
        """The same bound for another plan of the same problem."""
        return replace(self, objective_seconds=objective_seconds)

    def to_json(self) -> dict[str, Any]:
        """The certificate's fields of `oper plan --json`; the last two only where there are any."""
        content = {
            "lower_bound_seconds": self.bound.seconds,
            "certified_gap": self.gap,
            "hot_row": self.hot_row,
        }
        if self.bound.note:
            content["bound_note"] = self.bound.note
        if self.full_memory_seconds is not None:
            content["full_memory_bound_seconds"] = self.full_memory_seconds
        return content


def certify(problem: ClassProblem, objective_seconds: float) -> Certificate:
    """Bound the objective of every plan for the problem, and compare a plan's with that."""
    classes = problem.classes
    limits = (problem.topology, problem.workload, problem.capacity_bytes, problem.budget_bytes)
    bound = lower_bound(classes, *limits)
    if objective_seconds > bound.seconds * (1 + HOT_ROWS_FROM_GAP):
        tried = hot_rows_bound(classes, *limits)
        bound = replace(max(bound, tried, key=lambda found: found.seconds), note=tried.note)
    hot = None
    if bound.hot_class is not None:
        c = bound.hot_class
        share = classes.accesses[c] / max(classes.total_accesses, 1)
        hot = (
            f"a single row with {share:.2%} of all accesses cannot be split: some rank "
            "takes this long for it whatever the plan"
        )
    return Certificate(objective_seconds, bound, hot)
