"""The phases of a step: by hand, and against the simulator, whose batch is what was expected."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.simulator.iteration import phases_of
from benchmarks.planning.simulator.log import Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.placement import Fetch, Placement
from benchmarks.planning.simulator.traffic import count
from oper.cost.allreduce import Method, ReplicaBytes, level_seconds
from oper.cost.holder_sets import HolderSets
from oper.cost.step_time import Amount, Bags, BatchRows, Part, PhaseTime, StepTime, step_time
from oper.cost.workload import Workload
from oper.topology.latency import Latency
from oper.topology.links import LINKED, SHARED, link_matrix
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology
from tests.support.simulator import (
    DIM,
    PLAIN,
    ROW_BYTES,
    STATE_BYTES,
    machines,
    random_log,
    random_placement,
)

ROWS, BATCH = [7, 3], 3
VECTOR = 4 * DIM
FetchName = Literal["raw", "distinct", "pooled"]
NAMES = {"rows": "answers"}  # of phases that the simulator calls otherwise


def topology_of(machine: Machine) -> Topology:
    """The machine as plans have it, without latency."""
    shared = machine.link_bandwidth is None
    memory = 1 / machine.memory_bandwidth
    cost = {
        "local": memory,
        "same_node": memory if machine.link_bandwidth is None else 1 / machine.link_bandwidth,
        "other_node": 1 / machine.adapter_bandwidth,
    }
    nodes = tuple(machine.node_of.tolist())
    return Topology(
        machine.name,
        nodes,
        link_matrix(nodes, cost),
        1.0,
        Latency.of_hops(0.0),
        memory=(SHARED if shared else LINKED,) * machine.nodes,
        cache_bandwidth=machine.cache_bandwidth,
    )


def expected_rows(placement: Placement, log: Log, samples: np.ndarray) -> BatchRows:
    """What is certain of a batch that all ranks have."""
    sets = np.concatenate([part.holder_set for part in placement.parts])
    first = np.cumsum([0, *ROWS])
    ids = [log.bags(t, samples)[0] + first[t] for t in range(len(ROWS))]
    accesses = np.bincount(np.concatenate(ids), minlength=first[-1])

    def amount(rows: np.ndarray) -> Amount:
        of_sets = np.bincount(sets, rows, minlength=len(placement.source)).astype(np.float64)
        return Amount(of_sets, ROW_BYTES * of_sets)

    touched = amount(accesses > 0)
    return BatchRows(
        all=amount(np.ones(first[-1])),
        read=amount(accesses),
        of_rank=touched,
        of_node=touched,
        of_position=touched,
        of_any=touched,
        updates=2 * (ROW_BYTES + STATE_BYTES) * touched.rows,
    )


def vector_ratios(placement: Placement, log: Log, samples: np.ndarray, machine: Machine) -> list:
    """Bytes of the sums of a batch's bags for a byte of the rows that each node has of them."""
    bags, bytes = np.zeros(machine.nodes), np.zeros(machine.nodes)
    for t, part in enumerate(placement.parts):
        ids, bag = log.bags(t, samples)
        sets = part.holder_set[ids]
        alone = placement.holds[sets].sum(axis=1) == 1
        node = machine.node_of[placement.owner[sets]]
        for n in range(machine.nodes):
            there = alone & (node == n)
            bags[n] += VECTOR * len(np.unique(bag[there]))
            bytes[n] += ROW_BYTES * there.sum()
    return np.where(bytes > 0, bags / np.maximum(bytes, 1), 1.0).tolist()


@given(
    st.integers(0, 2**32 - 1),
    machines(),
    st.sampled_from(["raw", "distinct", "pooled"]),
    st.booleans(),
)
def test_a_batch_that_is_certain(
    seed: int, machine: Machine, fetch: FetchName, training: bool
) -> None:
    """All ranks have the same batch: each phase takes what the simulator's busiest resource does.
    But for two: which ranks share an adapter, and bags that read several nodes, are not known."""
    machine = replace(machine, adapters_per_node=machine.ranks_per_node)
    machine = replace(machine, near_hop=0.0, far_hop=0.0, message=0.0, kernel=0.0)
    random = np.random.default_rng(seed)
    log = random_log(random, ROWS, 12)
    mine = random.integers(0, 12, BATCH)
    how = {"raw": Fetch.RAW, "distinct": Fetch.DISTINCT, "pooled": Fetch.POOLED_BY_NODE}[fetch]
    if machine.nodes == 1 and fetch == "pooled":
        return
    nodes = machine.nodes if fetch == "pooled" and training else 1
    placement = random_placement(random, machine.ranks, ROWS, how, nodes)
    traffic = count(placement, log, np.tile(mine, (machine.ranks, 1)), machine, training)
    phases = phases_of(traffic, machine, "dense", training)
    simulated = {phase.name: phase.on(machine) for phase in phases}

    topology = topology_of(machine)
    if fetch == "pooled":
        ratios = np.array(vector_ratios(placement, log, mine, machine))
        topology = PooledTopology.of(topology, ratios, float(ratios.min()), training)
    bags = Bags(len(ROWS) * BATCH, len(ROWS) * BATCH * VECTOR, VECTOR / ROW_BYTES)
    of_all = Part(1, expected_rows(placement, log, mine), bags)
    fetched, pooled = of_all, no_rows(of_all)
    if fetch == "pooled":
        fetched, pooled = pooled, fetched
    found = step_time(
        topology,
        Workload("training" if training else "inference", fetch, machine.ranks * BATCH),
        HolderSets(placement.source.astype(np.uint16), placement.holds),
        fetched,
        pooled,
        "none",
    )
    compared = {NAMES.get(phase.name, phase.name): phase.seconds for phase in found.phases}
    for name, of_simulator in simulated.items():
        if name in ("sums", "add", "spread"):
            continue
        if name in ("sum", "node sums"):  # slots are written too, of 8 bytes
            least = of_simulator.least * (1 - 1e-9)
            assert least <= compared.get(name, 0.0) <= 2 * of_simulator.least, name
            continue
        if name == "pool" and fetch == "pooled":  # no bag reads several nodes
            assert of_simulator.least <= compared[name] * (1 + 1e-9)
            continue
        assert compared.get(name, 0.0) == pytest.approx(of_simulator.least), name


def no_rows(part: Part) -> Part:
    """Tables that are not there, beside those of `part`."""
    return Part(0, BatchRows.of_figures(0 * part.rows.figures), Bags(0.0, 0.0, 1.0))


def test_a_step_by_hand() -> None:
    """Two nodes of two ranks; two rows of 8 bytes, one on rank 0 and one on rank 3, which every
    rank reads three times, with one bag of 8 bytes. Memory moves 1,000 bytes/s, the cache 4,000, a
    link 100 and an adapter 10; a hop takes 1 s in a node and 10 to another, a kernel 0.25 s."""
    latency = Latency(same_node=1.0, other_node=10.0, message=5.0, kernel=0.25)
    topology = replace(topology_of(PLAIN), latency=latency)
    sets = HolderSets(np.array([[0] * 4, [3] * 4], dtype=np.uint16), np.eye(4, dtype=bool)[[0, 3]])
    one, three = Amount(np.ones(2), np.full(2, 8.0)), Amount(np.full(2, 3.0), np.full(2, 24.0))
    rows = BatchRows(one, three, one, one, one, one, updates=np.full(2, 24.0))
    workload = Workload("training", "distinct", 4)
    part = Part(1, rows, Bags(1, 8, 1.0))
    step = step_time(topology, workload, sets, part, no_rows(part), "none")
    found = {phase.name: (phase.wait_seconds, phase.busy_seconds) for phase in step.phases}
    expected = {
        # Rank 0 wants row 1 of rank 3 by its relay, rank 1: 8 bytes over a link, in which time
        # a kernel has not ended.
        "wanted": (1.0, 0.25),
        "ids": (20.0, 8 / 10),
        "serve": (0.0, 0.25),
        "rows": (10.0, 8 / 10),
        # Rank 0 gets row 1 of its relay, rank 1 row 0 of its owner.
        "copies": (1.0, 0.25),
        "pool": (0.0, 0.25),
        "sum": (1.0, 0.25),
        "node sums": (0.0, 0.25),
        "gradients": (20.0, 16 / 10),
        "merge": (1.0, 0.25),
    }
    assert found.keys() == expected.keys()
    for name, taken in expected.items():
        assert found[name] == pytest.approx(taken), name
    assert step.seconds == pytest.approx(sum(map(sum, found.values())))
    parts = (step.memory_seconds, step.link_seconds, step.latency_seconds)
    assert parts == pytest.approx((0.0, 3.2, 54 + 7 * 0.25))


def test_the_parts_of_a_step() -> None:
    phases = (
        PhaseTime("memory", 3.0, 2.0, 1.0, 10.0),
        PhaseTime("links", 2.0, 5.0, 1.0, 20.0),
        PhaseTime("kernels", 0.0, 0.5, 0.75, 0.0),
    )
    step = StepTime(phases)
    parts = (step.memory_seconds, step.link_seconds, step.latency_seconds)
    assert parts == (3.0, 5.0, 30.75)
    assert step.seconds == sum(phase.seconds for phase in phases) == 38.75


def test_an_allreduce_by_levels() -> None:
    """A GB on two nodes of eight: 7/8 of it twice by links of 370 GB/s, and an eighth of it by an
    adapter of 38; on one node by the bus bandwidth. The ring that the objective is charged for
    takes 6.2 ms."""
    one = ReplicaBytes(rows=0.0, all=1e9, of_any=1e9, of_rank=1e9)
    two_nodes, one_node = Topology.load("2x8-h100"), Topology.load("dgx-h100")
    methods: tuple[Method, ...] = ("dense", "bitmap")
    for method in methods:
        taken = level_seconds(two_nodes, method, one)
        assert taken == pytest.approx(2 * 7 / 8 / 370 + 2 / 2 / 8 / 38)
        assert taken == pytest.approx(8.02e-3, rel=1e-3)
        alone = level_seconds(one_node, method, one)
        assert alone == pytest.approx(2 * 7 / 8 / 480)
    gathered = level_seconds(two_nodes, "allgather", one)
    assert gathered == pytest.approx(7 * 2 / 370 + 1 / 38)
