"""How near plans with a tier are to the best placement of both memories.

tiny: tables of a few rows in each memory, against the best of all placements of single rows.
random: the random problems of the tests (`tests/support/planner/tiers.py`) with tables in both
memories, by their certificates. logs: the real Criteo log on 4, 8 and 16 ranks of random links, on
one node, two, and each rank on its own, with the largest tables or every other one in the tier, by
their certificates. replans: the random problems' next counts, and the second halves of a generated
and of the real log on random links, replanned over a long horizon, by the certificates of the new
plans. Gaps are in percent; seconds are of CPU.

    python -m benchmarks.scheduler.tier_optima [tiny random logs replans] [--number 300] [--json]
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import LOGS, REAL_LOGS, parser, publish, unequal
from benchmarks.planning.replan import synthetic_windows
from benchmarks.scheduler.tier_plans import REAL_SAMPLES_PER_RANK, tiers
from oper.base import native
from oper.base.errors import OperError
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload, usual_fetch
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.place_with_tier import plan_with_tier
from oper.planner.price_plan import problems_of_memories
from oper.planner.replan.replan import replan
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile
from oper.topology.topology import Topology
from tests.support.planner.both_memories import least_seconds, tiny
from tests.support.planner.tiers import drawn

LOG = "criteo-80k"
HORIZON = 10**9  # iterations: every move that gains anything pays
OPTIMAL = 1e-9
RANKS = (4, 8, 16)


class Found(NamedTuple):
    """How far a plan is from the best (of a certificate: at most), the bound over the best where
    that is known, and what planning took."""

    kind: str
    gap: float
    bound_share: float | None
    cpu_seconds: float


def of_tiny(number: int) -> Iterator[Found]:
    """Tiny problems, each against its optimum."""
    for seed in range(number):
        given = tiny(seed)
        since = time.process_time()
        try:
            plan = plan_with_tier(*given).plan
        except OperError:  # capacities too small for whole rows
            continue
        seconds = time.process_time() - since
        best = least_seconds(*problems_of_memories(plan, given.profile))
        if best > 0:
            assert plan.certificate is not None
            share = plan.certificate.lower_bound_seconds / best
            yield Found("tiny", plan.cost.objective_seconds / best - 1, share, seconds)


def both_in_use(profile: Profile, asked: PlanSettings) -> bool:
    return len(asked.tier) < len(profile.tables)


def alike(topology: Topology) -> str:
    """What a line calls it."""
    same = topology.homogeneous and len(set(topology.host_bandwidth or ())) <= 1
    return "alike" if same else "unequal"


def of_random(number: int) -> Iterator[Found]:
    """Random problems by their certificates."""
    for seed in range(number):
        (counts,), topology, workload, asked = drawn(seed)
        if both_in_use(counts, asked):
            yield from _planned(f"random, {alike(topology)}", counts, topology, workload, asked)


def on_random_links(ranks: int, seed: int) -> tuple[Topology, Workload]:
    """Random links and hosts at 25 GB/s, or, on more than one node, at 10 to 40 GB/s."""
    rates = np.random.default_rng([ranks, seed]).uniform(10e9, 40e9, ranks)
    rates = rates if seed else np.full(ranks, 25e9)
    hosts = (2**40,) * ranks
    topology = replace(
        unequal(ranks, seed), host_bandwidth=tuple(rates.tolist()), host_memory_bytes=hosts
    )
    fetch = usual_fetch(topology.nodes)
    return topology, Workload("training", fetch, ranks * REAL_SAMPLES_PER_RANK)


def settings_of(counts: Profile) -> Iterator[PlanSettings]:
    """The largest tables with half of all bytes in the tier, and every other table."""
    names = [table.name for table in counts.tables]
    for tables in (tiers(counts)["largest"], names[::2]):
        yield PlanSettings(0.02, tier=tables)


def of_logs(_number: int) -> Iterator[Found]:
    """The real log of several tables, by certificates."""
    (counts,) = log_in_windows(1)
    for ranks in RANKS:
        for seed in range(3):
            for asked in settings_of(counts):
                topology, workload = on_random_links(ranks, seed)
                yield from _planned(f"{LOG}, {ranks} ranks", counts, topology, workload, asked)


def log_in_windows(number: int) -> list[Profile]:
    """The real log in equal parts; none where it is not there."""
    path, reading = REAL_LOGS[LOG]
    if number == 1:
        return [profile(LOGS / path, **reading)]
    return profile(LOGS / path, windows=number, **reading)


def of_replans(number: int) -> Iterator[Found]:
    """Replans of the random problems for their next counts, by the new plans' certificates."""
    for seed in range(number):
        (before, after), topology, workload, asked = drawn(seed, 2)
        if not both_in_use(before, asked):
            continue
        try:
            plan = plan_with_tier(before, topology, workload, asked).plan
        except OperError:
            continue
        yield _replanned(f"replans, {alike(topology)}", plan, after)
    windows = {"generated": synthetic_windows(0.3, 0.003, 2), LOG: log_in_windows(2)}
    for name, (before, after) in windows.items():
        for ranks in RANKS:
            for seed in range(3):
                for asked in settings_of(before):
                    plan = plan_with_tier(before, *on_random_links(ranks, seed), asked).plan
                    yield _replanned(f"replans, {name}, {ranks} ranks", plan, after)


def _replanned(kind: str, plan: Plan, after: Profile) -> Found:
    since = time.process_time()
    made = replan(plan, after, HORIZON).plan
    seconds = time.process_time() - since
    return Found(kind, _gap_of(made), None, seconds)


def _gap_of(plan: Plan) -> float:
    assert plan.certificate is not None
    assert plan.certificate.certified_gap is not None
    return plan.certificate.certified_gap


def _planned(
    kind: str, counts: Profile, topology: Topology, workload: Workload, asked: PlanSettings
) -> Iterator[Found]:
    since = time.process_time()
    try:
        made = plan_with_tier(counts, topology, workload, asked).plan
    except OperError:  # capacities too small for whole rows
        return
    yield Found(kind, _gap_of(made), None, time.process_time() - since)


def table(found: list[Found]) -> Any:
    """A line for each kind."""
    headers = ["problems", "optimal, %", "median, %", "90 %, %", "worst, %", "above 1 %"]
    made = new_table("plans", *headers, "bound/best", "CPU s", left=1)
    for kind in dict.fromkeys(each.kind for each in found):
        of_kind = [each for each in found if each.kind == kind]
        gaps = np.array([each.gap for each in of_kind])
        shares = [each.bound_share for each in of_kind if each.bound_share is not None]
        made.add_row(
            kind,
            str(len(of_kind)),
            f"{100 * (gaps <= OPTIMAL).mean():.0f}",
            *(f"{100 * np.quantile(gaps, share):.3g}" for share in (0.5, 0.9, 1.0)),
            str(int((gaps > 0.01).sum())),
            f"{max(shares):.9f}" if shares else "-",
            f"{sum(each.cpu_seconds for each in of_kind) / len(of_kind):.2f}",
        )
    return made


def main() -> None:
    options = parser(__doc__)
    kinds = ["tiny", "random", "logs", "replans"]
    options.add_argument("kinds", nargs="*", default=kinds, help="any of " + ", ".join(kinds))
    options.add_argument("--number", type=int, default=300, help="of random problems of each kind")
    given = options.parse_args()
    native.ops()  # loading torch is no part of planning
    found: list[Found] = []
    measured = {"tiny": of_tiny, "random": of_random, "logs": of_logs, "replans": of_replans}
    for kind in given.kinds:
        found += measured[kind](given.number)
    publish(given, {"runs": [each._asdict() for each in found]}, lambda: table(found))


if __name__ == "__main__":
    main()
