"""Homes and copies of pooled tables, against placements of small problems that are tried one by
one."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.allreduce import allreduce_cost
from oper.cost.holder_sets import cheapest_holder_sets, single_owner_sets
from oper.cost.read_charges import Charges
from oper.cost.vectors_per_bag import VectorsPerBag
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.class_placement.homes import choose_homes
from oper.planner.class_placement.homogeneous_replicas import everywhere_seconds, single_seconds
from oper.planner.class_placement.pooled_copies import (
    choose_copies,
    enough_extra_bytes,
    least_mean_seconds,
    table_of_class,
    vector_seconds,
    without_vectors,
)
from oper.planner.price_plan import price_counts
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.profile import Profile
from oper.tables.bag_lengths import BagLengths
from oper.topology.latency import Latency
from oper.topology.links import NodeMemory
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import relayed
from oper.topology.topology import Topology
from tests.planner.test_place_pooled import M, profiled, topology
from tests.support.examples import examples

_ROWS = (5, 4, 30)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder: Path = tmp_path_factory.mktemp("homes")
    return profiled(folder, 11, _ROWS, 60)


def problem_of(profile: Profile, extra_memory: float = 3.0) -> tuple[Problem, BagLengths]:
    ranks = PooledTopology.of(topology(), 1.0, 0.1, training=True)
    asked = PlanSettings(extra_memory=extra_memory)
    workload = Workload("training", "pooled", 64)
    problem = make_problem(profile, ranks, workload, asked, by_table=True)
    assert profile.bag_lengths is not None
    return problem, profile.bag_lengths


def ranks_of(shape: tuple[int, int], memory: NodeMemory, near: float, far: float) -> Topology:
    node_of = np.repeat(np.arange(shape[0]), shape[1])
    cost = np.where(np.equal.outer(node_of, node_of), near, far)
    np.fill_diagonal(cost, 1e-9)
    hops = Latency.of_hops(1e-12)
    return Topology("t", tuple(node_of.tolist()), cost, 2e7, hops, memory=(memory,) * shape[0])


def mean_seconds(problem: Problem, lengths: BagLengths, copied: np.ndarray) -> float:
    """The least mean of T over the AllReduce methods with copies of these rows of each class, [C],
    and every table's others on one node."""
    classes, single = problem.classes, problem.classes.rows - copied
    near = single_seconds(classes, without_vectors(problem.topology), problem.workload) @ single
    accesses = np.bincount(table_of_class(classes), single * classes.accesses)
    shares = (accesses / np.maximum(lengths.ids_of_tables, 1))[:, None]
    vectors = vector_seconds(problem, lengths) @ VectorsPerBag(lengths).chances(shares)[:, 0]
    return float(near + vectors) + copy_seconds(problem, copied)


def copy_seconds(problem: Problem, copied: np.ndarray) -> float:
    """What copies of these rows of each class take a rank, by the AllReduce that takes least."""
    classes = problem.classes
    if not copied.any():
        return 0.0
    return min(
        float(
            everywhere_seconds(classes, problem.topology, problem.workload, method) @ copied
            + allreduce_cost(problem.topology, method).latency
        )
        for method in ("dense", "bitmap", "allgather")
    )


@examples(40)
@given(data=st.data(), extra=st.sampled_from([0.2, 1.0, 3.0]))
def test_no_copies_are_better_than_the_bound(
    profile: Profile, data: st.DataObject, extra: float
) -> None:
    problem, lengths = problem_of(profile, extra)
    found = choose_copies(problem, lengths, problem.budget_bytes)
    classes, each = problem.classes, (M - 1) * problem.classes.m
    assert each @ found.everywhere <= problem.budget_bytes
    assert mean_seconds(problem, lengths, found.everywhere) == pytest.approx(found.seconds)
    assert copy_seconds(problem, found.everywhere) == pytest.approx(found.copy_seconds, rel=1e-9)
    bound = least_mean_seconds(problem, lengths, problem.budget_bytes)
    assert bound <= found.seconds
    copied = np.array([data.draw(st.integers(0, int(rows))) for rows in classes.rows])
    order = data.draw(st.permutations(range(len(classes))))
    for c in order:  # as many as the budget allows
        over = each @ copied - problem.budget_bytes
        copied[c] -= min(copied[c], max(0, int(np.ceil(over / each[c]))))
    assert mean_seconds(problem, lengths, copied) >= bound * (1 - 1e-12)


def test_with_budget_for_all_the_copies_are_as_good_as_the_bound(profile: Profile) -> None:
    problem, lengths = problem_of(profile)
    found = choose_copies(problem, lengths, problem.budget_bytes)
    bound = least_mean_seconds(problem, lengths, problem.budget_bytes)
    assert found.seconds == pytest.approx(bound)
    for tolerance in (0.01, 0.1, 0.3):
        enough = enough_extra_bytes(problem, lengths, problem.budget_bytes, tolerance)
        assert 0 <= enough <= problem.budget_bytes
        fewer = choose_copies(problem, lengths, enough)
        assert fewer.seconds <= found.seconds * (1 + tolerance) * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_without_copies_the_mean_is_that_of_whole_tables_on_nodes(
    profile: Profile, mode: Literal["training", "inference"]
) -> None:
    ranks = ranks_of((2, 2), "linked", 4e-9, 60e-9)
    given = PooledTopology.of(ranks, 1.0, 0.0, mode == "training")
    workload, asked = Workload(mode, "pooled", 64), PlanSettings(extra_memory=1.0)
    problem = make_problem(profile, given, workload, asked, by_table=True)
    lengths, classes, sets = profile.bag_lengths, problem.classes, single_owner_sets(4)
    assert lengths is not None
    counts = np.zeros((len(classes), 4), dtype=np.int64)
    counts[np.arange(len(classes)), table_of_class(classes)] = classes.rows  # of table t on rank t
    cost = price_counts(problem, sets, counts)
    found = choose_copies(problem, lengths, 0.0)
    assert found.seconds == pytest.approx(float(cost.rank_seconds.mean()), rel=1e-9)


def test_homes_are_as_good_as_whole_tables_can_be(profile: Profile) -> None:
    """All ways to put three tables on two nodes are tried."""
    problem, lengths = problem_of(profile)
    single = problem.classes.rows
    found = choose_homes(problem, lengths, single, np.inf)
    np.testing.assert_allclose(found.shares.sum(axis=1), 1.0)
    classes, nodes = problem.classes, problem.topology.nodes
    mates = np.array(problem.topology.node_of) == 0
    seconds = np.zeros(len(classes))
    for part in classes.traffic(without_vectors(problem.topology), problem.workload).parts:
        seconds += part.bytes * part.charges.owner_seconds[0, mates].mean()
    work = np.bincount(table_of_class(classes), single * seconds)
    chance = VectorsPerBag(lengths).chances(np.ones((len(_ROWS), 1)))[:, 0]
    vectors = vector_seconds(problem, lengths) * nodes / (nodes - 1) * chance
    for number in range(nodes ** len(_ROWS)):
        home = number // nodes ** np.arange(len(_ROWS)) % nodes
        of_nodes = [work[home == node].sum() + vectors[home != node].sum() for node in range(nodes)]
        assert found.seconds <= max(of_nodes) * (1 + 1e-5)


def test_homes_keep_to_the_room_of_nodes(profile: Profile) -> None:
    problem, lengths = problem_of(profile)
    memory = np.bincount(table_of_class(problem.classes), problem.classes.rows * problem.classes.m)
    room = float(memory.sum()) / problem.topology.nodes * 1.05
    found = choose_homes(problem, lengths, problem.classes.rows, room)
    assert (memory @ found.shares <= room * 1.02).all()


@examples(120)
@given(
    data=st.data(),
    shape=st.sampled_from([(2, 2), (3, 1), (3, 2), (4, 2), (2, 3)]),
    memory=st.sampled_from(["linked", "shared"]),
    pooled=st.sampled_from([None, frozenset({"t0", "t2"})]),
    mode=st.sampled_from(["training", "inference"]),
)
def test_no_holders_are_better_than_the_bound(
    profile: Profile,
    data: st.DataObject,
    shape: tuple[int, int],
    memory: NodeMemory,
    pooled: frozenset[str] | None,
    mode: Literal["training", "inference"],
) -> None:
    """Rows with any copies on any ranks, priced as plans are, take the mean rank no less."""
    nodes, ranks = shape[0], shape[0] * shape[1]
    near, far = data.draw(st.sampled_from([(4e-9, 60e-9), (30e-9, 60e-9), (0.5e-9, 60e-9)]))
    on = relayed(ranks_of(shape, memory, near, far), True)
    given = PooledTopology.of(on, 1.0, 0.0, mode == "training", pooled)
    asked = PlanSettings(extra_memory=float(ranks))
    problem = make_problem(profile, given, Workload(mode, "distinct", 64), asked, by_table=True)
    lengths, classes = profile.bag_lengths, problem.classes
    assert lengths is not None
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    copies = random.choice([1, nodes, ranks] if mode == "inference" else [1, ranks], 12)
    if mode == "inference":
        copies[:6] = random.integers(1, ranks + 1, 6)
    holds = np.zeros((len(copies), ranks), dtype=bool)
    for of_set, k in zip(holds, copies, strict=True):
        order = random.permutation(ranks)
        if random.random() < 0.5:  # the nodes in turn
            order = np.arange(ranks).reshape(shape).T.ravel()
            order = (order + random.integers(shape[1])) % ranks
        of_set[order[:k]] = True
    sets = single_owner_sets(ranks) + cheapest_holder_sets(holds, Charges.of(given).read_seconds)
    used = random.choice(len(sets), size=random.integers(1, 5))
    shares = random.dirichlet(np.full(len(used), 0.3), len(classes))
    counts = np.zeros((len(classes), len(sets)), dtype=np.int64)
    for c, rows in enumerate(classes.rows):
        np.add.at(counts[c], used, random.multinomial(rows, shares[c]))
    seconds = price_counts(problem, sets, counts).rank_seconds.mean()
    extra = float(((sets.copies - 1) * classes.m[:, None] * counts).sum())
    assert least_mean_seconds(problem, lengths, extra) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("near", [0.5e-9, 4e-9, 30e-9])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (4, 1)])
def test_no_two_sets_of_holders_are_better_than_the_bound(
    profile: Profile, shape: tuple[int, int], near: float
) -> None:
    """In inference: all rows in any set of holders, and the hotter half and the others in two."""
    ranks = shape[0] * shape[1]
    on = relayed(ranks_of(shape, "linked", near, 60e-9), True)
    given = PooledTopology.of(on, 1.0, 0.0, False)
    asked, workload = PlanSettings(extra_memory=float(ranks)), Workload("inference", "pooled", 64)
    problem = make_problem(profile, given, workload, asked, by_table=True)
    lengths, classes = profile.bag_lengths, problem.classes
    assert lengths is not None
    numbers = range(1, 2**ranks)
    holds = np.array([[number >> rank & 1 for rank in range(ranks)] for number in numbers]) > 0
    sets = cheapest_holder_sets(holds, Charges.of(given).read_seconds)
    hot = classes.expected >= np.median(classes.expected)
    random = np.random.default_rng(0)
    pairs = [(k, k) for k in range(len(sets))]
    pairs += [tuple(random.choice(len(sets), 2)) for _ in range(len(sets))]
    for most, least in pairs:
        counts = np.zeros((len(classes), len(sets)), dtype=np.int64)
        counts[hot, most], counts[~hot, least] = classes.rows[hot], classes.rows[~hot]
        seconds = price_counts(problem, sets, counts).rank_seconds.mean()
        extra = float(((sets.copies - 1) * classes.m[:, None] * counts).sum())
        bound = least_mean_seconds(problem, lengths, extra)
        assert bound <= seconds * (1 + 1e-9), holds[[most, least]]
