"""Everything that prices rows against docs/objective.md, written out in plain loops."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from oper.analysis.row_facts import explain
from oper.base.arrays import Floats, Ints
from oper.base.formatting import format_duration
from oper.cli.plan_commands.row_text import row_sentences
from oper.cost.allreduce import METHODS, Method, allreduce_cost
from oper.cost.holder_sets import (
    HolderSets,
    everywhere_set,
    single_owner_sets,
)
from oper.cost.objective import evaluate
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.baselines import milp_solver
from oper.planner.bounds import hot_rows_bound
from oper.planner.bounds.lagrangian_bound import hot_row
from oper.planner.class_placement import homogeneous_replicas
from oper.planner.lp.pricing import (
    DualPrices,
    everywhere_price,
    everywhere_seconds,
    owner_price,
    pricing_items,
)
from oper.planner.lp.restricted_master import MemoryItems, RestrictedMaster
from oper.planner.make_plan import plan_and_placement
from oper.planner.price_plan import PricedPlan
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.planner.replan.drift import _parts
from oper.planner.replan.replica_changes import mean_seconds
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.links import link_matrix
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology
from tests.support.examples import examples
from tests.support.planner.instances import make_classes, make_problem, topologies, workloads

M_MANY = 1024
seeds = st.integers(0, 2**32 - 1)


def allreduce_latency(topology: Topology, method: Method) -> float:
    """What the runtime's phases take: kernels, waits, exchanges and sums over nodes."""
    if method == "none" or topology.ranks == 1:
        return 0.0
    M, N, takes = topology.ranks, topology.nodes, topology.latency
    gloo = "shared" in topology.memory

    def exchange(peers: int) -> float:
        return takes.other_node + ((M - 1 if gloo else peers) - 1) * takes.message

    kernels, exchanges, sums = {"dense": (4, 0, 1), "bitmap": (5, 1, 1), "allgather": (3, 2, 0)}[
        method
    ]
    seconds = kernels * takes.kernel + (2 * takes.same_node if N < M else 0.0)
    if N == 1:
        return seconds
    rounds = int(np.ceil(np.log2(N))) * (2 * exchange(1) + takes.kernel)
    at_once = 2 * exchange(N - 1) + takes.kernel
    even = len(set(np.bincount(topology.node_of))) == 1
    return seconds + exchanges * exchange(N - 1) + sums * min([at_once, *[rounds] * even])


def allreduce_seconds(
    topology: Topology, method: Method, classes: Classes, replicas: Ints
) -> tuple[float, float]:
    """Latency, and seconds of the rest, for `replicas[c]` rows of class c on all ranks."""
    M, N, bandwidth = topology.ranks, topology.nodes, topology.allreduce_bandwidth
    moving = 0.0
    for c, n in enumerate(replicas.tolist()):
        S, D, U = classes.S[c], classes.D[c], classes.U[c]
        if method == "dense":
            moving += n * 2 * (M - 1) / M * S / bandwidth
        if method == "bitmap":
            moving += n * (2 * (M - 1) / M * S * U + (M / N + N - 1) / 8) / bandwidth
        if method == "allgather":
            moving += n * (M - 1) * (S + 4) * D / bandwidth
    return (allreduce_latency(topology, method) if replicas.any() else 0.0), moving


def written_out(problem: ClassProblem, sets: HolderSets, counts: Ints, method: Method) -> Floats:
    """T [M] of `counts[c, g]` rows of class c in holder set g, without the AllReduce's latency."""
    topology, classes = problem.topology, problem.classes
    M, L, training = topology.ranks, topology.link_cost, problem.workload.training
    node_of, relays = topology.node_of, isinstance(topology, RelayedTopology)
    members = {n: [r for r in range(M) if node_of[r] == n] for n in node_of}
    E, T = np.zeros(M), np.zeros(M)
    C, written = np.zeros((M, M)), np.zeros(M)

    def mapped(r: int, source: int) -> bool:
        return node_of[r] == node_of[source] and topology.memory[node_of[r]] == "shared"

    def move(r: int, source: int, read: float, gradient: float) -> None:
        if source == r or not mapped(r, source):
            E[source] += L[source, source] * read
        E[source] += L[source, source] * gradient
        if source != r:
            C[r, source] += L[r, source] * (read + gradient)

    for c, g in np.argwhere(counts > 0).tolist():
        n, S = counts[c, g], classes.S[c]
        single = sets.holds[g].sum() == 1
        read = n * S * classes.R[c]
        gradient = n * S * classes.D[c] if training and single else 0.0
        asked = set()
        for r in range(M):
            source = int(sets.source[g, r])
            mine = members[node_of[r]]
            if training and not single:
                written[r] += L[r, r] * n * S * classes.U[c]
            if not relays or node_of[source] == node_of[r]:
                move(r, source, read, gradient)
                continue
            relay = mine[members[node_of[source]].index(source) % len(mine)]
            if relay != r:
                move(r, relay, read, gradient)
            if (relay, source) not in asked:
                asked.add((relay, source))
                of_node = n * S * chance_of_node(problem, c, len(mine))
                move(relay, source, of_node, of_node if gradient else 0.0)
    replicas = counts[:, sets.holds.sum(axis=1) > 1].sum(axis=1)
    T += E + C.sum(axis=1) + written
    return T + (allreduce_seconds(topology, method, classes, replicas)[1] if training else 0.0)


def chance_of_node(problem: ClassProblem, c: int, ranks: int) -> float:
    """The chance that any of so many ranks touches a row of class c."""
    if ranks == 1:
        return float(problem.classes.D[c])
    sizes = sorted(set(np.bincount(problem.topology.node_of).tolist()) - {1})
    return float(problem.classes.D_of_node[c, sizes.index(ranks)])


def as_relays_read(
    topology: Topology, source: Ints, holds: NDArray[np.bool_], random: np.random.Generator
) -> Ints:
    """The sources [G, M], but that ranks of a node read in it where it has a copy, and else all
    from one rank."""
    node_of = np.array(topology.node_of)
    for g, node in product(range(len(source)), range(topology.nodes)):
        mine = np.flatnonzero(node_of == node)
        inside = mine[holds[g, mine]]
        one = random.choice(np.flatnonzero(holds[g]))
        source[g, mine] = random.choice(inside, len(mine)) if len(inside) else one
    return source


@st.composite
def placements(draw: st.DrawFn) -> tuple[ClassProblem, HolderSets, Ints, Method]:
    """A problem, holder sets with any ways to read from them, rows in them, and a method."""
    topology, workload = draw(topologies(most_ranks=7)), draw(workloads)
    M, random = topology.ranks, np.random.default_rng(draw(seeds))
    widths = ((64, 68), (16, 20))
    accesses = random.integers(0, 900, 4).tolist()
    classes = make_classes(accesses, [1, 2, 3, 4], workload, M, 1000, widths, [0, 1, 0, 1])
    problem = make_problem(classes, topology, workload, extra_memory=2.0 * M)
    topology, classes = problem.topology, problem.classes
    sets = single_owner_sets(M)
    method: Method = "none"
    if not workload.training:
        holds = random.random((5, M)) < 0.5
        holds[np.arange(5), random.integers(0, M, 5)] = True
        source = [[random.choice(np.flatnonzero(held)) for _ in range(M)] for held in holds]
        any_source = np.array(source).reshape(-1, M)
        if isinstance(topology, RelayedTopology):
            any_source = as_relays_read(topology, any_source, holds, random)
        sets = sets + HolderSets(any_source.astype(np.uint16), holds)
    elif draw(st.booleans()):
        sets, method = sets + everywhere_set(M), draw(st.sampled_from(METHODS[1:]))
    counts = np.stack(
        [random.multinomial(n, np.full(len(sets), 1 / len(sets))) for n in classes.rows]
    )
    return problem, sets, counts, method


def one_row_seconds(problem: ClassProblem, sets: HolderSets, method: Method) -> Floats:
    """T of one row of each class in each holder set, latency left out, [C, G, M]."""
    shape = (len(problem.classes), len(sets))
    seconds = np.zeros((*shape, problem.topology.ranks))
    for c, g in product(*map(range, shape)):
        counts = np.zeros(shape, dtype=np.int64)
        counts[c, g] = 1
        seconds[c, g] = written_out(problem, sets, counts, method)
    return seconds


def close(found: Floats | float, expected: Floats | float) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=0)


@given(placements())
def test_objective_and_drift(drawn: tuple[ClassProblem, HolderSets, Ints, Method]) -> None:
    problem, sets, counts, method = drawn
    topology, workload, classes = problem.topology, problem.workload, problem.classes
    whole = classes.sums(counts)
    given_method = None if method == "none" else method
    cost = evaluate(topology, workload, sets, whole, problem.capacity_bytes, given_method)
    replicas = counts[:, sets.copies > 1].sum(axis=1)
    latency, _ = allreduce_seconds(topology, cost.allreduce_method, classes, replicas)
    expected = written_out(problem, sets, counts, method)
    close(cost.rank_seconds, expected + latency)
    # As drift takes it apart: two tables, by turns of the classes.
    tables = [np.where(np.arange(len(counts))[:, None] % 2 == t, counts, 0) for t in (0, 1)]
    table_sums = [classes.sums(table) for table in tables]
    parts = _parts(problem, PricedPlan(sets, counts, table_sums, cost, counts))
    close(np.array([p.rank_seconds for p in parts]).sum(axis=0), expected)
    if replicas.any() and workload.training:
        chosen = evaluate(topology, workload, sets, whole, problem.capacity_bytes)
        taken = {m: sum(allreduce_seconds(topology, m, classes, replicas)) for m in METHODS[1:]}
        close(taken[chosen.allreduce_method], min(taken.values()))


@given(placements())
def test_exchanges_and_changes_of_replicas(
    drawn: tuple[ClassProblem, HolderSets, Ints, Method],
) -> None:
    problem, sets, _, method = drawn
    charges, classes = Charges.of(problem.topology), problem.classes
    each = one_row_seconds(problem, sets, method)
    traffic = classes.traffic(problem.topology, problem.workload)
    able = sets.copies == 1 if problem.workload.training else np.ones(len(sets), dtype=bool)
    c, g = np.arange(len(classes))[:, None], np.flatnonzero(able)
    close(traffic.set_seconds(c, sets, g), each[:, able])
    close(traffic.set_seconds(c, sets, g, read_by_read=True), each[:, able])
    moved = sum(bytes[:, None, None] * columns for bytes, columns in traffic.directions(sets))
    close(np.asarray(moved)[:, able], each[:, able])
    close(mean_seconds(problem, sets, method), each.mean(axis=2))
    # The aim "link": C of each ordered pair for a byte of S·R.
    M = problem.topology.ranks
    link = charges.set_link_seconds(sets).reshape(-1, M, M)
    relays = isinstance(problem.topology, RelayedTopology)
    for g, r, j in np.ndindex(*link.shape):
        read = r != j and sets.source[g, r] == j
        if not relays:
            assert link[g, r, j] == (problem.topology.link_cost[r, j] if read else 0.0)


@given(placements(), seeds)
def test_programme_and_prices(
    drawn: tuple[ClassProblem, HolderSets, Ints, Method], seed: int
) -> None:
    problem, sets, _, method = drawn
    topology, M = problem.topology, problem.topology.ranks
    rows = pricing_items(problem.classes, topology, problem.workload, method)
    items = MemoryItems(rows, topology, problem.capacity_bytes, problem.budget_bytes)
    master = RestrictedMaster(items, "time")
    each = one_row_seconds(problem, master.holder_sets, method)[master.bucket, master.group]
    limits = master.limits
    used = limits.uses(master.holder_sets, master.bucket, master.group)
    close(used[:, :M] * limits.second, each)

    random = np.random.default_rng(seed)
    prices = DualPrices(random.random(M), np.zeros(M), 0.0)
    K = prices.read_prices(topology).at(rows.ratios)
    each = one_row_seconds(problem, sets, method)
    if rows.training:
        owners = (each @ prices.rank)[:, sets.copies == 1]
        close(owner_price(rows, topology, prices), owners.min(axis=1))
    else:
        readers = np.arange(M)
        per_byte = [K[:, readers, sets.source[g]].sum(axis=1) for g in range(len(sets))]
        close(rows.weight_bytes[:, None] * np.array(per_byte).T, each @ prices.rank)
    if method != "none":
        close(everywhere_price(rows, topology, prices), (each @ prices.rank)[:, -1])
        close(everywhere_seconds(rows, topology), each[:, -1])
    # With a price on links on top, as where even links are the aim.
    pair = random.random((M, M))
    links = DualPrices(prices.rank, prices.capacity, 0.0, pair).read_prices(topology)
    on_top = np.where(np.eye(M, dtype=bool), 0.0, pair * topology.link_cost)
    if not isinstance(topology, RelayedTopology):
        close(links.of_rank, K[0] + on_top)


@given(placements())
def test_replication_rule_and_bounds(
    drawn: tuple[ClassProblem, HolderSets, Ints, Method],
) -> None:
    problem, sets, counts, method = drawn
    topology, workload, classes = problem.topology, problem.workload, problem.classes
    M = topology.ranks
    owners = single_owner_sets(M)
    owned = one_row_seconds(problem, owners, method)
    close(homogeneous_replicas.single_seconds(classes, topology, workload), owned.mean(axis=(1, 2)))
    copied = one_row_seconds(problem, everywhere_set(M), method)[:, 0]
    everywhere = homogeneous_replicas.everywhere_seconds(classes, topology, workload, method)
    close(everywhere, copied.mean(axis=1))

    rows = pricing_items(classes, topology, workload, method)
    items = MemoryItems(rows, topology, problem.capacity_bytes, problem.budget_bytes)
    model = hot_rows_bound._Model([items], [np.array([0])])
    parts = [weight[:, None, None] * seconds for weight, seconds in model.memories[0].owned]
    close(np.sum(parts, axis=0) * model.second, owned)
    for c in range(len(classes)):
        close(rows.traffic(topology).owner_seconds(c), owned[c])
    close(rows.traffic(topology).least_largest_seconds(), owned.max(axis=2).min(axis=1))
    own = owned.diagonal(axis1=1, axis2=2)
    assert (rows.traffic(topology).own_seconds <= own.min(axis=1) * (1 + 1e-12)).all()
    # A plan has rows: none of them takes less than the bound says.
    cost = evaluate(topology, workload, sets, classes.sums(counts), problem.capacity_bytes)
    bound, _ = hot_row(classes, topology, workload, problem.budget_bytes)
    assert cost.objective_seconds >= bound


@given(placements())
@examples(15)
def test_exact_programme(drawn: tuple[ClassProblem, HolderSets, Ints, Method]) -> None:
    """What the solver minimised is what the placement that it found costs."""
    problem, _, _, _ = drawn
    topology, classes = problem.topology, problem.classes
    assume(topology.ranks <= 4)
    sums = classes.sums(np.eye(len(classes)))
    limits = (problem.capacity_bytes, problem.budget_bytes)
    found = milp_solver.solve(sums, topology, problem.workload, *limits, 60, relative_gap=1e-9)
    assert found.status == "optimal"
    assert found.holder_sets is not None
    assert found.bound_seconds == pytest.approx(found.objective_seconds, rel=1e-6)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_explain(mode: str, tmp_path: Path) -> None:
    workload = Workload(mode, "distinct", 64)  # type: ignore[arg-type]
    topology = Topology.load("2x2-a100")
    accesses = (np.arange(50, 0, -1) * 3).astype(np.uint32)
    profile = Profile((Table("a", 50, 16),), 5000, accesses, np.zeros(0, np.uint32), (False,))
    plan, planned = plan_and_placement(profile, topology, workload, PlanSettings(extra_memory=0.0))
    plan.save(tmp_path / "plan")
    classes, M = planned.problem.classes, topology.ranks
    methods: tuple[Method, ...] = METHODS[1:] if workload.training else ("none",)
    owned = one_row_seconds(planned.problem, single_owner_sets(M), "none").mean(axis=(1, 2))
    copied = np.min(
        [
            one_row_seconds(planned.problem, everywhere_set(M), m)[:, 0].mean(axis=1)
            for m in methods
        ],
        axis=0,
    )
    facts = explain(Plan.load(tmp_path / "plan"), "a", 3)
    _, why = row_sentences(facts)
    c = int(np.flatnonzero(classes.accesses == accesses[3])[0])
    assert facts.cost is not None
    assert facts.cost.one_owner_seconds == pytest.approx(owned[c], rel=1e-12)
    assert facts.cost.everywhere_seconds == pytest.approx(copied[c], rel=1e-12)
    said = re.search(r"times a step: (\S+ \S+) of .* with one owner, (\S+ \S+) with", why)
    assert said is not None, why
    assert said.groups() == (format_duration(owned[c]), format_duration(copied[c]))


@given(placements(), seeds)
def test_any_ranks_may_pay(drawn: tuple[ClassProblem, HolderSets, Ints, Method], seed: int) -> None:
    """With payers of its own for each memory and link, T is what those ranks pay."""
    problem, sets, counts, _ = drawn
    topology, M = problem.topology, problem.topology.ranks
    assume(not isinstance(topology, RelayedTopology))
    usual = Charges.of(topology)
    charges = replace(usual, payer=np.random.default_rng(seed).integers(0, M, M * M))
    sums = problem.classes.sums(counts)
    workload = Workload("inference", problem.workload.fetch, problem.workload.batch_size)
    with mock.patch.object(Charges, "of", return_value=charges):
        cost = evaluate(topology, workload, sets, sums, problem.capacity_bytes)
    paid = np.zeros(M)
    for g, weight in enumerate(sums.read_bytes):
        for r, j in enumerate(sets.source[g].tolist()):
            if not topology.shared_pairs[r, j]:
                paid[charges.payer[j * M + j]] += weight * topology.link_cost[j, j]
            if r != j:
                paid[charges.payer[r * M + j]] += weight * topology.link_cost[r, j]
    close(cost.rank_seconds, paid)
    close(cost.rank_seconds, sums.read_bytes @ charges.set_seconds(sets))


def test_entries_are_the_readers_link_and_the_owners_memory() -> None:
    topology = Topology(
        "two", (0, 0), np.array([[1.0, 2.0], [3.0, 4.0]]), 1.0, Latency.of_hops(0.0)
    )
    charges = Charges.of(topology)
    entries = zip(
        charges.reader.tolist(),
        charges.source.tolist(),
        charges.payer[charges.resource].tolist(),
        charges.seconds[charges.resource].tolist(),
        strict=True,
    )
    assert sorted(entries) == [
        (0, 0, 0, 1.0),
        (0, 1, 0, 2.0),
        (0, 1, 1, 4.0),
        (1, 0, 0, 1.0),
        (1, 0, 1, 3.0),
        (1, 1, 1, 4.0),
    ]
    assert Charges.of(topology) is charges


def test_a_thousand_ranks_are_charged_by_their_pairs() -> None:
    node_of = tuple(rank // 8 for rank in range(M_MANY))
    cost = link_matrix(node_of, {"local": 1e-12, "same_node": 4e-12, "other_node": 5e-11})
    topology = Topology("many", node_of, cost, 1e10, Latency.of_hops(5e-6))
    charges = Charges.of(topology)
    assert len(charges.reader) == 2 * M_MANY**2 - M_MANY
    assert len(charges.seconds) == M_MANY**2
    owned = charges.set_seconds(single_owner_sets(M_MANY).take(slice(0, 3)))
    close(owned[1, [0, 1, 8]], np.array([4e-12, M_MANY * 1e-12, 5e-11]))
    K = charges.read_prices(np.full(M_MANY, 1 / M_MANY))
    close(K.sum(axis=0)[:3], owned.mean(axis=1))


def test_one_formula_prices_the_allreduce_row_by_row_and_in_all() -> None:
    topology = Topology.load("dgx-a100")
    classes = make_classes([90, 7], [3, 5], Workload("training", "raw", 64), 8, samples=100)
    counts = np.array([2, 1])
    total = classes.sums(counts[:, None])
    for method in METHODS:
        share = allreduce_cost(topology, method)
        latency, moving = allreduce_seconds(topology, method, classes, counts)
        assert share.row_seconds(classes.row_sums) @ counts == pytest.approx(moving, rel=1e-12)
        whole = share.seconds(total.total(np.array([True])))
        assert whole == pytest.approx(latency + moving, rel=1e-12)
        assert share.seconds(total.total(np.array([False]))) == 0.0
