"""Homes and copies of pooled tables, against placements of small problems that are tried one by
one."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    everywhere_set,
    single_owner_sets,
    trained_node_sets,
)
from oper.cost.read_charges import Charges
from oper.cost.vectors_per_bag import VectorsPerBag
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.class_placement.homes import choose_homes
from oper.planner.class_placement.pooled_copies import (
    Supposed,
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


def mean_seconds(problem: Problem, everywhere: np.ndarray, a_node: np.ndarray) -> float:
    """The mean of T, priced as a plan's, with copies of these rows of each class, [C], on all ranks
    and on each node, and every table's others on one rank."""
    classes, sets = problem.classes, kinds_of_sets(problem)
    counts = np.zeros((len(classes), len(sets)), dtype=np.int64)
    single = classes.rows - everywhere - a_node
    counts[np.arange(len(classes)), table_of_class(classes)] = single
    counts[:, M], counts[:, M + 1] = everywhere, a_node
    return float(price_counts(problem, sets, counts).rank_seconds.mean())


def kinds_of_sets(problem: Problem) -> HolderSets:
    """Single owners, copies on all ranks, and copies on each node."""
    ranks = problem.topology.ranks
    every = single_owner_sets(ranks) + everywhere_set(ranks)
    return every + trained_node_sets(problem.topology)


@examples(40)
@given(data=st.data(), extra=st.sampled_from([0.2, 1.0, 3.0]))
def test_no_copies_are_better_than_the_bound(
    profile: Profile, data: st.DataObject, extra: float
) -> None:
    problem, lengths = problem_of(profile, extra)
    found = choose_copies(problem, lengths, problem.budget_bytes)
    classes, row_bytes = problem.classes, problem.classes.m
    most, nodes = M - 1, problem.topology.nodes - 1
    extra_bytes = row_bytes @ (most * found.everywhere + nodes * found.a_node)
    assert extra_bytes == found.extra_bytes <= problem.budget_bytes
    assert mean_seconds(problem, found.everywhere, found.a_node) == pytest.approx(found.seconds)
    bound = least_mean_seconds(problem, lengths, problem.budget_bytes)
    assert bound <= found.seconds
    copied = np.array([data.draw(st.integers(0, int(rows))) for rows in classes.rows])
    left = classes.rows - copied
    a_node = np.array([data.draw(st.integers(0, int(rows))) for rows in left])
    order = data.draw(st.permutations(range(len(classes))))
    for each, extra_copies in ((copied, most), (a_node, nodes)):  # as many as the budget allows
        for c in order:
            over = row_bytes @ (most * copied + nodes * a_node) - problem.budget_bytes
            each[c] -= min(each[c], max(0, int(np.ceil(over / (extra_copies * row_bytes[c])))))
    assert mean_seconds(problem, copied, a_node) >= bound * (1 - 1e-9)


@pytest.mark.parametrize("extra", [0.05, 0.3, 1.0])
def test_copies_on_nodes_are_chosen_where_memory_is_short(profile: Profile, extra: float) -> None:
    problem, lengths = problem_of(profile, extra)
    given = lengths, problem.budget_bytes
    without = choose_copies(problem, *given, Supposed(a_node=False))
    assert not without.a_node.any()
    found = choose_copies(problem, *given)
    assert found.seconds <= without.seconds
    assert found.a_node.any()
    assert found.seconds < 0.97 * without.seconds


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
    copies = random.choice([1, nodes, ranks], 12)
    copies[:6] = random.integers(1, ranks + 1, 6)
    holds = np.zeros((len(copies), ranks), dtype=bool)
    for of_set, k in zip(holds, copies, strict=True):
        order = random.permutation(ranks)
        if random.random() < 0.5:  # the nodes in turn
            order = np.arange(ranks).reshape(shape).T.ravel()
            order = (order + random.integers(shape[1])) % ranks
        of_set[order[:k]] = True
    sets = single_owner_sets(ranks) + cheapest_holder_sets(holds, Charges.of(given).read_seconds)
    if mode == "training":
        sets = kinds_of_sets(problem)
    used = random.choice(len(sets), size=random.integers(1, 5))
    shares = random.dirichlet(np.full(len(used), 0.3), len(classes))
    counts = np.zeros((len(classes), len(sets)), dtype=np.int64)
    for c, rows in enumerate(classes.rows):
        of_class = used
        if mode == "training" and not np.broadcast_to(classes.pooled, len(classes))[c]:
            of_class = np.where(used > ranks, 0, used)
        np.add.at(counts[c], of_class, random.multinomial(rows, shares[c]))
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
