"""Plans for one window of a log, priced on the next: OPER's defaults against other methods.

Each log is cut into equal windows. OPER's plan and TorchRec's are made from a window; row-wise and
table-wise sharding and full copies of all tables need no counts. All are priced by the counts of
the window after, in both modes, on one node and on two, with what the devices hold and with
capacities of 1.05 to 2 times a rank's share of the tables. Peers that exceed a capacity do not
count. "transfer" is the objective and "step" the predicted step, both over the best peer's.

The log `churning` is made up: in each window 80 % of the reads go to rows that were not read in the
window before. Each row is read for a while and never again. The ids of new rows ascend in two of
the four tables and are scattered in the other two.

    python -m benchmarks.planning.held_out [--windows 3] [--logs retailrocket] [--json]
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.common import LOGS, REAL_LOGS, parser, publish
from benchmarks.planning.simulated_placements import asked_here
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.baselines.baseline import Baseline, NoPlacementError
from oper.planner.baselines.simple import full_copies, row_wise, table_wise
from oper.planner.baselines.torchrec_planner import placement_of, request
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import by_devices
from oper.planner.make_plan import make_plan
from oper.planner.price_fetched import predict_fetched
from oper.planner.price_plan import time_under
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile, in_order, itself
from oper.profiling.windows import FIRST_SHARE
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import Table
from oper.topology.topology import Topology

TOPOLOGIES = ("dgx-h100", "2x4-a100")
CAPACITIES = (None, "1.05", "1.2", "1.5", "2")  # None: what the devices hold
CHURNING = "churning"
UNSEEN = 0.8  # of the reads of a window go to rows that the window before did not read
PEERS = ("row_wise", "table_wise", "torchrec", "full_copies")
MODES: tuple[Literal["inference", "training"], ...] = ("inference", "training")


class Seconds(NamedTuple):
    """Objective and predicted step of a placement."""

    transfer: float
    step: float


@dataclass(frozen=True)
class Case:
    """A topology with its capacity, and a workload."""

    topology: Topology
    workload: Workload

    def problem(self, window: Profile, later: Profile | None = None) -> Problem:
        """Return the problem of a window within all available memory; of `later` counts, if
        given."""
        asked = PlanSettings()
        found = make_problem(window, self.topology, self.workload, asked)
        if by_devices(self.topology, asked):
            limits = DeviceLimits.of(found)
            found = limits.within(limits.most_extra)
        if later is None:
            return found
        given = (later, found.topology, self.workload, asked, found.limits)
        return make_problem(*given, as_counted=True)


def churning_windows(number: int, scale: float, bag: int = 1) -> list[Profile]:
    """Return the windows of the made-up log, whose bags have so many ids."""
    random = np.random.default_rng(0)
    alive = 2.5 * (1 - UNSEEN)  # windows in which a row is read
    samples = round(40_000 * scale)
    sizes = [round(rows * scale) for rows in (12_000, 12_000, 4_000, 4_000)]
    tables = tuple(Table(f"t{t}", max(rows, 100), dim=64) for t, rows in enumerate(sizes))
    names = [
        np.arange(t.rows) if n % 2 == 0 else random.permutation(t.rows)
        for n, t in enumerate(tables)
    ]
    found = []
    for window in range(number):
        time = window + random.random(samples)
        early = time - window < FIRST_SHARE
        counts, first_counts = [], []
        for table, name in zip(tables, names, strict=True):
            # Rows are born one after the other, and read by a law of Zipf of their own.
            in_use = int(0.9 * table.rows / (number / alive + 1))
            ranks = random.zipf(1.2, samples) % in_use
            order = random.permutation(in_use)  # which of those alive are the popular ones
            born = order[ranks] + ((time / alive - order[ranks] / in_use) // 1 + 1) * in_use
            rows = name[born.astype(np.int64)]
            counts.append(np.bincount(rows, minlength=table.rows))
            first_counts.append(np.bincount(rows[early], minlength=table.rows))
        first = _of_counts(tables, int(early.sum()), first_counts, bag)
        whole = _of_counts(tables, samples, counts, bag)
        found.append(replace(whole, open_first_part=partial(itself, first)))
    in_order(found)
    return found


def _of_counts(tables: tuple[Table, ...], ids: int, counts: list[Any], bag: int) -> Profile:
    """Return the profile of so many ids of each table, in bags of equal length."""
    accesses, none = np.concatenate(counts).astype(np.uint32), np.zeros(0, np.uint32)
    one = np.ones(len(tables), np.int64)
    lengths = BagLengths.of_pairs(
        np.stack([np.arange(len(tables)), bag * one, ids // bag * one], axis=1), ids * one
    )
    hashed = (False,) * len(tables)
    return Profile(tables, ids // bag, accesses, none, hashed, bag_lengths=lengths)


def logs(number: int, chosen: str, scale: float) -> Iterator[tuple[str, list[Profile]]]:
    """Yield the windows of each log whose name has `chosen` in it; the made-up log has one more,
    because its first window is planned without a window before."""
    for name, (path, reading) in REAL_LOGS.items():
        if chosen in name and (LOGS / path).exists():
            yield name, profile(LOGS / path, windows=number, **reading)
    if chosen in CHURNING:
        yield CHURNING, churning_windows(number + 1, scale)


def of_plan(plan: Plan, later: Profile) -> Seconds:
    """Price a plan under later counts."""
    found = time_under(plan, later, as_counted=True)
    return Seconds(found.transfer_seconds, found.step_seconds)


def of_peer(peer: str, case: Case, window: Profile, later: Profile) -> Seconds | None:
    """Price a peer under later counts; None if it does not fit or finds no plan."""
    problem = case.problem(window, later)
    placed = torchrec(case.problem(window), problem) if peer == "torchrec" else PLACE[peer](problem)
    if placed is None:
        return None
    cost, step = predict_fetched(problem, placed)
    return Seconds(cost.objective_seconds, step.seconds) if cost.feasible else None


def torchrec(planned_for: Problem, problem: Problem) -> Baseline | None:
    """Return the placement of TorchRec's planner for one problem, in another; None if the planner
    finds none."""
    logging.disable(logging.CRITICAL)
    try:
        answer = asked_here(request(planned_for))
    except NoPlacementError:
        return None
    placed = placement_of(planned_for, answer)
    assert placed.under is not None
    return placed.under(problem)


PLACE = {"row_wise": row_wise, "table_wise": table_wise, "full_copies": full_copies}


def cases(capacities: Sequence[str | None]) -> Iterator[tuple[dict[str, str], Case]]:
    """Yield each case with some capacities, after its names in the results."""
    for name, capacity, mode in product(TOPOLOGIES, capacities, MODES):
        topology = Topology.load(name)
        if capacity is not None:
            topology = topology.with_capacity(capacity)
        names = {"topology": name, "capacity": capacity or "devices", "mode": mode}
        yield names, Case(topology, Workload(mode))


def measure(
    log: str, windows: Sequence[Profile], chosen: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Price each method in each case, window by window."""
    for number, (window, later) in enumerate(pairwise(windows)):
        for names, case in cases(CAPACITIES):
            plan = make_plan(window, case.topology, case.workload)
            found = {peer: of_peer(peer, case, window, later) for peer in chosen}
            taken = {"oper": of_plan(plan, later)} | {k: v for k, v in found.items() if v}
            others = [seconds for peer, seconds in taken.items() if peer != "oper"]
            best = Seconds(*(min(each) for each in zip(*others, strict=True)))
            ours = taken["oper"]
            yield {
                "log": log,
                "window": number,
                **names,
                "predicted_seconds": plan.cost.objective_seconds,
                "extra_memory": plan.cost.extra_memory_ratio,
                "planning_seconds": plan.seconds["total"],
                "seconds": {name: each._asdict() for name, each in taken.items()},
                "transfer": ours.transfer / best.transfer,
                "step": ours.step / best.step,
            }


def figures(found: list[dict[str, Any]], chosen: str) -> dict[str, float]:
    """Return the mean and the largest ratio of each mode by step and by transfer time, and the
    number of cases; none of some logs alone."""
    made: dict[str, float] = {}
    for mode, what in product(MODES, ("step", "transfer")) if not chosen else ():
        ratios = [entry[what] for entry in found if entry["mode"] == mode]
        made |= {
            f"held-out-{mode}-{what}-mean": float(np.mean(ratios)),
            f"held-out-{mode}-{what}-most": max(ratios),
            f"held-out-{mode}-cases": len(ratios),
        }
    return made


def table(found: list[dict[str, Any]]) -> Any:
    """Return a table of the mean and the largest ratio to the best peer, by log, mode and
    topology."""
    made = new_table("", "", "", "transfer", "most", "step", "most", "cases above 1.05", left=3)
    keys = sorted({(e["log"], e["mode"], e["topology"]) for e in found})
    for key in [*keys, ("all", "", "")]:
        cases = [e for e in found if key[0] == "all" or key == (e["log"], e["mode"], e["topology"])]
        figures = []
        for what in ("transfer", "step"):
            ratios = [e[what] for e in cases]
            figures += [f"{float(np.mean(ratios)):.3f}", f"{max(ratios):.3f}"]
        above = sum(e["transfer"] > 1.05 for e in cases), sum(e["step"] > 1.05 for e in cases)
        made.add_row(*key, *figures, f"{above[0]}, {above[1]} of {len(cases)}")
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--windows", type=int, default=3)
    options.add_argument("--logs", default="", help="only logs with this in their names")
    options.add_argument("--peers", default=",".join(PEERS))
    given = options.parse_args()
    found = []
    with progress("pricing", None, "cases") as meter:
        for name, windows in logs(given.windows, given.logs, given.scale):
            for entry in measure(name, windows, given.peers.split(",")):
                found.append(entry)
                meter.advance(1)
    publish(
        given,
        {"windows": given.windows, "found": found},
        lambda: table(found),
        f"{given.windows} windows ({CHURNING}: one more), each but the last planned for and priced "
        f"on the next; ratios to the best of {given.peers}",
        figures=figures(found, given.logs),
    )


if __name__ == "__main__":
    main()
