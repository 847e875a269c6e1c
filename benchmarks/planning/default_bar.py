"""OPER's default plan against every other method, by prediction and in the simulator.

Criteo-Kaggle's tables at a scale of their rows, bags of 1, 5 and 20 ids, 1 to 16 nodes, both modes,
on the presets' links and on links with 1 % of noise, as measurements have them. Predicted is the
step of each method in `oper compare`, which pools the tables of other methods too if that makes
their transfers shorter. The simulator (simulator/) replays OPER's plan, TorchRec's plan as its
shards run, and row-wise and table-wise sharding, each run as TorchRec runs such shards and as
OPER's runtime fetches rows: the shorter counts. Ratios are OPER's step over the least of the
others; the target is TARGET.

    python -m benchmarks.planning.default_bar [--topology dgx-h100,2x8-h100] [--bags 1,20] [--json]
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

import oper
from benchmarks.common import parser, publish
from benchmarks.planning.noise import measured
from benchmarks.planning.simulated_placements import (
    Answer,
    Case,
    asked_in_a_process,
    make_log,
    oper_placement,
    torchrec_placement,
)
from benchmarks.planning.simulated_step import (
    BAGS,
    EXTRA_MEMORY,
    MODES,
    SAMPLES_PER_RANK,
    Mode,
    machine_of,
)
from benchmarks.planning.simulator.iteration import simulate
from benchmarks.planning.simulator.log import Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.placement import Fetch, Placement, whole_table
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.planner.baselines.simple import row_wise, table_wise
from oper.planner.compare import Comparison, compare, installed_methods
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

TOPOLOGIES = (
    "dgx-h100",
    *("2x8-h100", "4x8-h100", "8x8-h100", "16x8-h100"),
    *("2x8-h100:1", "16x8-h100:1"),  # an adapter a node
)
NOISE = (0.0, 0.01)
TARGET = 1.02
LEFT_OUT = ("oper", "milp")  # the plan itself; and the solver, which takes its whole time limit
SIMPLE = {"row_wise": row_wise, "table_wise": table_wise}


def simple_placements(problem: Problem) -> Iterator[tuple[str, Placement]]:
    """Yield row-wise and table-wise placements with each way to run them."""
    profile, ranks = problem.profile, problem.ranks
    rows_of_ranks = Fetch.RAW if problem.topology.nodes == 1 else Fetch.DISTINCT
    for name, place in SIMPLE.items():
        pieces = place(problem).pieces
        assert pieces is not None
        owner = np.repeat(pieces.rank, np.diff(pieces.first)).astype(np.int32)
        for fetch in (rows_of_ranks, Fetch.POOLED_BY_RANK):
            parts = [
                whole_table(
                    t, table, problem.workload.mode, fetch, owner[begin : begin + table.rows]
                )
                for t, (table, begin) in enumerate(
                    zip(profile.tables, profile.offsets.tolist(), strict=False)
                )
            ]
            source = np.repeat(np.arange(ranks)[:, None], ranks, axis=1)
            yield name, Placement(source, np.eye(ranks, dtype=bool), parts)


def line(
    profile: Profile,
    log: Log,
    machine: Machine,
    case: Case,
    methods: Sequence[str],
    answer: Callable[[dict[str, Any]], Answer],
) -> dict[str, Any]:
    """Return the steps of all methods in a case, and OPER's over the least of the others."""
    workload, topology = case.workload, case.topology
    run = compare(profile, topology, workload, case.settings, methods)
    plan = oper.make_plan(profile, topology, workload, case.settings)
    assert plan.step_time is not None

    def simulated(placement: Placement) -> float:
        batch = workload.batch_size
        (iteration,) = simulate(placement, log, [machine], workload.mode, batch, 1)
        return iteration.seconds

    times = {"oper": simulated(oper_placement(plan))}
    problem = make_problem(profile, topology, replace(workload, fetch=None), case.settings)
    for name, placement in simple_placements(problem):
        times[name] = min(simulated(placement), times.get(name, np.inf))
    if found := torchrec_placement(profile, case, answer):
        times["torchrec"] = simulated(found.placement)
    predicted = {"oper": plan.step_time.seconds, **predicted_steps(run)}
    return {
        "pooled_tables": len(plan.pooled_tables),
        "predicted_seconds": predicted,
        "simulated_seconds": times,
        "predicted": ratio(predicted),
        "simulated": ratio(times),
    }


def predicted_steps(run: Comparison) -> dict[str, float]:
    """Return the predicted step of each method of a comparison that fits."""
    steps = {name: run.methods[name].step_seconds for name in run.fitting}
    return {name: seconds for name, seconds in steps.items() if seconds is not None}


def ratio(seconds: dict[str, float]) -> float:
    """Return OPER's time over the least of the others."""
    return seconds["oper"] / min(took for name, took in seconds.items() if name != "oper")


def measure(
    topologies: Sequence[str],
    bags: Sequence[int],
    modes: Sequence[Mode],
    noises: Sequence[float],
    scale: float,
    samples_per_rank: int,
    methods: Sequence[str],
    answer: Callable[[dict[str, Any]], Answer] = asked_in_a_process,
) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each case."""
    most = max(machine_of(name).ranks for name in topologies)
    for bag in bags:
        _, log, profile = make_log(scale, bag, samples_per_rank * most)
        for name, noise, mode in product(topologies, noises, modes):
            machine, topology = machine_of(name), Topology.load(name)
            if noise:
                topology = measured(topology, noise, None, seed=len(name))
            extra = None if mode == "training" else EXTRA_MEMORY
            workload = oper.Workload(mode, batch_size=samples_per_rank * machine.ranks)
            case = Case(topology, workload, oper.PlanSettings(extra_memory=extra))
            found = line(profile, log, machine, case, methods, answer)
            yield {"bag": bag, "topology": name, "mode": mode, "noise": noise, **found}


def table(found: Sequence[dict[str, Any]]) -> Any:
    """Return a table of the ratios; `!` marks those above TARGET."""
    made = new_table(
        "", "bag", "mode", "noise", "OPER, µs", "pooled tables", "predicted", "simulated", left=3
    )
    for entry in found:
        made.add_row(
            entry["topology"],
            str(entry["bag"]),
            entry["mode"],
            f"{100 * entry['noise']:g} %",
            f"{1e6 * entry['predicted_seconds']['oper']:,.0f}",
            str(entry["pooled_tables"]),
            *(f"{entry[of]:.3f}{' !' * (entry[of] > TARGET)}" for of in ("predicted", "simulated")),
        )
    return made


def main() -> None:
    options = parser(__doc__, scale=0.01)
    options.add_argument("--topology", default=",".join(TOPOLOGIES), help="presets, by commas")
    options.add_argument("--bags", default=",".join(map(str, BAGS)), help="ids of a bag, by commas")
    options.add_argument("--modes", default=",".join(MODES), help="by commas")
    options.add_argument("--noise", default=",".join(map(str, NOISE)), help="shares, by commas")
    options.add_argument("--samples", type=int, default=SAMPLES_PER_RANK, help="of a rank")
    given = options.parse_args()
    cases = measure(
        given.topology.split(","),
        [int(bag) for bag in given.bags.split(",")],
        [mode for mode in MODES if mode in given.modes.split(",")],
        [float(noise) for noise in given.noise.split(",")],
        given.scale,
        given.samples,
        [method for method in installed_methods() if method not in LEFT_OUT],
    )
    found = []
    with progress("comparing", None, "cases") as meter:
        for entry in cases:
            found.append(entry)
            meter.advance(1)
    above = sum(entry[of] > TARGET for entry in found for of in ("predicted", "simulated"))
    publish(
        given,
        {"cases": found},
        lambda: table(found),
        f"OPER's default plan over the best other method; {above} figures above {TARGET}",
    )


if __name__ == "__main__":
    main()
