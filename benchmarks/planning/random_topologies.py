"""Random topologies whose ranks differ: what `gap.py` plans a real log on, the same in every run.

Case n is drawn from a generator seeded with n. Kinds come in turn, and so do 3 to 16 ranks:

    links 4, links 20   every link 1 to 4 (20) times the cost of the cheapest
    slow node           uneven nodes, joined by links 4 to 20 times slower, one of them 2 to 8 times
                        slower still, its own memory too
    local memory        equal links, but each rank reads its own memory 1 to 10 times slower
    capacities          equal links, and capacities of 0.6 to 1.6 of their mean
    small rank          equal links, and one rank with 0.05 to 0.5 of the others' capacity
    all                 links, memories and capacities at once
"""

from typing import NamedTuple

import numpy as np

from oper.cost.workload import Workload
from oper.topology.latency import Latency
from oper.topology.topology import Topology

KINDS = ("links 4", "links 20", "slow node", "local memory", "capacities", "small rank", "all")
CASES = 200
EXTRA = (0.0, 0.001, 0.01, 0.05, 0.2)
BATCH_SIZE = 65_536
_LINK, _MEMORY = 1 / 80e9, 1 / 1_244e9  # seconds per byte, of a fast link and a fast memory


class Case(NamedTuple):
    """A topology, and what is planned on it."""

    kind: str
    topology: Topology
    workload: Workload
    extra_memory: float


def case(seed: int) -> Case:
    """Case number `seed`."""
    random = np.random.default_rng([7, seed])
    kind = KINDS[seed % len(KINDS)]
    ranks = 3 + seed % 14 if seed < 14 else int(random.integers(3, 17))
    cost = np.full((ranks, ranks), _LINK)
    memory = np.full(ranks, _MEMORY)
    node_of = np.zeros(ranks, dtype=np.int64)
    factor = np.ones(ranks)
    if kind in ("links 4", "links 20", "all"):
        most = {"links 4": 4, "links 20": 20, "all": int(random.choice([4, 20]))}[kind]
        cost *= random.uniform(1, most, (ranks, ranks))
    if kind == "slow node":
        nodes = int(random.integers(2, min(ranks, 5) + 1))
        node_of = np.sort(np.r_[np.arange(nodes), random.integers(0, nodes, ranks - nodes)])
        cost[node_of[:, None] != node_of] *= random.uniform(4, 20)
        slow = node_of == random.integers(nodes)
        slower = random.uniform(2, 8)
        cost[slow[:, None] | slow] *= slower
        memory[slow] *= slower
    if kind in ("local memory", "all"):
        memory *= random.uniform(1, 10, ranks)
    if kind in ("capacities", "all"):
        factor = random.uniform(0.6, 1.6, ranks)
    if kind == "small rank":
        factor[random.integers(ranks)] = random.uniform(0.05, 0.5)
    np.fill_diagonal(cost, memory)
    extra = float(random.choice(EXTRA))
    capacity = None
    if np.ptp(factor):
        # Room for all copies that the extra memory allows, and for the rounding of rows.
        capacity = tuple(((1.001 + extra) * factor / factor.mean()).tolist())
    topology = Topology(
        f"{kind}, {ranks} ranks, seed {seed}",
        tuple(node_of.tolist()),
        cost,
        72e9,
        Latency.of_hops(5e-6),
        capacity=capacity,
    )
    mode = random.choice(["inference", "training"])
    fetch = random.choice(["raw", "distinct"])
    return Case(kind, topology, Workload(str(mode), str(fetch), BATCH_SIZE), extra)  # type: ignore[arg-type]
