"""Comparison: every method on the same profile, topology and workload, by one cost model (§6).

The paper's Figure 10 and Tables 2 and 3 for any profile: what each method's placement takes of
memory, lookups and links on every rank, how even that is, the predicted iteration, the time to
plan, and how far from the bound it certainly is. Placements are compared and nothing is written:
`seconds` has no layout and no disk in it. The bound holds for plans within the capacities and the
extra memory, so only those have a gap.
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from oper.base import native
from oper.base.errors import OperError
from oper.cost.objective import Cost
from oper.cost.workload import Workload
from oper.planner import planner
from oper.planner.baselines import simple
from oper.planner.baselines.baseline import Baseline, Cells, NoPlacementError, price_baseline
from oper.planner.baselines.paper_procedure import paper
from oper.planner.baselines.torchrec_planner import torchrec
from oper.planner.bounds.certificate import Certificate, certify
from oper.planner.class_placement.partition import partitions
from oper.planner.planner import Planned
from oper.planner.problem.problem import Problem, Settings, make_problem
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

METHODS = (
    "oper",
    "paper",
    "memory_greedy",
    "access_greedy",
    "table_wise",
    "row_wise",
    "torchrec",
    "milp",
)
# Relative, of the extra memory: sums of bytes over millions of rows are rounded.
BUDGET_TOLERANCE = 1e-9


def installed_methods() -> tuple[str, ...]:
    """All methods, TorchRec's planner only where torchrec is installed."""
    return tuple(m for m in METHODS if m != "torchrec" or find_spec("torchrec") is not None)


def compare(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    settings: Settings,
    methods: Sequence[str],
    limit_seconds: float,
    report: Callable[[str], None] = lambda method: None,
) -> dict[str, Any]:
    """One run: `settings` and, under `methods`, the fields of `oper plan --json` of each.

    A method without a placement (TorchRec's planner or the solver past `limit_seconds`; the solver
    where whole partitions do not fit) has a status that says so and no figures. `report` hears
    each method's name when it is done.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise OperError(f"method {unknown[0]!r}: one of {', '.join(METHODS)} was needed")
    native.ops()  # loading torch is no part of anyone's planning time
    began = time.perf_counter()
    problem = make_problem(profile, topology, workload, settings)
    classes_seconds = time.perf_counter() - began
    entries: dict[str, dict[str, Any]] = {}
    certificate: Certificate | None = None
    if "oper" in methods:
        began = time.perf_counter()
        planned = planner.make_placement(profile, topology, workload, settings)
        planned.seconds["total"] = time.perf_counter() - began
        certificate = planned.certificate
        entries["oper"] = oper_entry(planned)
        report("oper")
    certificate = certificate or certify(problem, 0.0)
    for method in methods:
        if method == "oper":
            continue
        began = time.perf_counter()
        try:
            baseline = run_method(method, problem, profile, limit_seconds)
        except NoPlacementError as none:
            seconds = {"total": time.perf_counter() - began}
            entries[method] = empty_entry(problem, settings, certificate, none, seconds)
        else:
            seconds = {"classes": classes_seconds, "method": time.perf_counter() - began}
            seconds["total"] = sum(seconds.values())
            entries[method] = entry(problem, settings, certificate, baseline, seconds)
        report(method)
    return {
        "settings": run_settings(problem, settings),
        "methods": {method: entries[method] for method in methods},
    }


def run_method(method: str, problem: Problem, profile: Profile, limit_seconds: float) -> Baseline:
    """The placement of a method other than `oper`. Raises NoPlacementError where it has none."""
    if method == "paper":
        return paper(problem)
    if method == "torchrec":
        return torchrec(problem, profile, limit_seconds)
    if method == "milp":
        return exact(problem, limit_seconds)
    by_name = {
        "memory_greedy": simple.memory_greedy,
        "access_greedy": simple.access_greedy,
        "table_wise": simple.table_wise,
        "row_wise": simple.row_wise,
    }
    return by_name[method](problem, profile)


def exact(problem: Problem, limit_seconds: float) -> Baseline:
    """The solver's placement of whole partitions at the problem's threshold."""
    from oper.planner.bounds import milp

    parts = partitions(problem.classes, problem.threshold)
    cells = Cells(parts.run_class, parts.run_partition, parts.run_rows)
    sums = cells.sums(problem.classes, len(parts))
    found = milp.solve(
        sums,
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
        limit_seconds,
    )
    if found.groups is None:
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
    return Baseline("milp", found.groups, sums, cells, notes=notes)


def run_settings(problem: Problem, settings: Settings) -> dict[str, Any]:
    """What a run was made with; shares are fractions, bytes per rank."""
    return {
        "topology": problem.topology.name,
        "ranks": problem.topology.ranks,
        "mode": problem.workload.mode,
        "fetch": problem.workload.fetch,
        "batch_size": problem.workload.batch_size,
        "extra_memory": settings.extra_memory,
        "threshold": settings.threshold,
        "dob": settings.dob,
        "balance": settings.balance,
        "capacity_bytes": [int(capacity) for capacity in problem.capacity_bytes],
    }


def oper_entry(planned: Planned) -> dict[str, Any]:
    """OPER's own plan."""
    return {"plan": None, **planned.to_json(), **capacity_use(planned.realised.cost), "notes": {}}


def entry(
    problem: Problem,
    settings: Settings,
    certificate: Certificate,
    baseline: Baseline,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The fields of `oper plan --json` of a baseline."""
    cost = price_baseline(problem, baseline)
    status = baseline.notes.get("status", "ok") if cost.feasible else "infeasible"
    bounded = within_limits(problem, cost)
    gap = certificate.of(cost.objective_seconds).gap if bounded else None
    return {
        **shared_fields(problem, settings, certificate, seconds),
        "threshold": baseline.notes.get("threshold", settings.threshold),
        **cost.to_json(),
        **capacity_use(cost),
        "certified_gap": gap,
        "status": status,
        "notes": baseline.notes,
    }


def empty_entry(
    problem: Problem,
    settings: Settings,
    certificate: Certificate,
    none: NoPlacementError,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """A method without a placement: its status and the reason, no figures."""
    return {
        **shared_fields(problem, settings, certificate, seconds),
        "objective_seconds": None,
        "certified_gap": None,
        "feasible": False,
        "status": none.status,
        "notes": {"reason": str(none)},
    }


def shared_fields(
    problem: Problem, settings: Settings, certificate: Certificate, seconds: dict[str, float]
) -> dict[str, Any]:
    """What does not depend on the placement."""
    run = run_settings(problem, settings)
    return {
        "plan": None,
        **{name: run[name] for name in ("mode", "fetch", "batch_size", "ranks")},
        "rows": int(problem.classes.rows.sum()),
        "threshold": settings.threshold,
        "asked": {name: run[name] for name in ("extra_memory", "threshold", "dob", "balance")},
        "seconds": seconds,
        "lower_bound_seconds": certificate.bound.seconds,
    }


def within_limits(problem: Problem, cost: Cost) -> bool:
    """Whether a placement keeps the capacities and the extra memory: the bound is for those."""
    slack = BUDGET_TOLERANCE * cost.total_bytes
    return cost.feasible and cost.extra_bytes <= problem.budget_bytes + slack


def capacity_use(cost: Cost) -> dict[str, float]:
    """The fullest rank's memory over its capacity: above 1, the factor it exceeds it by."""
    return {"capacity_factor": float((cost.memory_bytes / cost.capacity_bytes).max())}
