"""Balance before refining at fixed thresholds, as in the paper's Table 3.

Criteo-Kaggle sizes, 8 ranks of dgx-a100, inference, raw fetches, no extra memory, the threshold
fixed (any balance will do, so it is not halved). `paper` is the published procedure, which places
whole partitions; `greedy` are our partitions as first placed, `refined` our plan after rows were
split, exchanged and moved. Degrees of balance are min/max over ranks, of lookups and of memory,
with the planning time from the profile in memory to the placement. The last column is Table 3 of
the paper: balance of communication and planning time, on its own log and machine.

    python -m benchmarks.planning.backtracking [--scale 0.01] [--json]
"""

import time
from dataclasses import asdict
from typing import Any

from benchmarks.common import SAMPLES_PER_RANK, parser, percent, publish, synthetic
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.baselines.baseline import price_baseline
from oper.planner.baselines.oper_atc24_paper import paper
from oper.planner.make_placement import make_placement
from oper.planner.problem.problem import make_problem
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

THRESHOLDS = (0.05, 0.01, 0.005, 0.001, 0.0005)
ANY_BALANCE = 1e-9  # met at once: no halving
TABLE_3 = {  # degree of balance, seconds
    0.05: (0.716, 15.8),
    0.01: (0.801, 28.4),
    0.005: (0.883, 41.5),
    0.001: (0.991, 120.3),
    0.0005: (0.991, 235.2),
}
TOPOLOGY = Topology.load("dgx-a100")


def measure(profile: Profile, threshold: float) -> dict[str, Any]:
    """One threshold: balance and time of each procedure."""
    workload = Workload("inference", "raw", TOPOLOGY.ranks * SAMPLES_PER_RANK)
    settings = PlanSettings(extra_memory=0.0, threshold=threshold, dob=ANY_BALANCE)
    began = time.perf_counter()
    problem = make_problem(profile, TOPOLOGY, workload, settings)
    printed = price_baseline(problem, paper(problem))
    printed_seconds = time.perf_counter() - began
    began = time.perf_counter()
    planned = make_placement(profile, TOPOLOGY, workload, settings)
    seconds = time.perf_counter() - began
    greedy = planned.class_placement.greedy
    return {
        "threshold": threshold,
        "paper": {**asdict(printed.dob), "feasible": printed.feasible, "seconds": printed_seconds},
        "greedy": greedy and {"lookups": greedy.dob_lookups, "memory": greedy.dob_memory},
        "refined": {**asdict(planned.cost.dob), "seconds": seconds},
        "step": planned.step,
        "published": TABLE_3[threshold],
    }


def table(found: list[dict[str, Any]]) -> Any:
    """Lookups / memory in percent, and seconds, for each procedure."""
    headers = ("paper", "s", "greedy", "refined", "s", "published", "s")
    made = new_table("threshold", *headers)
    for entry in found:
        balance = [
            "/".join(percent(entry[key][what], 3) for what in ("lookups", "memory"))
            if entry[key]
            else "-"
            for key in ("paper", "greedy", "refined")
        ]
        seconds = [f"{entry[key]['seconds']:.2f}" for key in ("paper", "refined")]
        published, took = entry["published"]
        made.add_row(
            f"{100 * entry['threshold']:g}%",
            *(balance[0], seconds[0], *balance[1:], seconds[1]),
            *(percent(published, 1), f"{took:.1f}"),
        )
    return made


def main() -> None:
    given = parser(__doc__).parse_args()
    profile = synthetic("criteo-kaggle", given.scale)
    found = [measure(profile, threshold) for threshold in THRESHOLDS]
    publish(
        given,
        {"rows": profile.rows, "thresholds": found},
        lambda: table(found),
        "balance, min/max in %: lookups/memory; published: communication",
    )


if __name__ == "__main__":
    main()
