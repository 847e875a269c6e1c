"""Comparison: every method on the same profile, topology and workload, by one cost model (§6).

In: `Profile`, `Topology`, `Workload`, `Settings`, names of methods. Out: the figures of each. They
are those of the paper's Figure 10 and Tables 2 and 3, for any profile: memory, lookups and link
bytes of every rank, how even they are, the predicted iteration, the time to plan, and the certified
gap. Placements are compared and nothing is written: `seconds` has no layout and no disk in it. The
bound holds for plans within the capacities and the extra memory, so only those have a gap. Where no
memory is asked for these are what the devices hold, of which OPER's plan uses the least that is
nearly as good (place_in_memory.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from oper.base import native
from oper.base.errors import OperError
from oper.cost.objective import Cost
from oper.cost.workload import Workload
from oper.plan.certificate import Certificate
from oper.plan.plan_file import to_json
from oper.plan.settings import PlanSettings
from oper.planner.baselines.baseline import Baseline, NoPlacementError, price_baseline
from oper.planner.baselines.registry import BASELINES, installed_baselines, make_baseline
from oper.planner.bounds.certificate import certify
from oper.planner.make_placement import InfeasibleError, Planned, within_limits
from oper.planner.memory.device_limits import DeviceLimits
from oper.planner.place_in_memory import by_devices, place_in_memory
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

METHODS = ("oper", *BASELINES)


def installed_methods() -> tuple[str, ...]:
    """All methods whose packages are installed."""
    return ("oper", *installed_baselines())


def compare(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    settings: PlanSettings,
    methods: Sequence[str],
    limit_seconds: float,
    report: Callable[[str], None] = lambda method: None,
) -> dict[str, Any]:
    """One run: `settings` and, under `methods`, the fields of `oper plan --json` of each.

    A method without a placement (TorchRec's planner or the solver after `limit_seconds`; the solver
    where whole partitions do not fit) has a status that says so and no figures. `report` is called
    with each method's name when it is done.

    Raises OperError for an unknown method, or where the capacities cannot hold the tables.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise OperError(f"method {unknown[0]!r}: one of {', '.join(METHODS)} was needed")
    native.ops()  # loading torch is no part of planning
    began = time.perf_counter()
    problem = make_problem(profile, topology, workload, settings)
    devices = by_devices(topology, settings)
    if devices:
        limits = DeviceLimits.of(problem)
        problem = limits.within(limits.most_extra)
    classes_seconds = time.perf_counter() - began
    entries: dict[str, dict[str, Any]] = {}
    certificate: Certificate | None = None
    if "oper" in methods:
        began = time.perf_counter()
        try:
            planned = place_in_memory(profile, topology, workload, settings)
        except InfeasibleError as error:
            none = NoPlacementError("infeasible", str(error))
            certificate = certify(problem, 0.0)
            seconds = {"total": time.perf_counter() - began}
            entries["oper"] = empty_entry(problem, certificate, none, seconds)
        else:
            planned.seconds["total"] = time.perf_counter() - began
            certificate = planned.certificate
            if devices:  # all methods are compared with the least time that the devices allow
                certificate = certify(problem, planned.cost.objective_seconds)
                planned = replace(planned, certificate=certificate)
            entries["oper"] = oper_entry(planned)
        report("oper")
    certificate = certificate or certify(problem, 0.0)
    for method in methods:
        if method == "oper":
            continue
        began = time.perf_counter()
        try:
            baseline = make_baseline(method, problem, limit_seconds)
        except NoPlacementError as none:
            seconds = {"total": time.perf_counter() - began}
            entries[method] = empty_entry(problem, certificate, none, seconds)
        else:
            seconds = {"classes": classes_seconds, "method": time.perf_counter() - began}
            seconds["total"] = sum(seconds.values())
            entries[method] = entry(problem, certificate, baseline, seconds)
        report(method)
    return {
        "settings": run_settings(problem),
        "methods": {method: entries[method] for method in methods},
    }


def run_settings(problem: Problem) -> dict[str, Any]:
    """What a run was made with; shares are fractions, bytes per rank."""
    return {
        "profile": problem.profile.digest,
        "topology": problem.topology.name,
        "ranks": problem.ranks,
        "mode": problem.workload.mode,
        "fetch": problem.workload.fetch,
        "batch_size": problem.workload.batch_size,
        **to_json(problem.asked),
        "limits": to_json(problem.limits),
        "capacity_bytes": [int(capacity) for capacity in problem.capacity_bytes],
    }


def oper_entry(planned: Planned) -> dict[str, Any]:
    """OPER's own plan."""
    problem, certificate = planned.problem, to_json(planned.certificate)
    del certificate["objective_seconds"]
    return {
        **shared_fields(problem, planned.certificate, planned.seconds),
        **to_json(replace(planned.cost, mailbox_bytes=round(problem.mailbox_bytes))),
        **certificate,
        "status": "ok" if planned.cost.feasible else "infeasible",
        **to_json(planned.record),
        **capacity_use(planned.cost),
        "notes": {},
    }


def entry(
    problem: Problem,
    certificate: Certificate,
    baseline: Baseline,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The fields of `oper plan --json` of a baseline."""
    cost = price_baseline(problem, baseline)
    status = baseline.notes.get("status", "ok") if cost.feasible else "infeasible"
    bounded = within_limits(problem, cost)
    gap = certificate.of(cost.objective_seconds).certified_gap if bounded else None
    return {
        **shared_fields(problem, certificate, seconds),
        "threshold": baseline.notes.get("threshold", problem.asked.threshold),
        **to_json(replace(cost, mailbox_bytes=round(problem.mailbox_bytes))),
        **capacity_use(cost),
        "certified_gap": gap,
        "status": status,
        "notes": baseline.notes,
    }


def empty_entry(
    problem: Problem,
    certificate: Certificate,
    none: NoPlacementError,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """A method without a placement: its status and the reason, no figures."""
    return {
        **shared_fields(problem, certificate, seconds),
        "objective_seconds": None,
        "certified_gap": None,
        "feasible": False,
        "status": none.status,
        "notes": {"reason": str(none)},
    }


def shared_fields(
    problem: Problem, certificate: Certificate, seconds: dict[str, float]
) -> dict[str, Any]:
    """What does not depend on the placement."""
    run = run_settings(problem)
    return {
        "plan": None,
        **{name: run[name] for name in ("mode", "fetch", "batch_size", "ranks")},
        "rows": int(problem.classes.rows.sum()),
        "threshold": problem.asked.threshold,
        "asked": to_json(problem.asked),
        "seconds": seconds,
        "lower_bound_seconds": certificate.lower_bound_seconds,
    }


def capacity_use(cost: Cost) -> dict[str, float]:
    """The fullest rank's memory over its capacity: above 1, the factor it exceeds it by."""
    return {"capacity_factor": float((cost.memory_bytes / cost.capacity_bytes).max())}
