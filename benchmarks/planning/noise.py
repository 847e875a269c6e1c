"""Noise of measurements: plans on nearly equal links, compared with the plan for their means.

Each link of a preset is up to so many percent slower or faster, and so is each capacity if the
case has capacities. In further cases without capacities the adapters of ranks vary, which slow all
links of a rank to other nodes by one factor, or the devices' memory does. `ratio` is a plan's
transfer time over that of the plan for the mean of each kind of link and the mean capacity, both on
the true links; 1.01 is the target. The plan for the mean capacity may exceed a rank's own. `step`
is the same ratio of predicted steps, and `gap` the certified gap. The tables are Criteo-Kaggle's
with bags of BAG ids.

    python -m benchmarks.planning.noise [--presets 2x4-a100,…] [--scale 0.1] [--json]
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np

from benchmarks.common import parser, percent, publish
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.cost.workload import Fetch, Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import place_fetched
from oper.planner.place_nearly_alike import problem_on_links
from oper.planner.predict_step import predict_step_of
from oper.profiling.profile import Profile
from oper.synth.profile_writer import synthesize_counts
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.topology.nearly_alike import with_mean_capacity
from oper.topology.topology import Topology

WORKLOAD, BAG = "criteo-kaggle", 5
ON = ("dgx-a100", "2x4-a100", "4x4-a100", "4x8-h100", "cpu:8")
NOISE = (0.005, 0.01, 0.02, 0.05)
CAPACITIES = (None, 1.05, 1.2, 2.0)  # of a row-wise share; None: what devices or the heap have
Varied = Literal["links", "adapters", "memory"]
CASES: tuple[tuple[float | None, Varied], ...] = (
    *((capacity, "links") for capacity in CAPACITIES),
    (None, "adapters"),
    (None, "memory"),
)
FETCHES: tuple[Fetch, ...] = ("raw", "distinct", "pooled")
MODES = ("training", "inference")
SAMPLES_PER_RANK = 2048
TARGET = 1.01


def bags(scale: float) -> Profile:
    """Return the profile of the workload with bags."""
    recipe = load_recipe(WORKLOAD, scale=scale)
    features = tuple(replace(feature, ids=BAG) for feature in recipe.features)
    return synthesize_counts(Synthesizer(replace(recipe, features=features), recipe.samples))


def measured(
    topology: Topology,
    noise: float,
    capacity: float | None,
    seed: int,
    varied: Varied = "links",
) -> Topology:
    """Return the topology as a measurement finds it, with noise on the numbers that are `varied`:
    links and capacities if it is "links"."""
    random = np.random.default_rng([seed, round(1e4 * noise)])
    if varied == "memory":
        factors = 1 + random.uniform(-noise, noise, topology.ranks)
        memory = np.array(topology.device_memory_bytes) * factors
        return replace(topology, device_memory_bytes=tuple(memory.astype(np.int64).tolist()))
    if varied == "adapters":
        slower = 1 + random.uniform(-noise, noise, topology.ranks)
        of_links = np.maximum.outer(slower, slower)
        away = topology.masks()["other_node"]
        return replace(
            topology, link_cost=np.where(away, topology.link_cost * of_links, topology.link_cost)
        )
    link_cost = topology.link_cost * (1 + random.uniform(-noise, noise, topology.link_cost.shape))
    capacities = None
    if capacity is not None:
        factors = capacity * (1 + random.uniform(-noise, noise, topology.ranks))
        capacities = tuple(factors.tolist())
    return replace(topology, link_cost=link_cost, capacity=capacities)


def line(
    profile: Profile,
    topology: Topology,
    noise: float,
    capacity: float | None,
    varied: Varied = "links",
    **given: Any,
) -> dict[str, Any]:
    """Compare the plan on measured links with the plan for their means."""
    here = measured(topology, noise, capacity, len(topology.name), varied)
    workload = Workload(batch_size=SAMPLES_PER_RANK * topology.ranks, **given)
    asked = PlanSettings(extra_memory=None if capacity is None else capacity - 1)
    entry = {"topology": topology.name, "noise": noise, "capacity": capacity, "varied": varied}
    entry |= given
    try:
        means = place_fetched(profile, with_mean_capacity(here), workload, asked)
        began = time.process_time()
        placed = place_fetched(profile, here, workload, asked)
        seconds = time.process_time() - began
    except Exception as error:  # a plan that cannot be made is a result
        return entry | {"error": f"{type(error).__name__}: {error}"}
    there = problem_on_links(means.problem, here)
    rows = means.row_placement
    cost = there.price(rows.holder_sets, rows.sums)
    step = predict_step_of(there, replace(rows, cost=cost)).seconds
    return entry | {
        "ratio": placed.cost.objective_seconds / cost.objective_seconds,
        "step": predict_step_of(placed.problem, placed.row_placement).seconds / step,
        "gap": placed.certificate.certified_gap,
        "mean_gap": means.certificate.certified_gap,
        "feasible": placed.cost.feasible,
        "placed_by": placed.step,
        "cpu_seconds": seconds,
    }


def sweep(profile: Profile, presets: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the results of all cases."""
    for preset, mode, fetch in product(presets, MODES, FETCHES):
        topology = Topology.load(preset)
        if fetch == "pooled" and topology.nodes == 1:
            continue  # rows are read as raw ones there
        for noise, (capacity, varied) in product(NOISE, CASES):
            if varied == "memory" and topology.memory_for_plans is None:
                continue
            if varied == "adapters" and topology.nodes == 1:
                continue
            yield line(profile, topology, noise, capacity, varied, mode=mode, fetch=fetch)


def table(found: list[dict[str, Any]]) -> Any:
    """Return a table of the worst ratio of all cases, by topology, mode, fetch and noise; `!`
    marks a missed target."""
    made = new_table("on", "", "fetch", *(f"{100 * n:g}%" for n in NOISE), "gap, %", left=3)
    for key in dict.fromkeys((e["topology"], e["mode"], e["fetch"]) for e in found):
        mine = [e for e in found if (e["topology"], e["mode"], e["fetch"]) == key]
        cells = []
        for noise in NOISE:
            worst = max(
                (e["ratio"] for e in mine if e["noise"] == noise and "ratio" in e), default=0
            )
            cells.append(f"{worst:.4f}" + "!" * (worst > TARGET))
        gap = max((e["gap"] for e in mine if "gap" in e), default=None)
        made.add_row(*key, *cells, percent(gap))
    return made


def main() -> None:
    options = parser(__doc__, scale=0.002)
    options.add_argument("--presets", default=",".join(ON), help="separated by commas")
    given = options.parse_args()
    profile = bags(given.scale)
    with progress("planning", None, "plans") as meter:
        found = []
        for entry in sweep(profile, given.presets.split(",")):
            found.append(entry)
            meter.advance(1)
    ratios = [entry["ratio"] for entry in found if "ratio" in entry]
    totals = {
        "plans": len(found),
        "rows": profile.rows,
        "not_made": len(found) - len(ratios),
        "infeasible": sum(not entry.get("feasible", True) for entry in found),
        "above_target": sum(ratio > TARGET for ratio in ratios),
        "worst": max(ratios, default=None),
        "mean": float(np.mean(ratios)) if ratios else None,
    }
    notes = [f"{name.replace('_', ' ')}: {value}" for name, value in totals.items()]
    publish(given, {"totals": totals, "plans": found}, lambda: table(found), *notes)


if __name__ == "__main__":
    main()
