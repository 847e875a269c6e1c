"""What copies are worth where ranks share memory: predicted beside measured, in the same ranks.

26 Criteo-Kaggle tables at a tenth of their rows, one id per bag, Zipf 1.05, 8,192 samples a rank,
SGD. The topology is what `oper topology measure` finds for rows of that size. Plans with 0, 0.05, 1
and 5 % copies are made with the copies forced, by owners that serve all reads and by own rows and
an AllReduce a million times cheaper. They are then priced for the measured topology, and run: all
plans' engines live in the same ranks and take turns, a block of steps each. Measured are forward
and, in training, backward with the update, in CPU time of the ranks' main threads: the slowest
rank's, the least of the rounds, which other programs disturb least. Translation and sort are no
part of a plan's time.

    python -m benchmarks.runtime.shared_memory [--dims 16,64] [--json] [--scale 0.1]
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.common import parser, publish
from benchmarks.runtime import ranks
from benchmarks.runtime.step_inputs import Cell, make_log, measure_topology, read_bags, recipe_of
from oper.cli.shared.console import new_table
from oper.cost.holder_sets import Sums
from oper.cost.objective import Cost, evaluate
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import plan_and_placement
from oper.planner.row_placement.row_placement import stripe_sums
from oper.profiling.profile import Profile
from oper.synth.profile_writer import synthesize_counts
from oper.synth.synthesizer import Synthesizer
from oper.topology.topology import Topology

COPIES = (0.0, 0.0005, 0.01, 0.05)
RANKS, BATCH = 2, 8192
STEPS = 4  # of a block
CHEAPER = 1e6
BAR = 0.15  # relative, of measured over predicted
DEADLINE_SECONDS = 1800.0


def forced(topology: Topology) -> Topology:
    """A topology under which copies pay."""
    cost = topology.link_cost.copy()
    np.fill_diagonal(cost, cost.diagonal() / CHEAPER)
    return replace(
        topology,
        link_cost=cost,
        memory=(),
        allreduce_bandwidth=CHEAPER * topology.allreduce_bandwidth,
        latency=topology.latency.scaled(1 / CHEAPER),
    )


def plan_and_price(
    profile: Profile, topology: Topology, cell: Cell, copies: float, folder: Path
) -> Cost:
    """Make the plan with so many copies in `folder`; what it costs on `topology`."""
    mode = "training" if cell.training else "inference"
    workload = Workload(mode, "raw", cell.world_size * cell.batch)  # type: ignore[arg-type]
    settings = PlanSettings(extra_memory=copies)
    plan, made = plan_and_placement(profile, forced(topology), workload, settings)
    plan.save(folder)
    placement, problem = made.row_placement, made.problem
    sets = placement.holder_sets
    striped = stripe_sums(problem, placement.scan)
    sums = problem.classes.sums(placement.counts)
    sums = sums + striped.append(Sums.zeros(len(sets) - problem.ranks))
    method = made.cost.allreduce_method
    asked = None if method == "none" else method
    return evaluate(topology, workload, sets, sums, problem.capacity_bytes, asked)


def measure_rank(
    rank: int, cell: Cell, plans: list[Path], log: Path, scale: float, rounds: int
) -> list[list[list[float]]]:
    """CPU seconds of a step's forward and backward, of each plan in each round, on one rank."""
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    batches = read_bags(log, tables, rank, cell)
    models = [sides.oper_model(sides.make_module(tables, cell.what), plan) for plan in plans]
    gradient = sides.fixed_gradient(tables, cell).flatten()
    for model in models:
        model.train(cell.training)
    found: list[list[list[float]]] = [[] for _ in models]
    for turn in range(rounds + 1):  # the first one warms up
        for model, seconds in zip(models, found, strict=True):
            engine = sides.engine_of(model)
            forward = backward = 0.0
            for features in sides.fresh(batches, turn * STEPS, STEPS):
                batch = engine.prepare(features)
                dist.barrier()
                start = time.thread_time()
                engine.training_step.forward(batch)
                forward += time.thread_time() - start
                if cell.training:
                    start = time.thread_time()
                    engine.training_step.backward(batch, gradient, False)
                    backward += time.thread_time() - start
            seconds.append([forward / STEPS, backward / STEPS])
    return [seconds[1:] for seconds in found]


def measure(cell: Cell, scale: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """One entry a plan."""
    recipe = recipe_of(cell, scale)
    profile = synthesize_counts(Synthesizer(recipe, recipe.samples))
    topology = Topology.load(str(measure_topology(cell.world_size, 4 * cell.dim, folder)))
    plans = [folder / f"{cell.what}-{cell.dim}-{copies}" for copies in COPIES]
    costs = [
        plan_and_price(profile, topology, cell, copies, plan)
        for copies, plan in zip(COPIES, plans, strict=True)
    ]
    arguments = (cell, plans, make_log(scale, cell), scale, rounds)
    found = ranks.run(measure_rank, cell.world_size, *arguments, deadline_seconds=DEADLINE_SECONDS)
    entries = []
    for n, cost in enumerate(costs):
        # [rounds, forward and backward] of the slowest rank
        blocks = np.array([of_rank[n] for of_rank in found]).max(axis=0)
        reads = cost.lookup_seconds + cost.link_seconds.sum(axis=1)
        gradients = cost.gradient_lookup_seconds + cost.gradient_link_seconds.sum(axis=1)
        entries.append(
            {
                **cell.describe(),
                "mode": "training" if cell.training else "inference",
                "row_bandwidth": 1 / topology.link_cost[0, 1],
                "allreduce_bandwidth": topology.allreduce_bandwidth,
                "copies": cost.extra_memory_ratio,
                "predicted_ms": 1e3 * cost.objective_seconds,
                "predicted_parts_ms": [
                    1e3 * float(part.max()) for part in (reads, gradients, cost.allreduce_seconds)
                ],
                "allreduce_method": cost.allreduce_method,
                "forward_ms": 1e3 * float(blocks[:, 0].min()),
                "backward_ms": 1e3 * float(blocks[:, 1].min()),
                "seconds": blocks.tolist(),
            }
        )
    for entry in entries:
        first = entries[0]
        took, first_took = (e["forward_ms"] + e["backward_ms"] for e in (entry, first))
        entry["measured_ratio"] = took / first_took
        entry["predicted_ratio"] = entry["predicted_ms"] / first["predicted_ms"]
        entry["off"] = entry["measured_ratio"] / entry["predicted_ratio"] - 1
    return entries


def table(found: list[dict[str, Any]]) -> Any:
    """A line for each plan."""
    head = ("mode", "dim", "copies", "predicted", "ratio", "forward", "backward", "ratio", "off")
    made = new_table("W = 2, ms", *head)
    for e in found:
        made.add_row(
            e["mode"],
            str(e["dim"]),
            f"{e['copies']:.2%}",
            f"{e['predicted_ms']:.2f}",
            f"{e['predicted_ratio']:.3f}",
            f"{e['forward_ms']:.2f}",
            f"{e['backward_ms']:.2f}",
            f"{e['measured_ratio']:.3f}",
            f"{e['off']:+.1%}",
        )
    return made


def main() -> None:
    options = parser(__doc__, scale=0.1)
    options.add_argument("--dims", default="16,64")
    options.add_argument("--rounds", type=int, default=24, help="blocks of each plan")
    given = options.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for dim in map(int, given.dims.split(",")):
            for what in ("lookup", "step"):
                cell = Cell(RANKS, dim, BATCH, what=what)
                found += measure(cell, given.scale, given.rounds, Path(folder))
    worst = max(abs(entry["off"]) for entry in found)
    publish(
        given,
        {"bar": BAR, "runs": found},
        lambda: table(found),
        "ratio: to the plan without copies; off: measured ratio over predicted, less 1; "
        f"at most {worst:.1%}, the aim is {BAR:.0%}",
    )


if __name__ == "__main__":
    main()
