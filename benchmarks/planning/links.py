"""Even links: `--balance link` on 2×4 ranks whose nodes are joined by links 4.21 times slower.

Inference, raw and distinct fetches, 16,384 samples per rank (512 of the real logs, which have too
few samples for batches that size). The gap is 1 - min/max of the fetch
time over ordered pairs of ranks (the paper reports about 1 %). With one copy of each row all ranks
read the same bytes from an owner, so that without extra memory the gap is 1 - 1/4.21 = 76 %
whatever the plan: only copies in both nodes take bytes off the slow links. Shown are the gap at
each extra memory, the least extra memory of a finer grid that reaches 0.5 %, and what even links
cost there: total fetch bytes and transfer time over those of the plan of least time, whose own gap
at 5 % is in the JSON object.

    python -m benchmarks.planning.links [NAME …] [--scale 0.01] [--json]
"""

from typing import Any, Literal

from benchmarks.common import (
    REAL_LOGS,
    SAMPLES_PER_RANK,
    parser,
    percent,
    publish,
    real_profiles,
    synthetic,
)
from oper.cli.shared.console import new_table
from oper.cost.objective import Cost
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_placement import make_placement
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

EXTRA = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # shown
GRID = (*EXTRA, 0.0015, 0.003, 0.004, 0.007, 0.015, 0.03, 0.07, 0.12, 0.14, 0.16, 0.18)
REAL_SAMPLES_PER_RANK = 512
REACHED = 0.005
AT = 0.05  # extra memory of the published gaps
TOPOLOGY = Topology.load("2x4-a100")


def planned(
    profile: Profile, workload: Workload, extra_memory: float, balance: Literal["time", "link"]
) -> Cost:
    """What the plan costs."""
    settings = PlanSettings(extra_memory, balance=balance)
    return make_placement(profile, TOPOLOGY, workload, settings).cost


def gap(cost: Cost) -> float:
    """1 - min/max over ordered pairs."""
    return 1 - (cost.dob.link_cost or 0.0)


def measure(name: str, profile: Profile, fetch: str) -> dict[str, Any]:
    """One line of the table."""
    samples = REAL_SAMPLES_PER_RANK if name in REAL_LOGS else SAMPLES_PER_RANK
    workload = Workload("inference", fetch, TOPOLOGY.ranks * samples)  # type: ignore[arg-type]
    even = {extra: planned(profile, workload, extra, "link") for extra in sorted(GRID)}
    least = next((extra for extra, cost in even.items() if gap(cost) <= REACHED), None)
    entry: dict[str, Any] = {
        "workload": name,
        "fetch": fetch,
        "batch_size": workload.batch_size,
        "extra_memory": list(even),
        "gaps": [gap(cost) for cost in even.values()],
        "fetch_bytes": [cost.communication_bytes.fetch for cost in even.values()],
        "objective_seconds": [cost.objective_seconds for cost in even.values()],
        "feasible": all(cost.feasible for cost in even.values()),
        "least_extra_memory": least,
        "gap_of_least_time": gap(planned(profile, workload, AT, "time")),
    }
    if least is not None:
        fast = planned(profile, workload, least, "time")
        fewest = fast.communication_bytes.fetch
        entry["price_fetch"] = even[least].communication_bytes.fetch / fewest - 1
        entry["price_time"] = even[least].objective_seconds / fast.objective_seconds - 1
    return entry


def figures(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the gaps in percent of plans for even links and of plans of least time."""
    made = {}
    for entry in found:
        name = f"links-{entry['workload']}-{entry['fetch']}"
        made[f"{name}-even-percent"] = 100 * entry["gaps"][entry["extra_memory"].index(AT)]
        made[f"{name}-by-time-percent"] = 100 * entry["gap_of_least_time"]
    return made


def table(found: list[dict[str, Any]]) -> Any:
    """The gap in percent at each extra memory; the least that reaches the target and its price."""
    shares = [f"{100 * share:g}%" for share in EXTRA]
    made = new_table("gap of pairs, %", "", *shares, "least", "fetch", "T", left=2)
    for entry in found:
        least = entry["least_extra_memory"]
        price = ["-", "-", "-"]
        if least is not None:
            price = [f"{100 * least:.2g}%"]
            price += [f"{100 * entry[key]:+.3g}%" for key in ("price_fetch", "price_time")]
        gaps = dict(zip(entry["extra_memory"], entry["gaps"], strict=True))
        cells = [percent(gaps[extra], 1 if gaps[extra] > 0.1 else 2) for extra in EXTRA]
        made.add_row(entry["workload"], entry["fetch"], *cells, *price)
    return made


def main() -> None:
    options = parser(__doc__)
    everything = ["criteo-kaggle", *REAL_LOGS]
    options.add_argument("names", nargs="*", default=everything, help="workloads and real logs")
    given = options.parse_args()
    profiles = {name: p for name, p in real_profiles() if name in given.names}
    found = []
    for name in given.names:
        if name in REAL_LOGS and name not in profiles:
            continue
        profile = profiles[name] if name in profiles else synthetic(name, given.scale)
        found += [measure(name, profile, fetch) for fetch in ("raw", "distinct")]
    publish(
        given,
        {"reached": REACHED, "runs": found},
        lambda: table(found),
        f"least: extra memory with a gap of at most {percent(REACHED, 1)} %; fetch, T: its price",
        figures=figures(found),
    )


if __name__ == "__main__":
    main()
