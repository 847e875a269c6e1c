"""The exact programme over whole partitions, as the paper solves it: threshold 5 %, 8 ranks.

37 to 40 partitions with capacity 1.25 times total/ranks (at less, blocks of 5 % of all bytes do not
pack two to a rank), with no extra memory and with 5 %. Time, status and the solver's own gap stand
beside our plan's objective at the same capacities, whose rows are split, so that it may be below
the best placement of whole partitions. The paper's solver took 3.8 hours.

    python -m benchmarks.planning.milp [--limit 300] [--scale 0.01] [--json]
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.common import SAMPLES_PER_RANK, parser, percent, publish, real_profiles, synthetic
from oper.base.formatting import format_duration
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner import compare
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

THRESHOLD, EXTRA, METHODS = 0.05, (0.0, 0.05), ("oper", "paper", "milp")
CASES = (("inference", "raw"), ("training", "raw"), ("inference", "distinct"))
REAL_LOG, REAL_SAMPLES_PER_RANK = "criteo-80k", 512


def measure(name: str, profile: Profile, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """The three methods in every case."""
    topology = Topology.load("dgx-a100").with_capacity("1.25")
    samples = REAL_SAMPLES_PER_RANK if name == REAL_LOG else SAMPLES_PER_RANK
    for mode, fetch in CASES:
        workload = Workload(mode, fetch, topology.ranks * samples)  # type: ignore[arg-type]
        for extra in EXTRA:
            settings = PlanSettings(extra, threshold=THRESHOLD)
            run = compare.compare(profile, topology, workload, settings, METHODS, limit_seconds)
            yield {"workload": name, **run.to_json()}


def row(entry: dict[str, Any]) -> list[str]:
    """One line of the table."""
    settings, methods = entry["settings"], entry["methods"]
    exact, ours = methods["milp"], methods["oper"]["objective_seconds"]
    cells = [
        entry["workload"],
        f"{settings['mode']} {settings['fetch']}",
        f"{100 * settings['extra_memory']:g}%",
        exact["status"],
        f"{exact['seconds']['total']:.1f}",
        format_duration(ours),
        percent(methods["oper"]["certified_gap"], 4),
        f"{methods['paper']['objective_seconds'] / ours:.3f}",
    ]
    found = exact["objective_seconds"]
    if found is None:
        return [*cells, "-", "-"]
    return [*cells, f"{found / ours:.3f}", percent(exact["notes"]["solver_gap"])]


def table(found: list[dict[str, Any]]) -> Any:
    """Objectives of the published procedure and of the solver, over ours."""
    headers = ("extra", "status", "s", "ours", "gap %", "paper", "milp", "gap %")
    made = new_table("log", "case", *headers, left=2)
    for entry in found:
        made.add_row(*row(entry))
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--limit", type=float, default=300.0, help="seconds for the solver")
    given = options.parse_args()
    profiles = {"criteo-kaggle": synthetic("criteo-kaggle", given.scale)}
    profiles |= {name: p for name, p in real_profiles() if name == REAL_LOG}
    found = [e for name, p in profiles.items() for e in measure(name, p, given.limit)]
    publish(given, {"runs": found}, lambda: table(found), "paper, milp: objective over ours")


if __name__ == "__main__":
    main()
