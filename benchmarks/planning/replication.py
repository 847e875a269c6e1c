"""Replication: forward fetch bytes of one iteration against those without extra memory.

8 ranks, 16,384 samples each, inference on dgx-a100. At 0 % every pair moves samples · features ·
row bytes / ranks for raw fetches, whatever the plan: the physical limit that replication lifts.
Shown is MiB over an ordered pair of ranks at 0 % and how many times less that is with extra
memory, beside the paper's Table 2 (MiB per pair there too, printed as MB). In training, gradients
and the replicas' AllReduce counted, the objective with extra memory over that without: more
memory must never cost time, which is asserted. A real log has no exponent.

    python -m benchmarks.planning.replication [WORKLOAD …] [--zipf 1.05,1.1] [--scale 0.01] [--json]
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks.common import (
    LOGS,
    REAL_LOGS,
    SAMPLES_PER_RANK,
    pair_bytes,
    parser,
    publish,
    real_profiles,
    synthetic,
)
from oper.base.formatting import format_duration
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_placement import make_placement
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import costs_under, problem_of
from oper.planner.reference_figures import later_profile
from oper.profiling.make_profile import profile as profile_of
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

WORKLOADS = ("criteo-kaggle", "avazu", "criteo-terabyte", "syn-small", "criteo-80k")
EXTRA = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
PAPER = {  # its Table 2: MiB per ordered pair at EXTRA
    "criteo-kaggle": (3.25, 0.46, 0.30, 0.24, 0.20, 0.19, 0.18),
    "avazu": (2.50, 0.16, 0.15, 0.13, 0.12, 0.10, 0.10),
    "criteo-terabyte": (13.00, 0.95, 0.84, 0.73, 0.66, 0.57, 0.52),
}
TOPOLOGY, HELD_OUT_LOG = Topology.load("dgx-a100"), "criteo-80k"
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


def held_out_times_less() -> float:
    """Return how many times less bytes 1 % of extra memory leaves on the last fifth of the real
    Criteo log, by plans for inference with raw fetches that were made from the rest."""
    path, reading = REAL_LOGS[HELD_OUT_LOG]
    first = profile_of(LOGS / path, **reading, hold_out=0.2)
    later = later_profile(first)
    assert later is not None
    workload = Workload("inference", "raw", TOPOLOGY.ranks * SAMPLES_PER_RANK)
    plans = [make_plan(first, TOPOLOGY, workload, PlanSettings(extra)) for extra in (0.0, 0.01)]
    costs = [costs_under([plan], [problem_of(plan, later, as_counted=True)])[0] for plan in plans]
    return pair_bytes(costs[0]) / pair_bytes(costs[1])


def figures(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return for inference how many times less bytes 1 % of extra memory leaves, by raw fetches."""
    made = {}
    for entry in found:
        if (entry["mode"], entry["fetch"]) == ("inference", "raw"):
            law = "" if entry["zipf"] is None else f"-zipf-{entry['zipf']:g}"
            first, with_copies = (entry["pair_fetch_bytes"][EXTRA.index(x)] for x in (0.0, 0.01))
            made[f"replication-{entry['workload']}{law}".replace(".", "_")] = first / with_copies
    return made


def table(found: list[dict[str, Any]]) -> Any:
    """Inference: MiB at 0 % and factors; training: objectives over that at 0 %."""
    shares = [f"{100 * share:g}%" for share in EXTRA[1:]]
    made = new_table("workload", "zipf", "what", "at 0%", *shares, left=3)
    for entry in found:
        name, zipf = entry["workload"], "-" if entry["zipf"] is None else f"{entry['zipf']:g}"
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
    exponents = [float(text) for text in given.zipf.split(",")]
    found: list[dict[str, Any]] = []

    def measure(workload: str, zipf: float | None, profile: Profile) -> None:
        shared = {"workload": workload, "zipf": zipf, "rows": profile.rows}
        found.extend(shared | entry for entry in runs(profile))

    for workload, zipf in product(given.workloads, exponents):
        if workload not in REAL_LOGS:
            measure(workload, zipf, synthetic(workload, given.scale, zipf))
    for workload, profile in real_profiles():
        if workload in given.workloads:
            measure(workload, None, profile)
    published, notes = (
        figures(found),
        ["training: with extra memory, the objective over that without"],
    )
    if HELD_OUT_LOG in {entry["workload"] for entry in found}:
        times = held_out_times_less()
        published[f"replication-{HELD_OUT_LOG}-held-out"] = times
        notes.append(f"{HELD_OUT_LOG}, inference, raw, 1%: {times:.1f} × less on held-out data")
    publish(
        given,
        {"extra_memory": EXTRA, "paper_mib": PAPER, "runs": found},
        lambda: table(found),
        *notes,
        figures=published,
    )
    worse = [e for e in found if e["mode"] == "training" and not e["never_worse"]]
    assert not worse, f"more memory costs time: {worse}"


if __name__ == "__main__":
    main()
