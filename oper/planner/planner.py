"""Profile in, plan out: classes, draft, rows, certificate, or a baseline that is better.

The steps are those of the paper's §4 (partition, place with backtracking, replicate), then
refining, then the lower bound that certifies the result. Where the certificate leaves room for a
baseline to be better, all baselines that keep the capacities are priced and the best one, refined
too, is taken if it wins; the plan says which step produced it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oper.cost.workload import Workload
from oper.planner.baselines import simple
from oper.planner.baselines.baseline import price_baseline
from oper.planner.baselines.paper_procedure import paper
from oper.planner.bounds.certificate import Certificate, certify
from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.partition import partitions
from oper.planner.class_placement.place_classes import place_classes
from oper.planner.problem.problem import Problem, Settings, make_problem
from oper.planner.row_placement.row_placement import RowPlacement, place_rows
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

# With a certified gap below this, no baseline can be better by more, and none is priced.
BASELINES_FROM_GAP = 1e-8

# With a certified gap above the first, more rows are listed, so that exchanges reach further: that
# share of all rows. One in eight is half a byte a row in the address map. All of them, four to
# eight bytes a row, are the last resort, for ranks with a hot row that should hold the coldest.
LARGER_RESERVES = ((2e-5, 1 / 32), (2e-5, 1 / 8), (1e-3, 1.0))
NO_BACKTRACKING = "as asked: the step that placed the rows does not depend on it"


@dataclass(frozen=True)
class Planned:
    """A placement of every row with its cost and its certificate, in memory."""

    problem: Problem
    settings: Settings
    draft: ClassPlacement
    realised: RowPlacement
    certificate: Certificate
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> str:
        """Which step produced the placement."""
        return self.draft.step

    def to_json(self) -> dict[str, Any]:
        """The fields of `oper plan --json`, but `plan`."""
        cost, greedy = self.realised.cost, self.draft.greedy
        before = self.realised.cost_before
        return {
            "mode": self.problem.workload.mode,
            "fetch": self.problem.workload.fetch,
            "batch_size": self.problem.workload.batch_size,
            "ranks": self.problem.topology.ranks,
            "rows": int(self.problem.classes.rows.sum()),
            "threshold": self.draft.partitions.threshold,
            "asked": {
                "extra_memory": self.settings.extra_memory,
                "threshold": self.settings.threshold,
                "dob": self.settings.dob,
                "balance": self.settings.balance,
            },
            "seconds": self.seconds,
            **cost.to_json(),
            "mailbox_bytes": round(self._mailbox_bytes),
            **self.certificate.to_json(),
            "status": "ok" if cost.feasible else "infeasible",
            "step": self.step,
            "threshold_reason": greedy.reason if greedy else NO_BACKTRACKING,
            "greedy_dob": (
                {"memory": greedy.dob_memory, "lookups": greedy.dob_lookups} if greedy else None
            ),
            "dob_before_exchanges": before.dob,
            "exchanges": self.realised.exchanges,
        }

    @property
    def _mailbox_bytes(self) -> float:
        classes, workload = self.problem.classes, self.problem.workload
        return classes.mailbox_bytes if workload.training else 0.0


def make_placement(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    settings: Settings,
    report: Callable[[str], None] = lambda step: None,
) -> Planned:
    """Plan for all rows of `profile`; `report` hears the name of each step as it begins.

    Raises OperError where the capacities cannot hold the tables.
    """
    watch = _Watch(report)
    with watch("classes"):
        problem = make_problem(profile, topology, workload, settings)
    with watch("draft"):
        draft = place_classes(problem)
    with watch("rows"):
        realised = place_rows(profile, problem, draft)
    with watch("bound"):
        certificate = certify(problem, realised.cost.objective_seconds)
    for gap, share in LARGER_RESERVES:
        if certificate.gap <= gap or settings.balance == "link":
            break
        with watch("rows"):
            wider = draft if topology.alike else place_classes(problem, share)
            again = place_rows(profile, problem, wider, share)
        if again.cost.feasible and again.cost.objective_seconds < realised.cost.objective_seconds:
            draft, realised = wider, again
            certificate = certificate.of(again.cost.objective_seconds)
    uncertain = certificate.gap > BASELINES_FROM_GAP or not realised.cost.feasible
    if uncertain and settings.balance == "time":
        with watch("baselines"):
            for better in better_baselines(profile, problem, realised):
                draft, realised = better
        certificate = certificate.of(realised.cost.objective_seconds)
    return Planned(problem, settings, draft, realised, certificate, watch.seconds)


def better_baselines(
    profile: Profile, problem: Problem, realised: RowPlacement
) -> list[tuple[ClassPlacement, RowPlacement]]:
    """The best baseline, refined, if it keeps the capacities and beats `realised`; else nothing."""
    limit = realised.cost.objective_seconds if realised.cost.feasible else np.inf
    made = [
        simple.table_wise(problem, profile),
        simple.row_wise(problem, profile),
        simple.memory_greedy(problem, profile),
        simple.access_greedy(problem, profile),
        paper(problem),
    ]
    best: list[tuple[ClassPlacement, RowPlacement]] = []
    for baseline in made:
        cost = price_baseline(problem, baseline)
        if not cost.feasible or cost.objective_seconds >= limit or baseline.cells is None:
            continue
        counts = baseline.cells.dense(len(problem.classes), len(baseline.groups))
        none = np.zeros(len(problem.classes), dtype=np.int64)
        shares = cost.memory_bytes / cost.memory_bytes.sum()
        parts = partitions(problem.classes, problem.threshold)
        draft = ClassPlacement(baseline.name, baseline.groups, counts, none, shares, parts)
        found = place_rows(profile, problem, draft)
        if found.cost.feasible and found.cost.objective_seconds < limit:
            limit = found.cost.objective_seconds
            best = [(draft, found)]
    return best


class _Watch:
    """Seconds spent in each named step."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._report = report
        self._step, self._since = "", 0.0

    def __call__(self, step: str) -> "_Watch":
        self._step = step
        return self

    def __enter__(self) -> None:
        self._report(self._step)
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.setdefault(self._step, 0.0)
        self.seconds[self._step] += time.perf_counter() - self._since
