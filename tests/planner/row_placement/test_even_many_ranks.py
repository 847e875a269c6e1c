"""Many ranks at once: the targets are the best there are, and hot rows cost little more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from oper.base.arrays import Ints
from oper.cost.holder_sets import single_owner_sets
from oper.cost.read_charges import Charges
from oper.cost.traffic import Direction
from oper.cost.workload import Workload
from oper.planner.class_placement.homogeneous import place_by_node
from oper.planner.class_placement.rounding import split_evenly
from oper.planner.problem.classes import Classes
from oper.planner.row_placement.even_many_ranks import even_many_ranks, targets
from oper.planner.row_placement.swaps import SwapSearch
from oper.topology.topology import Topology
from tests.support.planner.instances import make_classes, zipf_counts


@given(
    st.sampled_from([(1, 3), (2, 2), (3, 2), (2, 4), (4, 1)]),
    st.floats(0.1, 4.0),
    st.one_of(st.just(0.0), st.floats(0.05, 2.0)),
    st.integers(0, 2**32 - 1),
)
def test_targets_are_those_of_a_linear_programme(
    size: tuple[int, int], a: float, b: float, seed: int
) -> None:
    nodes, per_node = size
    ranks = nodes * per_node
    rng = np.random.default_rng(seed)
    seconds, movable = rng.uniform(5, 9, ranks), rng.uniform(0, 1, ranks)
    node_of = np.arange(ranks) // per_node
    found = targets(seconds, movable, node_of, a, b)
    # minimise t: seconds + a·δ - b·Δ ≤ t, Σδ = 0, δ ≥ -movable.
    change = a * np.eye(ranks) - b * (node_of[:, None] == node_of)
    best = linprog(
        np.r_[np.zeros(ranks), 1.0],
        A_ub=np.c_[change, -np.ones(ranks)],
        b_ub=-seconds,
        A_eq=[np.r_[np.ones(ranks), 0.0]],
        b_eq=[0.0],
        bounds=[(-most, None) for most in movable] + [(None, None)],
    )
    assert best.status == 0
    assert (found.more >= -movable - 1e-9).all()
    assert abs(found.more.sum()) < 1e-6
    assert (seconds + change @ found.more).max() <= found.seconds + 1e-6
    assert found.seconds == pytest.approx(min(best.fun, seconds.max()), abs=1e-6)


def evened_and_not(
    topology: Topology, counts: Ints, classes: Classes, workload: Workload
) -> list[float]:
    """The largest time over its mean, less 1: after swaps of pairs alone, and after both."""
    traffic = classes.traffic_bytes(workload)
    columns = Charges.of(topology).set_seconds(single_owner_sets(topology.ranks))
    found = []
    for evened in (False, True):
        search = SwapSearch(
            counts.copy(),
            (Direction(traffic, columns),),
            classes.width,
            (traffic @ counts) @ columns,
        )
        if evened:
            even_many_ranks(search, topology)
        search.run()
        assert search.counts.min() >= 0
        assert (search.counts.sum(axis=0) == counts.sum(axis=0)).all()
        assert (search.counts.sum(axis=1) == classes.rows).all()
        np.testing.assert_allclose((traffic @ search.counts) @ columns, search.seconds, rtol=1e-9)
        found.append(float(search.seconds.max() / search.seconds.mean() - 1))
    return found


def test_more_ranks_than_rounds_are_evened_out() -> None:
    topology = Topology.load("64x8-a100")
    workload = Workload("inference", "raw", 512)
    accesses, rows = np.unique(zipf_counts(100_000, 10**7, 0.3), return_counts=True)
    classes = make_classes(accesses.tolist(), rows.tolist(), workload, 512, samples=10**6)
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(n, np.full(512, 1 / 512)) for n in classes.rows])
    alone, both = evened_and_not(topology, counts, classes, workload)
    assert both < 1e-5
    assert both < alone / 10


def test_hot_rows_of_a_node_are_made_up_for_by_its_other_ranks() -> None:
    topology = Topology.load("16x8-a100")
    workload = Workload("training", "raw", 1024 * topology.ranks)
    accesses, rows = np.unique(zipf_counts(60_000, 10**7, 1.0), return_counts=True)
    classes = make_classes(accesses.tolist(), rows.tolist(), workload, 128, samples=10**7)
    traffic = classes.traffic_bytes(workload)
    hot = traffic * 128 > float(traffic @ classes.rows) / 64
    counts = np.zeros((len(classes), 128), dtype=np.int64)
    counts[hot] = place_by_node(classes.rows[hot], traffic[hot], topology, np.zeros(topology.ranks))
    load = traffic @ counts
    counts[~hot] = split_evenly(classes.rows[~hot], np.full(128, 1 / 128), load, traffic[~hot])
    alone, both = evened_and_not(topology, counts, classes, workload)
    assert both < alone
