"""The solver's placement of whole partitions: exact, for problems with few partitions.

In: `Problem`. Out: `Baseline`. Partitions are those of the threshold asked for; the programme is in
`bounds/milp.py`.
"""

from typing import Literal

from oper.planner.baselines.baseline import Baseline, Cells, NoPlacementError
from oper.planner.bounds.milp import solve
from oper.planner.class_placement.access_partitions import partitions
from oper.planner.problem.problem import ClassProblem


def milp(problem: ClassProblem, limit_seconds: float) -> Baseline:
    """The best placement of whole partitions that the solver finds in `limit_seconds`, building its
    programme included.

    Raises NoPlacementError where it finds none, or where whole partitions do not fit.
    """
    parts = partitions(problem.classes, problem.asked.threshold)
    cells = Cells(parts.run_class, parts.run_partition, parts.run_rows)
    sums = cells.sums(problem.classes, len(parts))
    found = solve(
        sums,
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
        limit_seconds,
    )
    if found.holder_sets is None:
        status: Literal["time_limit", "infeasible"] = (
            "infeasible" if found.status == "infeasible" else "time_limit"
        )
        reason = f"the solver found no placement of {len(parts):,} whole partitions"
        if status == "time_limit":
            reason += (
                f" in {limit_seconds:g} s; a larger --time-limit gives it more, a larger "
                "--threshold makes fewer partitions"
            )
        raise NoPlacementError(status, reason)
    notes = {
        "status": "ok" if found.status == "optimal" else found.status,
        "partitions": len(parts),
        "solver": found.solver,
        "solver_gap": found.gap,
        "solver_bound_seconds": found.bound_seconds,
    }
    return Baseline("milp", found.holder_sets, sums, cells, notes=notes)
