"""Predicted against measured steps of two nodes whose network is slow: 2 × 2 CPU ranks.

Two network namespaces are joined by a cable (a veth pair) which `tc` limits, each way, to 100
Mbit/s to 10 Gbit/s. Two ranks in each train Criteo-Kaggle's tables by OPER's own plan for a
topology with these links: the rows of this host as `oper topology measure` finds them, the bytes a
second that pass the cable while as many come back, which are fewer than one way, and a hop, as they
are measured. Beside the plan's time stands that of the simulator of
`benchmarks/planning/simulated_step.py`, whose machine has the same figures.

    python -m benchmarks.runtime.rate_limited_nodes [--rates 100e6,1e9] [--bags 1,5] [--json]
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import oper
from benchmarks.common import parser, publish
from benchmarks.planning.simulated_placements import make_log, oper_placement
from benchmarks.planning.simulator.iteration import simulate
from benchmarks.planning.simulator.log import Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.runtime import step_over_a_cable
from benchmarks.runtime.step_inputs import Cell, measure_topology
from oper.cli.shared.console import new_table
from oper.plan import plan_file
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.runtime import two_hosts

NODES, RANKS_A_NODE = 2, 2
RANKS = NODES * RANKS_A_NODE
RATES = (100e6, 300e6, 1e9, 3e9, 10e9)  # bits a second
BAGS = {1: 4096, 5: 1024}  # ids of a bag, and samples of a rank
DIM = 64
BLOCKS, STEPS = 12, 2  # a block is so many steps in a row; their median counts
# Of a frame of 1,514 bytes what Ethernet (14), IP (20) and TCP (32, with its time stamps) leave.
PAYLOAD = 1448 / 1514
LINKS_SHARE = 0.8  # of the step, from which on a plan is to predict it


class Cable(NamedTuple):
    """What it is as measured: seconds of an exchange of a few bytes between all ranks, with all its
    messages, and bytes that a host sends a second while as many come."""

    hop: float
    bytes_a_second: float

    @classmethod
    def measured(cls, hosts: tuple[int, int], limit: int) -> "Cable":
        """Of a cable of so many bits a second each way."""
        hops = two_hosts.run(hosts, step_over_a_cable.hop_seconds, bits_a_second=limit)
        rates = two_hosts.run(hosts, step_over_a_cable.bytes_a_second, bits_a_second=limit)
        return cls(max(hops), RANKS_A_NODE * min(rates))


def topology_of(rate: float, cable: Cable, measured: Topology) -> Topology:
    """What a plan is made for: a cable of `rate` bits/s, which a node's ranks share; a sum over all
    ranks sends as many bytes as a rank has from each node to the other."""
    local, same_node, _ = measured.seconds_by_kind()
    bytes_a_second = cable.bytes_a_second
    node_of = [rank // RANKS_A_NODE for rank in range(RANKS)]
    content = {
        "name": f"{rate / 1e6:g} Mbit/s",
        "node_of": node_of,
        "link_cost": {
            "local": local,
            "same_node": same_node,
            "other_node": RANKS_A_NODE / bytes_a_second,
        },
        # NCCL's bus bandwidth counts 2(M - 1)/M of them.
        "allreduce_bandwidth": 2 * (RANKS - 1) / RANKS * bytes_a_second,
        "latency_seconds": asdict(replace(measured.latency, other_node=cable.hop, message=0.0)),
        "memory": "shared",
    }
    return Topology.from_dict(content)


def machine_of(cable: Cable, measured: Topology) -> Machine:
    """The same for the simulator: an adapter a node."""
    bandwidth = 1 / measured.seconds_by_kind()[0]
    return Machine(
        name="rate-limited",
        nodes=NODES,
        ranks_per_node=RANKS_A_NODE,
        memory_bandwidth=bandwidth,
        cache_bandwidth=bandwidth,
        link_bandwidth=None,
        adapter_bandwidth=cable.bytes_a_second,
        adapters_per_node=1,
        near_hop=measured.latency.same_node,
        far_hop=cable.hop,
        message=0.0,
        kernel=measured.latency.kernel,
    )


def write_batches(path: Path, log: Log, tables: Sequence[Table], batch: int) -> None:
    """The samples of all ranks and steps, for the ranks to read."""
    random = np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    for n in range(BLOCKS * STEPS):
        for rank, samples in enumerate(log.draw(RANKS, batch, random)):
            bags = [log.bags(t, samples) for t in range(len(tables))]
            ids = np.concatenate([values for values, _ in bags]).astype(np.int64)
            lengths = [np.bincount(bag, minlength=batch) for _, bag in bags]
            arrays[f"ids_{n}_{rank}"] = ids
            arrays[f"lengths_{n}_{rank}"] = np.concatenate(lengths).astype(np.int32)
    np.savez(path, **arrays)


def measure(
    rates: Sequence[float], bags: Sequence[int], scale: float, folder: Path
) -> list[dict[str, Any]]:
    """A line for each bag and rate."""
    found = []
    measured = Topology.load(measure_topology(RANKS, 4 * DIM, folder))
    for bag in bags:
        batch = BAGS[bag]
        cell = Cell(RANKS, DIM, batch, fetch="distinct", bag=bag)
        recipe, log, profile = make_log(scale, bag, RANKS * batch * BLOCKS * STEPS)
        batches = folder / f"batches-{bag}.npz"
        write_batches(batches, log, recipe.tables, batch)
        workload = oper.Workload("training", "distinct", RANKS * batch)
        for rate in rates:
            print(f"bags of {bag}, {rate:g} bit/s", file=sys.stderr)
            hosts, limit = (RANKS_A_NODE, RANKS_A_NODE), int(rate)
            cable = Cable.measured(hosts, limit)
            topology = topology_of(rate, cable, measured)
            plan = oper.make_plan(profile, topology, workload)
            saved = folder / f"plan-{bag}-{rate:g}"
            plan.save(saved)
            arguments = (cell, recipe.tables, saved, batches, STEPS)
            ranks = two_hosts.run(
                hosts, step_over_a_cable.step_seconds, *arguments, bits_a_second=limit
            )
            slowest = np.max([rank["seconds"] for rank in ranks], axis=0)  # of each block
            (simulated,) = simulate(
                oper_placement(plan),
                log,
                [machine_of(cable, measured)],
                "training",
                workload.batch_size,
                batches=3,
            )
            line = {
                "bag": bag,
                "batch": batch,
                "bits_a_second": rate,
                "hop_seconds": cable.hop,
                "bytes_a_second": cable.bytes_a_second,
                "step_seconds": float(np.median(slowest)),
                "block_seconds": slowest.tolist(),
                **predicted(plan),
                "simulated_seconds": simulated.seconds,
                "sent_bytes": max(rank["sent_bytes"] for rank in ranks),
                "cpu_seconds": max(rank["cpu_seconds"] for rank in ranks),
            }
            print(line, file=sys.stderr)
            found.append(line)
    return found


def predicted(plan: oper.Plan) -> dict[str, Any]:
    """What the plan says: its step, and the bytes that it has a node send in one."""
    assert plan.step_time is not None
    # The ranks of a node have equal shares of the cable, and no other links.
    through_links = sum(phase.link_seconds for phase in plan.step_time.phases)
    return {
        "objective_seconds": plan.cost.objective_seconds,
        "predicted_seconds": plan.step_time.seconds,
        "step": plan_file.to_json(plan.step_time),
        "predicted_sent_bytes": RANKS_A_NODE * through_links / plan.topology.link_cost[0, -1],
        "replica_accesses": plan.replica_accesses,
        "allreduce_method": plan.allreduce_method,
    }


def table(found: Sequence[dict[str, Any]]) -> Any:
    """Milliseconds, and megabytes that a node sends in a step."""
    made = new_table(
        "Mbit/s",
        "both ways",
        *("bag", "step", "predicted", "off", "simulated", "off"),
        *("sent", "predicted", "links' share", "CPU"),
    )
    for line in found:
        step = line["step_seconds"]
        share = PAYLOAD * line["sent_bytes"] / line["bytes_a_second"] / step
        made.add_row(
            f"{line['bits_a_second'] / 1e6:,.0f}",
            f"{8 * line['bytes_a_second'] / 1e6:,.0f}",
            str(line["bag"]),
            f"{1e3 * step:.1f}",
            *_against(line["predicted_seconds"], step),
            *_against(line["simulated_seconds"], step),
            f"{line['sent_bytes'] / 1e6:.2f}",
            f"{line['predicted_sent_bytes'] / 1e6:.2f}",
            f"{100 * share:.0f} %",
            f"{1e3 * line['cpu_seconds']:.0f}",
        )
    return made


def _against(predicted_seconds: float, step: float) -> tuple[str, str]:
    return f"{1e3 * predicted_seconds:.1f}", f"{100 * (predicted_seconds / step - 1):+.0f} %"


def main() -> None:
    options = parser(__doc__, scale=0.02)
    options.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="bit/s")
    options.add_argument("--bags", default=",".join(map(str, BAGS)), help="ids of a bag, by commas")
    given = options.parse_args()
    if reason := two_hosts.missing():
        options.error(f"two network namespaces are needed, and this machine has none: {reason}")
    rates = [float(rate) for rate in given.rates.split(",")]
    bags = [int(bag) for bag in given.bags.split(",")]
    with tempfile.TemporaryDirectory(prefix="oper-cable-") as folder:
        found = measure(rates, bags, given.scale, Path(folder))
    publish(
        given,
        {"steps": found},
        lambda: table(found),
        f"ms of a step, CPU of the slowest rank; MB that a node sends in one. Where links take "
        f"{100 * LINKS_SHARE:.0f} % of it, predictions are to be within 10 %",
    )


if __name__ == "__main__":
    main()
