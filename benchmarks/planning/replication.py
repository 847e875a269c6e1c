"""Replication: forward fetch bytes of one iteration against those without extra memory.

8 ranks, 16,384 samples each, inference on dgx-a100. At 0 % every pair moves samples · features ·
row bytes / ranks for raw fetches, whatever the plan: the physical limit that replication lifts.
Shown is MiB over an ordered pair of ranks at 0 % and how many times less that is with extra
memory, beside the paper's Table 2 (MiB per pair there too, printed as MB). In training, gradients
and the replicas' AllReduce counted, the objective with extra memory over that without: more
memory must never cost time, which is asserted.

    python -m benchmarks.planning.replication [WORKLOAD …] [--zipf 1.05,1.1] [--scale 0.01] [--json]
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.common import SAMPLES_PER_RANK, pair_bytes, parser, publish, synthetic
from oper.base.formatting import format_duration
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_placement import make_placement
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

WORKLOADS = ("criteo-kaggle", "avazu", "criteo-terabyte", "syn-small")
EXTRA = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
PAPER = {  # its Table 2: MiB per ordered pair at EXTRA
    "criteo-kaggle": (3.25, 0.46, 0.30, 0.24, 0.20, 0.19, 0.18),
    "avazu": (2.50, 0.16, 0.15, 0.13, 0.12, 0.10, 0.10),
    "criteo-terabyte": (13.00, 0.95, 0.84, 0.73, 0.66, 0.57, 0.52),
}
TOPOLOGY = Topology.load("dgx-a100")
MIB = 2**20


def runs(profile: Profile) -> Iterator[dict[str, Any]]:
    """The plans of one profile at every extra memory, by mode and fetch."""
    for mode in ("inference", "training"):
        for fetch in ("raw", "distinct"):
            workload = Workload(mode, fetch, TOPOLOGY.ranks * SAMPLES_PER_RANK)
            plans = [
                make_placement(profile, TOPOLOGY, workload, PlanSettings(extra)) for extra in EXTRA
            ]
            costs = [planned.cost for planned in plans]
            objectives = [cost.objective_seconds for cost in costs]
            yield {
                "mode": mode,
                "fetch": fetch,
                "pair_fetch_bytes": [pair_bytes(cost) for cost in costs],
                "objective_seconds": objectives,
                "allreduce_methods": [cost.allreduce_method for cost in costs],
                "used_extra_memory": [cost.extra_memory_ratio for cost in costs],
                "never_worse": all(seconds <= objectives[0] for seconds in objectives),
            }


def table(found: list[dict[str, Any]]) -> Any:
    """Inference: MiB at 0 % and factors; training: objectives over that at 0 %."""
    shares = [f"{100 * share:g}%" for share in EXTRA[1:]]
    made = new_table("workload", "zipf", "what", "at 0%", *shares, left=3)
    for entry in found:
        name, zipf = entry["workload"], f"{entry['zipf']:g}"
        if entry["mode"] == "inference":
            first, *rest = (value / MIB for value in entry["pair_fetch_bytes"])
            what = f"{entry['fetch']}, MiB, × less"
            cells = [f"{first:.2f}", *(f"{first / value:.1f}" for value in rest)]
        else:
            first, *rest = entry["objective_seconds"]
            what = f"{entry['fetch']}, training time"
            cells = [format_duration(first), *(f"{value / first:.3f}" for value in rest)]
        made.add_row(name, zipf, what, *cells)
    for name in dict.fromkeys(entry["workload"] for entry in found):
        if name in PAPER:
            first, *rest = PAPER[name]
            cells = [f"{first:.2f}", *(f"{first / value:.1f}" for value in rest)]
            made.add_row(name, "-", "paper's log, MiB, × less", *cells)
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", default=WORKLOADS)
    options.add_argument("--zipf", default="1.05,1.1", help="exponents, by commas")
    given = options.parse_args()
    found = []
    for workload in given.workloads:
        for zipf in map(float, given.zipf.split(",")):
            profile = synthetic(workload, given.scale, zipf)
            shared = {"workload": workload, "zipf": zipf, "rows": profile.rows}
            found += [shared | entry for entry in runs(profile)]
    publish(
        given,
        {"extra_memory": EXTRA, "paper_mib": PAPER, "runs": found},
        lambda: table(found),
        "training: with extra memory, the objective over that without",
    )
    worse = [e for e in found if e["mode"] == "training" and not e["never_worse"]]
    assert not worse, f"more memory costs time: {worse}"


if __name__ == "__main__":
    main()
