"""The solver's placement of whole partitions: exact, for problems with few partitions.

In: `Problem`. Out: `Baseline`. Partitions are those of the threshold asked for; the programme is in
milp_solver.py.
"""

from oper.base.spoken import option, spoken
from oper.planner.baselines.baseline import (
    Baseline,
    Cells,
    NoPlacementError,
    SolverNotes,
    Status,
)
from oper.planner.baselines.milp_solver import solve
from oper.planner.class_placement.partitions import partitions
from oper.planner.problem.problem import ClassProblem


def milp(problem: ClassProblem, limit_seconds: float) -> Baseline:
    """Return the best placement of whole partitions that the solver finds in `limit_seconds`,
    building its programme included.

    Raises NoPlacementError if it finds none, or whole partitions do not fit.
    """
    parts = partitions(problem.classes, problem.asked.threshold)
    cells = Cells(parts.run_class, parts.run_partition, parts.run_rows)
    sums = cells.sums(problem.classes, len(parts))
    solved = solve(
        sums,
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
        limit_seconds,
    )
    if solved.holder_sets is None:
        reason = f"the solver found no placement of {len(parts):,} whole partitions"
        if solved.status == "infeasible":
            raise NoPlacementError(Status.INFEASIBLE, reason)
        reason += (
            f" in {limit_seconds:g} s; a larger "
            f"{spoken('--time-limit', 'limit_seconds')} gives it more, a larger "
            f"{option('--threshold')} makes fewer partitions"
        )
        raise NoPlacementError(Status.TIME_LIMIT, reason)
    status = Status.OK if solved.status == "optimal" else Status(solved.status)
    notes = SolverNotes(len(parts), solved.gap, solved.bound_seconds)
    return Baseline("milp", solved.holder_sets, sums, cells, notes=notes, status=status)
