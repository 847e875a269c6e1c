"""Certified gaps: how far every plan is from a lower bound that no plan can pass.

gap = (objective - bound) / bound, the worst over fetches (raw, distinct) and, for generated
workloads, over three orders of ids, for every workload and real log, preset, mode and extra
memory; then for random unequal links and capacities of 4, 8, 16 and 24 ranks. NAME
random-topologies is 200 plans of criteo-80k on seeded topologies of 3 to 16 ranks that differ
(`random_topologies.py`), with quantiles and the worst of each kind. 0 would be a proof of the
optimum. Counted beside: plans that a step other than the default one produced
(`step` of the plan), plans above the target and plans that broke a limit or could not be made.

    python -m benchmarks.planning.gap [NAME …] [--presets dgx-a100,…] [--scale 0.01] [--json]
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from rich.console import Group

from benchmarks.common import (
    PRESETS,
    REAL_LOGS,
    parser,
    percent,
    publish,
    real_profiles,
    synthetic,
    unequal,
)
from benchmarks.planning.random_topologies import CASES, KINDS, case
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_placement import make_placement
from oper.profiling.profile import Profile
from oper.synth.synthesizer import ORDERS
from oper.topology.topology import Topology

# Factors that leave 1 to 34 million rows, so that the whole sweep takes about an hour.
SCALES = {
    "criteo-kaggle": 1.0,
    "avazu": 1.0,
    "criteo-terabyte": 0.02,
    "criteo-terabyte-40m": 0.005,
    "meta-2021": 0.01,
    "syn-small": 0.02,
    "syn-large": 0.01,
}
EXTRA = (0.0, 0.001, 0.01, 0.05, 0.2)
FEW_EXTRA = (0.0, 0.01, 0.05)  # where ranks differ: their plans take seconds each
BATCH_SIZE = 65_536
RANDOM_RANKS, SEEDS = (4, 8, 16, 24), (0, 1, 2)
RANDOM, RANDOM_LOG, RANDOM_TARGET = "random-topologies", "criteo-80k", 5e-3
QUANTILES = (0.5, 0.9, 0.99, 1.0)


def target(name: str, ranks: int, extra_memory: float) -> float | None:
    """The project's target for a plan's gap; None where it is only reported."""
    if ranks > 16:
        return None
    if name == "criteo-kaggle" and extra_memory >= 0.01:
        return 1e-5
    return 1e-3 if name in REAL_LOGS and extra_memory >= 0.01 else 1e-2


def above_target(entry: dict[str, Any]) -> bool:
    """Whether a plan that was made misses its target."""
    return entry["target"] is not None and entry["gap"] > entry["target"]


def plans(
    name: str,
    order: str,
    profile: Profile,
    topologies: list[Topology],
    shares: tuple[float, ...] = EXTRA,
) -> Iterator[dict[str, Any]]:
    """Every plan of one profile."""
    cases = product(topologies, ("inference", "training"), ("raw", "distinct"), shares)
    for topology, mode, fetch, extra in cases:
        workload = Workload(mode, fetch, BATCH_SIZE)  # type: ignore[arg-type]
        about = {"workload": name, "order": order, "target": target(name, topology.ranks, extra)}
        yield about | plan(profile, topology, workload, extra)


def plan(
    profile: Profile, topology: Topology, workload: Workload, extra_memory: float
) -> dict[str, Any]:
    """One plan, or why it could not be made."""
    entry: dict[str, Any] = {
        "topology": topology.name,
        "mode": workload.mode,
        "fetch": workload.fetch,
        "extra_memory": extra_memory,
    }
    try:
        planned = make_placement(profile, topology, workload, PlanSettings(extra_memory))
    except Exception as error:  # a plan that cannot be made is a result
        return entry | {"error": f"{type(error).__name__}: {error}"}
    return entry | {
        "gap": planned.certificate.certified_gap,
        "feasible": planned.cost.feasible,
        "step": planned.step,
        "hot_row": planned.certificate.hot_row_share is not None,
        "seconds": sum(planned.seconds.values()),
    }


def random_plans(profile: Profile) -> Iterator[dict[str, Any]]:
    """The plans on random topologies."""
    for seed in range(CASES):
        made = case(seed)
        about = {"workload": RANDOM, "kind": made.kind, "seed": seed, "target": RANDOM_TARGET}
        yield about | plan(profile, made.topology, made.workload, made.extra_memory)


def sweep(names: list[str], presets: list[str], scale: float) -> Iterator[dict[str, Any]]:
    """All plans: generated workloads in three orders of ids, real logs, unequal ranks."""
    homogeneous = [Topology.load(preset) for preset in presets]
    different = [unequal(ranks, seed) for ranks in RANDOM_RANKS for seed in SEEDS]
    for name, factor in SCALES.items():
        for order in ORDERS if name in names else ():
            profile = synthetic(name, factor * scale, order=order)
            yield from plans(name, order, profile, homogeneous)
            if name == "criteo-kaggle" and order == "scattered":
                yield from plans(name, order, profile, different, FEW_EXTRA)
    for name, profile in real_profiles():
        if name in names:
            yield from plans(name, "log", profile, homogeneous)
            if name == "criteo-80k":
                yield from plans(name, "log", profile, different, FEW_EXTRA)
        if name == RANDOM_LOG and RANDOM in names:
            yield from random_plans(profile)


def figures(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the worst gaps in percent of the real logs, on presets with 0.1 % of extra memory and
    more and on unequal ranks; none if a real log is missing."""
    made = [entry for entry in found if entry["workload"] in REAL_LOGS and "gap" in entry]
    if {entry["workload"] for entry in made} != set(REAL_LOGS):
        return {}
    worst: dict[str, float] = {}
    for entry in made:
        if entry["topology"] in PRESETS:
            name = "gap-presets-percent" if entry["extra_memory"] >= 0.001 else None
        else:
            name = f"gap-unequal-{'24' if entry['topology'] == 'random-24' else 'up-to-16'}-percent"
        if name is not None:
            worst[name] = max(worst.get(name, 0.0), 100 * entry["gap"])
    return worst


def table(found: list[dict[str, Any]]) -> Any:
    """A line for each workload, topology and mode; `!` marks what is above the target."""
    shares = [f"{100 * share:g}%" for share in EXTRA]
    made = new_table("worst gap, %", "", "", *shares, "steps", left=3)
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in found:
        key = (entry["workload"], entry["topology"], entry["mode"])
        groups.setdefault(key, []).append(entry)
    for key, entries in groups.items():
        cells = []
        for extra in EXTRA:
            gaps = [e for e in entries if e["extra_memory"] == extra and "gap" in e]
            worst = max((e["gap"] for e in gaps), default=None)
            above = any(map(above_target, gaps))
            cells.append(percent(worst, 4) + ("!" if above else ""))
        steps = Counter(e.get("step", "none") for e in entries)
        made.add_row(*key, *cells, " ".join(f"{n} {step}" for step, n in steps.most_common()))
    return made


def random_table(found: list[dict[str, Any]]) -> Any:
    """Quantiles of the gaps on random topologies by kind, and the worst plan of each."""
    made = new_table("gap, %", "the worst", "plans", *(f"{q:g}" for q in QUANTILES), left=2)
    for kind in (*KINDS, "of all"):
        gaps = [e for e in found if "gap" in e and kind in (e["kind"], "of all")]
        if not gaps:
            continue
        worst = max(gaps, key=lambda e: e["gap"])
        values = np.quantile([e["gap"] for e in gaps], QUANTILES)
        where = worst["topology"].partition(", ")[2]
        name = f"{where}, {worst['mode']} {worst['fetch']} {worst['extra_memory']:g}"
        made.add_row(kind, name, str(len(gaps)), *(percent(float(v)) for v in values))
    return made


def main() -> None:
    options = parser(__doc__)
    everything = [*SCALES, *REAL_LOGS, RANDOM]
    options.add_argument("names", nargs="*", default=everything, help="workloads and real logs")
    options.add_argument("--presets", default=",".join(PRESETS), help="by commas")
    given = options.parse_args()
    with progress("planning", None, "plans") as meter:
        found = []
        for entry in sweep(given.names, given.presets.split(","), given.scale):
            found.append(entry)
            meter.advance(1)
    made = [entry for entry in found if "gap" in entry]
    totals = {
        "plans": len(found),
        "not_made": len(found) - len(made),
        "infeasible": sum(not entry["feasible"] for entry in made),
        "negative": sum(entry["gap"] < 0 for entry in made),
        "above_target": sum(map(above_target, made)),
        "steps": dict(Counter(entry["step"] for entry in made)),
    }
    notes = [f"{name.replace('_', ' ')}: {value}" for name, value in totals.items()]
    on_random = [entry for entry in found if entry["workload"] == RANDOM]
    others = [entry for entry in found if entry["workload"] != RANDOM]

    def tables() -> Any:
        parts = [(table, others), (random_table, on_random)]
        return Group(*(draw(entries) for draw, entries in parts if entries))

    content = {"totals": totals, "plans": found}
    publish(given, content, tables, *notes, figures=figures(found))


if __name__ == "__main__":
    main()
