"""Comparison: every method on the same profile, topology and workload, by one cost model (§6).

In: `Profile`, `Topology`, `Workload`, `PlanSettings`, names of methods. Out: `Comparison`. Its
figures are those of the paper's Figure 10 and Tables 2 and 3, for any profile: memory, lookups and
link bytes of every rank, how even they are, the predicted iteration, the time to plan, and the
certified gap. Placements are compared and nothing is written: `seconds` has no layout and no disk
in it. If the profile knows the data that follow its own, the placements are priced on that as well.
The bound holds for plans within the capacities and the extra memory, so only those have a
certificate. If no memory is asked for, these are the memory of the devices, of which OPER's plan
uses the least that is nearly as good (least_memory.py).

If tables are pooled, other methods place rows as without pooling, and are priced with the vectors
that they need then (price_fetched.py). With `auto` each is priced in every way to fetch tables that
OPER tries (place_by_table.py), and has the shortest iteration of these; a bound is of one way.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from oper.base import native
from oper.base.arrays import WholePerRank
from oper.base.defaults import LIMIT_SECONDS
from oper.base.display import Summarised
from oper.base.errors import OperError, check_type
from oper.base.spoken import option
from oper.cost.objective import Cost
from oper.cost.vectors_per_bag import pooled_names
from oper.cost.workload import Workload
from oper.plan.certificate import Certificate
from oper.plan.memories import PlanningRecord
from oper.plan.plan_file import to_json, typed
from oper.plan.reference_figures import HeldOutSource
from oper.plan.settings import Limits, PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.baselines.baseline import (
    Baseline,
    NoPlacementError,
    Notes,
    PaperNotes,
    SolverNotes,
    Status,
    TorchRecNotes,
)
from oper.planner.baselines.registry import BASELINES, installed_baselines, make_baseline
from oper.planner.bounds.certify import certify
from oper.planner.enough_accesses import warn_if_too_small
from oper.planner.least_memory import by_devices
from oper.planner.make_placement import InfeasibleError, Planned, within_limits
from oper.planner.make_plan import place_fetched
from oper.planner.place_by_table import (
    Way,
    by_mean,
    chooses_by_table,
    may_mix,
    usual_way,
    ways_to_fetch,
)
from oper.planner.place_pooled import predicted_seconds
from oper.planner.price_fetched import (
    cheaper_pooled_of,
    predict_fetched,
    price_fetched,
    refetched,
)
from oper.planner.price_plan import predict_priced, priced_under, problem_of, with_bags_of
from oper.planner.problem.problem import Problem, make_problem
from oper.planner.reference_figures import UNSEEN_DATA, later_data, later_profile
from oper.profiling.profile import Profile, profile_given
from oper.topology.nearly_alike import as_alike
from oper.topology.topology import Topology

METHODS = ("oper", *BASELINES)
_NOTES: dict[str, type[Notes]] = {
    "paper": PaperNotes,
    "torchrec": TorchRecNotes,
    "milp": SolverNotes,
}


@dataclass(frozen=True)
class MethodResult:
    """Result of one method.

    threshold: of its partitions, if it has any. seconds: spent on each stage of planning, and in
    "total". cost: None without a placement, and `reason` says why. step_seconds: the predicted step
    if OPER's runtime ran the placement; None without a placement. certificate: None unless the
    placement keeps the limits, for which alone the bound holds. held_out_seconds and
    held_out_step_seconds: its objective and step on the data that follow the profile's; None
    without such data, and for baselines that place a number of rows per class and not single rows.
    record: the making of OPER's own plan. notes: further results of some baselines. pooled_tables:
    names of the pooled tables; the certificate is for placements that pool these.
    """

    status: Status
    threshold: float
    seconds: dict[str, float]
    cost: Cost | None = None
    step_seconds: float | None = None
    certificate: Certificate | None = None
    held_out_seconds: float | None = None
    held_out_step_seconds: float | None = None
    record: PlanningRecord | None = None
    notes: Notes | None = None
    reason: str | None = None
    pooled_tables: tuple[str, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Seconds spent on planning, all steps together."""
        return self.seconds["total"]

    @property
    def objective_seconds(self) -> float | None:
        """Seconds of the slowest rank; None without a placement."""
        return None if self.cost is None else self.cost.objective_seconds

    @property
    def certified_gap(self) -> float | None:
        """Largest possible gap to the best within the limits; None if the method exceeds them."""
        return None if self.certificate is None else self.certificate.certified_gap

    @property
    def fits(self) -> bool:
        """True if the method has a placement within the capacities and the extra memory."""
        return self.certificate is not None

    @property
    def capacity_factor(self) -> float | None:
        """The fullest rank's memory over its capacity: above 1, the factor it exceeds it by."""
        if self.cost is None:
            return None
        return float((self.cost.memory_bytes / self.cost.capacity_bytes).max())


@dataclass(frozen=True)
class _Outcome:
    """The fields of a method in a file that are no other object's."""

    status: Status
    threshold: float
    seconds: dict[str, float]
    objective_seconds: float | None
    step_seconds: float | None
    certified_gap: float | None
    held_out_seconds: float | None
    held_out_step_seconds: float | None
    reason: str | None = None
    pooled_tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class _MadeWith:
    """The fields of a run's settings in a file that are no other object's."""

    profile: str
    topology: str
    ranks: int
    limits: Limits
    capacity_bytes: WholePerRank
    held_out: "HeldOutData | None"


@dataclass(frozen=True)
class HeldOutData:
    """The data that no method has seen, and a lower bound on the objective of every plan for them
    in seconds, that fetches tables as one of the methods does."""

    source: HeldOutSource
    samples: int
    lower_bound_seconds: float


@dataclass(frozen=True, repr=False)
class Comparison(Summarised):
    """Results of all methods on one profile under the same limits.

    profile: its digest. rows: of all tables. asked: the settings of the plans, and `limits` those
    that follow from them. lower_bound_seconds: no placement within the limits that fetches tables
    as one of the methods does takes less. held_out: the data that follow the profile's; None
    without such data. methods: in the order asked for, by name.
    """

    profile: str
    topology: str
    ranks: int
    rows: int
    workload: Workload
    asked: PlanSettings
    limits: Limits
    capacity_bytes: WholePerRank
    lower_bound_seconds: float
    held_out: HeldOutData | None
    methods: dict[str, MethodResult]

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.methods)}>"

    @property
    def oper(self) -> MethodResult | None:
        """Result of OPER's own plan; None if it was not asked for."""
        return self.methods.get("oper")

    @property
    def fitting(self) -> list[str]:
        """Methods within the limits, by predicted step, the fastest first; ties keep the given
        order."""
        timed = [
            (result.step_seconds, name)
            for name, result in self.methods.items()
            if result.step_seconds is not None and result.fits
        ]
        return [name for _, name in sorted(timed, key=lambda pair: pair[0])]

    def to_json(self) -> dict[str, Any]:
        """Return a run of `oper compare --json`."""
        workload = to_json(self.workload)
        return {
            "settings": {
                "profile": self.profile,
                "topology": self.topology,
                "ranks": self.ranks,
                "rows": self.rows,
                **workload,
                **to_json(self.asked),
                "limits": to_json(self.limits),
                "capacity_bytes": self.capacity_bytes.tolist(),
                "held_out": to_json(self.held_out),
            },
            "lower_bound_seconds": self.lower_bound_seconds,
            "methods": {
                name: {
                    "plan": None,
                    **workload,
                    "ranks": self.ranks,
                    "rows": self.rows,
                    "asked": to_json(self.asked),
                    "lower_bound_seconds": self.lower_bound_seconds,
                    **_result_to_json(result),
                }
                for name, result in self.methods.items()
            },
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Comparison":
        """Read back a run of `oper compare --json`. Raise ValueError if the content is not one."""
        try:
            settings, methods = content["settings"], content["methods"]
            ranks = len(settings["capacity_bytes"])
            made = typed(settings, _MadeWith, ranks)
            return Comparison(
                **vars(made),
                rows=typed(settings["rows"], int, ranks),
                workload=typed(settings, Workload, ranks),
                asked=typed(settings, PlanSettings, ranks),
                lower_bound_seconds=typed(content["lower_bound_seconds"], float, ranks),
                methods={name: _result_of(name, methods[name], ranks) for name in methods},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def runs_to_json(runs: Iterable[Comparison]) -> dict[str, Any]:
    """Return the JSON output of `oper compare`: a run for each extra memory and threshold asked
    for."""
    return {"runs": [run.to_json() for run in runs]}


def _result_to_json(result: MethodResult) -> dict[str, Any]:
    content: dict[str, Any] = {
        "objective_seconds": None,
        "step_seconds": result.step_seconds,
        "certified_gap": None,
        "held_out_seconds": result.held_out_seconds,
        "held_out_step_seconds": result.held_out_step_seconds,
        "pooled_tables": list(result.pooled_tables),
        "feasible": False,
        "threshold": result.threshold,
    }
    for part in (result.cost, result.certificate, result.record):
        content |= {} if part is None else to_json(part)
    if result.cost is not None:
        content["capacity_factor"] = result.capacity_factor
    return content | {
        "status": result.status,
        "seconds": result.seconds,
        "notes": {} if result.notes is None else to_json(result.notes),
        "reason": result.reason,
    }


def _result_of(name: str, content: Mapping[str, Any], ranks: int) -> MethodResult:
    outcome = typed(content, _Outcome, ranks)
    placed = outcome.objective_seconds is not None
    noted = _NOTES.get(name) if placed else None
    return MethodResult(
        status=outcome.status,
        threshold=outcome.threshold,
        seconds=outcome.seconds,
        cost=typed(content, Cost, ranks) if placed else None,
        step_seconds=outcome.step_seconds,
        certificate=typed(content, Certificate, ranks) if "hot_row_share" in content else None,
        held_out_seconds=outcome.held_out_seconds,
        held_out_step_seconds=outcome.held_out_step_seconds,
        record=typed(content, PlanningRecord, ranks) if placed and name == "oper" else None,
        notes=None if noted is None else typed(content["notes"], noted, ranks),
        reason=outcome.reason,
        pooled_tables=outcome.pooled_tables,
    )


def installed_methods() -> tuple[str, ...]:
    """Return all methods whose packages are installed."""
    return ("oper", *installed_baselines())


def compare(
    profile: Profile | Path | str,
    topology: Topology | Path | str,
    workload: Workload,
    settings: PlanSettings | None = None,
    methods: Sequence[str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    report: Callable[[str], None] = lambda method: None,
) -> Comparison:
    """Compare OPER with `methods`, or all that are installed, on one profile; nothing is written.

    A profile may be given by its folder, a topology by its name or file. TorchRec's planner and the
    exact solver, with building its programme, get `limit_seconds` each; a method without a
    placement (after that time, or if whole partitions do not fit) has a status and a reason, and no
    cost; so has the exact solver if all tables are to be pooled. `report` is called with each
    method's name when it is done.

    Methods may have hyphens for underscores, as texts print them: table-wise.

    Raises OperError for an unknown method, if the capacities cannot hold the tables, or if these
    cannot be pooled as asked.
    """
    check_type("compare", "topology", topology, Topology, Path, str)
    check_type("compare", "workload", workload, Workload)
    asked = PlanSettings() if settings is None else settings
    check_type("compare", "settings", asked, PlanSettings)
    typed = installed_methods() if methods is None else tuple(methods)
    chosen = tuple(method.replace("-", "_") for method in typed)
    if not chosen:
        raise OperError(f"methods: expected one or more of {', '.join(METHODS)}, got none")
    unknown = [name for name, method in zip(typed, chosen, strict=True) if method not in METHODS]
    if unknown:
        raise OperError(f"methods: expected some of {', '.join(METHODS)}, got {unknown[0]!r}")
    profile = profile_given("compare", profile)
    if not isinstance(topology, Topology):
        topology = Topology.load(topology)
    native.ops()  # loading torch is no part of planning
    began = time.perf_counter()
    ways = ways_to_fetch(profile, as_alike(topology), workload, asked)
    choosing_seconds = time.perf_counter() - began
    began = time.perf_counter()
    contest = _Contest.of(profile, topology, asked, ways)
    contest.problem(contest.usual)
    classes_seconds = time.perf_counter() - began
    if contest.later is not None:
        warn_if_too_small(contest.later, topology.ranks, UNSEEN_DATA)
    results: dict[str, MethodResult] = {}
    if "oper" in chosen:
        began = time.perf_counter()
        try:
            planned = place_fetched(profile, topology, workload, asked)
        except InfeasibleError as error:
            total = choosing_seconds + time.perf_counter() - began
            none = NoPlacementError(Status.INFEASIBLE, str(error))
            results["oper"] = _without_placement(asked, none, {"total": total})
        else:
            planned.seconds["total"] = choosing_seconds + time.perf_counter() - began
            results["oper"] = contest.result_of_oper(planned)
        report("oper")
    for method in chosen:
        if method == "oper":
            continue
        began = time.perf_counter()
        try:
            baseline = contest.make(method, limit_seconds)
        except NoPlacementError as none:
            took = time.perf_counter() - began
            total = took if none.planning_seconds is None else none.planning_seconds
            results[method] = _without_placement(asked, none, {"total": total})
        else:
            seconds = {"classes": classes_seconds, "method": time.perf_counter() - began}
            if baseline.planning_seconds is not None:
                seconds = {"method": baseline.planning_seconds}
            seconds["total"] = sum(seconds.values())
            results[method] = contest.result_of(method, baseline, seconds)
        report(method)
    problem = contest.problem(ways[0])
    compared = workload.on(topology.nodes)
    if chooses_by_table(profile, topology, workload, asked):
        compared = replace(workload, fetch="auto")
    return Comparison(
        profile=profile.digest,
        topology=topology.name,
        ranks=problem.ranks,
        rows=int(problem.classes.rows.sum()),
        workload=compared,
        asked=asked,
        limits=problem.limits,
        capacity_bytes=problem.capacity_bytes.astype(np.int64),
        lower_bound_seconds=contest.lower_bound_seconds(),
        held_out=contest.held_out(),
        methods={method: results[method] for method in chosen},
    )


@dataclass(frozen=True)
class _Contest:
    """Problems in which methods are priced, one for each way to fetch tables, and the bounds of the
    ways in use. Other methods place rows in the `usual` way, in which no table is pooled."""

    profile: Profile
    topology: Topology
    asked: PlanSettings
    ways: Sequence[Way]
    usual: Way
    later: Profile | None  # the data that follow
    problems: dict[Way, Problem] = field(default_factory=dict)
    unseen_problems: dict[Way, Problem] = field(default_factory=dict)  # of those data
    bounds: dict[Way, Certificate] = field(default_factory=dict)

    @staticmethod
    def of(
        profile: Profile, topology: Topology, asked: PlanSettings, ways: Sequence[Way]
    ) -> "_Contest":
        usual = ways[0]
        if usual.pooled:
            usual = usual_way(topology, usual.workload)
        return _Contest(profile, topology, asked, ways, usual, later_profile(profile))

    def problem(self, way: Way) -> Problem:
        """Return the problem that prices placements whose tables are fetched in this way."""
        if way not in self.problems:
            # If tables may be pooled, the classes of all ways are the same.
            by_table = bool(self.ways[-1].pooled)
            self.problems[way] = way.problem(self.profile, self.topology, self.asked, by_table)
        return self.problems[way]

    def result_of_oper(self, planned: Planned) -> MethodResult:
        """Return the result of OPER's plan."""
        pooled = pooled_names(planned.problem.topology, planned.problem.profile.tables)
        way = Way(frozenset(pooled), planned.problem.workload)
        self.bounds[way] = planned.certificate
        # All methods are compared with the least time that the devices allow.
        if by_devices(self.topology, self.asked):
            self.bounds[way] = certify(self.problem(way), planned.cost.objective_seconds)
        held_out, held_out_step = None, None
        if self.later is not None:
            plan = assemble(planned)
            problem = problem_of(plan, self.later, as_counted=True)
            (on_later,) = priced_under([plan], [problem])
            held_out = on_later.cost.objective_seconds
            held_out_step = predict_priced(problem, on_later).seconds
        return MethodResult(
            status=Status.OK if planned.cost.feasible else Status.INFEASIBLE,
            threshold=planned.record.threshold,
            seconds=planned.seconds,
            cost=planned.cost,
            step_seconds=predicted_seconds(planned),
            certificate=self.bounds[way],
            held_out_seconds=held_out,
            held_out_step_seconds=held_out_step,
            record=planned.record,
            pooled_tables=pooled,
        )

    def make(self, method: str, limit_seconds: float) -> Baseline:
        """Return another method's placement. Raise NoPlacementError if it has none that can be
        priced."""
        if not self._ways(method):
            raise NoPlacementError(
                Status.NOT_POOLED,
                "its costs add up row by row, which those of pooled tables do not; "
                f"{option('--fetch', 'distinct')} compares it",
            )
        return make_baseline(method, self.problem(self.usual), limit_seconds)

    def result_of(self, method: str, baseline: Baseline, seconds: dict[str, float]) -> MethodResult:
        """Return the result of another method's placement with tables fetched in the fastest way
        for it, chosen among the ways within the limits if there are any."""

        def order(way: Way) -> tuple[bool, float]:
            problem = self.problem(way)
            cost = price_fetched(problem, self._fetched(way, baseline))
            return not within_limits(problem, cost), cost.objective_seconds

        ways = self._ways(method)
        if len(ways) > 1:
            ways = [min((*ways, *self._own_ways(ways, baseline)), key=order)]
        (way,) = ways
        fetched = self._fetched(way, baseline)
        return baseline_result(
            self.problem(way), self._bound(way), fetched, seconds, self._unseen(way)
        )

    def lower_bound_seconds(self) -> float:
        """Return the least of the bounds of all ways in which methods were priced."""
        return min(self._bound(way).lower_bound_seconds for way in self._compared())

    def held_out(self) -> HeldOutData | None:
        """Return the data that follow, and the bound for them."""
        if self.later is None:
            return None
        unseen = filter(None, map(self._unseen, self._compared()))
        bound = min(certify(each, 0.0).lower_bound_seconds for each in unseen)
        return HeldOutData(later_data(self.profile), self.later.samples, bound)

    def _ways(self, method: str) -> list[Way]:
        return [way for way in self.ways if BASELINES[method].pooled or not way.pooled]

    def _own_ways(self, ways: Sequence[Way], baseline: Baseline) -> list[Way]:
        """Return the way that pools the tables with which the placement takes less, if it is not
        among `ways`."""
        ranks = as_alike(self.topology)
        mixes = may_mix(ranks, self.usual.workload, self.asked)
        if not (mixes and by_mean(ranks, self.asked)):
            return []
        most = self.problem(ways[-1])
        cheaper = cheaper_pooled_of(self.problem(self.usual), most, baseline)
        tried = {way.pooled for way in ways}
        return [] if cheaper in tried else [Way(cheaper, self.usual.workload)]

    def _compared(self) -> Sequence[Way]:
        return [*self.bounds] or self.ways[:1]

    def _bound(self, way: Way) -> Certificate:
        if way not in self.bounds:
            self.bounds[way] = certify(self.problem(way), 0.0)
        return self.bounds[way]

    def _fetched(self, way: Way, baseline: Baseline) -> Baseline:
        return baseline if way == self.usual else refetched(self.problem(way), baseline)

    def _unseen(self, way: Way) -> Problem | None:
        """Return the problem under the data that follow, as they were counted, within its
        limits."""
        if self.later is not None and way not in self.unseen_problems:
            problem = self.problem(way)
            self.unseen_problems[way] = make_problem(
                self.later,
                with_bags_of(problem.topology, self.later),
                problem.workload,
                problem.asked,
                problem.limits,
                as_counted=True,
                by_table=bool(way.pooled),
            )
        return self.unseen_problems.get(way)


def baseline_result(
    problem: Problem,
    certificate: Certificate,
    baseline: Baseline,
    seconds: dict[str, float],
    unseen: Problem | None = None,
) -> MethodResult:
    """Price and certify a baseline's placement as OPER's own, and price it in the problem of later
    data, `unseen`, too."""
    held_out, held_out_step = None, None
    if unseen is not None and baseline.under is not None:
        on_later, later_step = predict_fetched(unseen, baseline.under(unseen))
        held_out, held_out_step = on_later.objective_seconds, later_step.seconds
    cost, step = predict_fetched(problem, baseline)
    threshold = problem.asked.threshold
    if isinstance(baseline.notes, PaperNotes):
        threshold = baseline.notes.threshold
    bounded = within_limits(problem, cost)
    return MethodResult(
        status=baseline.status if cost.feasible else Status.INFEASIBLE,
        threshold=threshold,
        seconds=seconds,
        cost=cost,
        step_seconds=step.seconds,
        certificate=certificate.of(cost.objective_seconds) if bounded else None,
        held_out_seconds=held_out,
        held_out_step_seconds=held_out_step,
        notes=baseline.notes,
        pooled_tables=pooled_names(problem.topology, problem.profile.tables),
    )


def _without_placement(
    asked: PlanSettings, none: NoPlacementError, seconds: dict[str, float]
) -> MethodResult:
    return MethodResult(none.status, asked.threshold, seconds, reason=str(none))
