"""Swaps of rows: what they keep, that they never make it worse, and how far they get."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.holder_sets import everywhere_set, per_node_sets, single_owner_sets
from oper.cost.objective import evaluate
from oper.cost.read_charges import Charges
from oper.cost.traffic import Direction
from oper.cost.workload import Workload
from oper.planner.row_placement.swaps import SwapSearch
from oper.topology.topology import Topology
from tests.support.planner.instances import make_classes, topologies, workloads, zipf_problem


@given(topologies(), workloads, st.integers(0, 2**32 - 1))
def test_columns_are_what_a_byte_adds_to_each_rank(
    topology: Topology, workload: Workload, seed: int
) -> None:
    sets = single_owner_sets(topology.ranks)
    if not workload.training:
        per_node = per_node_sets(topology, Charges.of(topology).read_seconds)
        sets = sets + per_node + everywhere_set(topology.ranks)
    classes = make_classes([77, 5], [1, 1], workload, topology.ranks)
    counts = np.random.default_rng(seed).integers(0, 5, (2, len(sets)))
    cost = evaluate(topology, workload, sets, classes.sums(counts), np.full(topology.ranks, 1e9))
    directions = classes.traffic(topology, workload).directions(sets)
    seconds = sum((bytes @ counts) @ columns for bytes, columns in directions)
    np.testing.assert_allclose(np.asarray(seconds), cost.rank_seconds, rtol=1e-12)


@given(topologies(), workloads, st.integers(0, 2**32 - 1))
def test_swaps_keep_rows_of_groups_and_classes_and_never_raise_the_maximum(
    topology: Topology, workload: Workload, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    accesses = rng.integers(0, 500, 12).tolist()
    classes = make_classes(
        accesses,
        rng.integers(1, 9, 12).tolist(),
        workload,
        topology.ranks,
        widths=((16, 20), (64, 68)),
        width=rng.integers(0, 2, 12).tolist(),
    )
    sets = single_owner_sets(topology.ranks)
    counts = np.stack([rng.multinomial(n, np.full(len(sets), 1 / len(sets))) for n in classes.rows])
    weight, column = classes.traffic_bytes(workload), Charges.of(topology).set_seconds(sets)
    before = (weight @ counts) @ column
    search = SwapSearch(counts.copy(), (Direction(weight, column),), classes.width, before.copy())
    search.run()
    after = search.counts
    assert after.min() >= 0
    assert (after.sum(axis=1) == classes.rows).all()
    for w in range(2):
        mine = classes.width == w
        assert (after[mine].sum(axis=0) == counts[mine].sum(axis=0)).all()
    np.testing.assert_allclose((weight @ after) @ column, search.seconds, rtol=1e-9)
    assert search.seconds.max() <= before.max() * (1 + 1e-12)


def test_swaps_even_out_homogeneous_ranks_to_the_last_rows() -> None:
    topology = Topology.load("dgx-a100")
    problem = zipf_problem(topology, Workload("inference", "raw", 4096), exponent=0.8)
    classes = problem.classes
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(n, np.full(8, 1 / 8)) for n in classes.rows])
    weight = classes.traffic_bytes(problem.workload)
    column = Charges.of(topology).set_seconds(single_owner_sets(8))
    seconds = (weight @ counts) @ column
    assert seconds.max() / seconds.mean() > 1.001
    exchange = SwapSearch(counts, (Direction(weight, column),), classes.width, seconds)
    exchange.run()
    assert exchange.seconds.max() / exchange.seconds.mean() < 1 + 1e-6


def test_every_row_of_a_swap_must_gain_more_than_its_copies_take() -> None:
    # Each row of rank 0 takes a second there and would take one on rank 1, whose rows take none.
    counts = np.array([[64, 0], [0, 64]])
    for price, swaps in ((0.5, True), (1.2, False)):
        search = SwapSearch(
            counts.copy(),
            (Direction(np.array([1.0, 0.0]), np.eye(2)),),
            np.zeros(2, dtype=np.int64),
            np.array([64.0, 0.0]),
            price=np.full((1, 2, 2), price),
        )
        search.run()
        assert (search.rounds_made > 0) == swaps
        assert np.array_equal(search.counts, counts) != swaps
