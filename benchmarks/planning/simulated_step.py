"""Predicted against simulated iterations: plans replayed by an independent simulator.

Criteo-Kaggle's tables at a scale of their rows, dim 64, 4,096 samples a rank, bags of 1, 5 and 20
ids. Plans are those of `oper.make_plan`, with distinct and with pooled fetches, and TorchRec's own.
Predicted is a step of OPER's plans (oper/cost/step_time.py), and the iteration of TorchRec's.
The simulator (simulator/) replays batches of a log that the plans were not made from
and finds how long flows take; it shares nothing with the prediction, and its constants are
published ones. Nodes have an adapter for each rank, or one for all.

    python -m benchmarks.planning.simulated_step [--topology NxG-h100,…] [--bags 1,20] [--json]
    python -m benchmarks.planning.simulated_step --meta --samples 32 --scale 0.001
"""

import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import oper
from benchmarks.common import parser, publish
from benchmarks.planning.simulated_placements import (
    Case,
    make_log,
    make_meta_log,
    methods,
    whole_tables,
)
from benchmarks.planning.simulator.bound import least_training_seconds
from benchmarks.planning.simulator.iteration import Iteration, batches_of, simulate
from benchmarks.planning.simulator.machine import Machine, h100
from oper.base.errors import OperError
from oper.cli.shared.console import new_table
from oper.topology.topology import Topology

TOPOLOGIES = (
    "dgx-h100",
    *("2x8-h100", "8x8-h100", "16x8-h100"),
    *("2x8-h100:1", "8x8-h100:1", "16x8-h100:1"),  # an adapter a node
)
BAGS = (1, 5, 20)
SAMPLES_PER_RANK = 4096
META_BAG = 16  # stands for meta-2021's own lengths, which are that on average
BOUND = "any, at least"
EXTRA_MEMORY = 0.05  # in inference, where all rows would be everywhere if devices had the room
Mode = Literal["training", "inference"]
PLANNERS = ("oper", "torchrec")
MODES: tuple[Mode, ...] = get_args(Mode)


def machine_of(topology: str) -> Machine:
    """A preset's machine."""
    match = re.fullmatch(r"([0-9]+)x([0-9]+)-h100(?::([0-9]+))?", topology.replace("dgx", "1x8"))
    if match is None:
        raise OperError(
            f"--topology {topology}: dgx-h100, NxG-h100 or NxG-h100:ADAPTERS was needed, of which "
            "the simulator has the machine"
        )
    return h100(int(match[1]), int(match[2]), None if match[3] is None else int(match[3]))


def measure(
    topologies: Sequence[str],
    bags: Sequence[int],
    modes: Sequence[Mode],
    scale: float,
    batches: int,
    planners: Sequence[str] = PLANNERS,
    samples_per_rank: int = SAMPLES_PER_RANK,
) -> list[dict[str, Any]]:
    """A line for each plan and machine."""
    found = []
    for bag in bags:
        most = max(machine_of(name).ranks for name in topologies)
        if bag == META_BAG:
            recipe, log, profile = make_meta_log(scale, samples_per_rank * most)
        else:
            recipe, log, profile = make_log(scale, bag, samples_per_rank * most)
        for name in topologies:
            machine = machine_of(name)
            batch_size = samples_per_rank * machine.ranks
            for mode in modes:
                extra = None if mode == "training" else EXTRA_MEMORY
                workload = oper.Workload(mode, batch_size=batch_size)
                settings = oper.PlanSettings(extra_memory=extra)
                case = Case(Topology.load(name), workload, settings)
                if mode == "training":
                    parts = whole_tables(recipe.tables, mode)
                    samples = next(batches_of(log, machine.ranks, batch_size, 1))
                    bound = least_training_seconds(parts, log, samples, machine)
                    line = {"method": BOUND, "predicted_seconds": None, "simulated_seconds": bound}
                    found.append({"bag": bag, "topology": name, "mode": mode, **line})
                for method in methods(profile, case, bag, planners):
                    began = time.perf_counter()
                    placed = method.placement
                    (iteration,) = simulate(placed, log, [machine], mode, batch_size, batches)
                    line = {
                        "method": method.name,
                        "predicted_seconds": method.predicted_seconds,
                        **describe(iteration),
                    }
                    found.append({"bag": bag, "topology": name, "mode": mode, **line})
                    print(
                        f"{bag} {name} {mode} {method.name}: {method.predicted_seconds:.3g} "
                        f"predicted, {iteration.seconds:.3g} simulated, in "
                        f"{time.perf_counter() - began:.1f} s",
                        file=sys.stderr,
                    )
    return found


def describe(iteration: Iteration) -> dict[str, Any]:
    """The figures of an iteration."""
    return {
        "simulated_seconds": iteration.seconds,
        "least_seconds": iteration.least,
        "latency_seconds": iteration.latency,
        "phases": {name: phase._asdict() for name, phase in iteration.phases.items()},
    }


def table(found: Sequence[dict[str, Any]]) -> Any:
    """Microseconds."""
    made = new_table("µs", "bag", "mode", "method", "predicted", "simulated", "off", "latency")
    for line in found:
        predicted, simulated = line["predicted_seconds"], line["simulated_seconds"]
        made.add_row(
            line["topology"],
            str(line["bag"]),
            line["mode"],
            line["method"],
            "-" if predicted is None else f"{1e6 * predicted:,.0f}",
            f"{1e6 * simulated:,.0f}",
            "-" if predicted is None else f"{100 * (predicted / simulated - 1):+.0f} %",
            "-" if line["method"] == BOUND else f"{1e6 * line['latency_seconds']:,.0f}",
        )
    return made


def main() -> None:
    options = parser(__doc__, scale=0.1)
    options.add_argument("--topology", default=",".join(TOPOLOGIES), help="presets, by commas")
    options.add_argument("--bags", default=",".join(map(str, BAGS)), help="ids of a bag, by commas")
    options.add_argument("--meta", action="store_true", help="meta-2021's tables and bags instead")
    options.add_argument("--samples", type=int, default=SAMPLES_PER_RANK, help="of a rank")
    options.add_argument("--modes", default=",".join(MODES), help="by commas")
    options.add_argument("--batches", type=int, default=1, help="to replay")
    options.add_argument("--planners", default=",".join(PLANNERS), help="whose plans, by commas")
    given = options.parse_args()
    bags = [META_BAG] if given.meta else [int(bag) for bag in given.bags.split(",")]
    modes = [mode for mode in MODES if mode in given.modes.split(",")]
    topologies, planners = given.topology.split(","), given.planners.split(",")
    found = measure(topologies, bags, modes, given.scale, given.batches, planners, given.samples)
    publish(
        given,
        {"steps": found},
        lambda: table(found),
        "off: predicted beyond simulated; latency: hops, messages and kernels in the simulated",
        f"{BOUND}: no placement whose rows travel takes less (simulator/bound.py)",
    )


if __name__ == "__main__":
    main()
