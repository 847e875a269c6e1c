"""Plans for ranks that share memory: no copies that save nothing, and ties that are broken."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.checker.check import check
from oper.cost.holder_sets import single_owner_sets
from oper.cost.traffic import main_direction
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_placement import Planned, make_placement
from oper.planner.make_plan import make_plan
from oper.planner.row_placement.row_placement import even_rows_served
from oper.planner.row_placement.swaps import SwapSearch
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.links import SHARED, link_matrix
from oper.topology.topology import Topology
from tests.support.examples import examples
from tests.support.planner.gaps import known_gap
from tests.support.planner.instances import make_classes, topologies, zipf_counts


def hosts(nodes: int, ranks_per_node: int, **changes: object) -> Topology:
    """Hosts whose ranks share memory, links between them eight times slower."""
    node_of = [rank // ranks_per_node for rank in range(nodes * ranks_per_node)]
    cost = link_matrix(node_of, {"local": 1 / 8e9, "same_node": 1 / 8e9, "other_node": 1 / 1e9})
    topology = Topology(
        "hosts", tuple(node_of), cost, 2e9, Latency.of_hops(5e-6), memory=(SHARED,) * nodes
    )
    return replace(topology, **changes)  # type: ignore[arg-type]


def zipf_profile(rows: int = 4000) -> Profile:
    """Two tables of different widths, one id a sample."""
    random = np.random.default_rng(0)
    counts = [random.permutation(zipf_counts(n, 20 * n)) for n in (rows, rows // 3)]
    tables = (Table("a", rows, 16), Table("b", rows // 3, 64))
    accesses = np.concatenate(counts).astype(np.uint32)
    samples = int(max(part.sum() for part in counts))
    return Profile(tables, samples, accesses, np.zeros(0, np.uint32), (False, False))


def planned(topology: Topology, mode: str, extra_memory: float, fetch: str = "raw") -> Planned:
    workload = Workload(mode, fetch, 4096)  # type: ignore[arg-type]
    return make_placement(
        zipf_profile(), topology, workload, PlanSettings(extra_memory=extra_memory)
    )


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_one_host_has_no_copies_and_even_ranks(mode: str, fetch: str, ranks: int) -> None:
    made = planned(Topology.load(f"cpu:{ranks}"), mode, 0.5, fetch)
    cost = made.cost
    assert cost.extra_bytes == 0
    assert known_gap(made.certificate) < 1e-5
    dob = cost.dob
    assert dob.lookups == cost.lookups.min() / cost.lookups.max()
    # Training swaps rows of equal gradients alone, of which a rank may have none.
    few = mode == "training" and fetch == "raw" and ranks == 8
    assert (dob.lookups or 0.0) > (0.3 if few else 0.94)
    assert (dob.memory or 0.0) > 0.98
    # What a rank takes is what it reads itself: its own accesses, wherever the rows are.
    classes, L = made.problem.classes, made.problem.topology.link_cost[0, 0]
    reads = L * float(classes.rows @ (classes.S * classes.R))
    np.testing.assert_allclose(cost.lookup_seconds + cost.link_seconds.sum(axis=1), reads)


def test_reads_of_linked_ranks_are_served() -> None:
    """The same links, with owners that serve: copies pay there."""
    linked = replace(Topology.load("cpu:4"), memory=())
    made = planned(linked, "inference", 0.05)
    assert made.cost.extra_bytes > 0
    shared = planned(Topology.load("cpu:4"), "inference", 0.05)
    assert made.cost.objective_seconds > shared.cost.objective_seconds


def test_several_hosts_have_one_copy_each() -> None:
    made = planned(hosts(2, 3), "inference", 4.0)
    sets, counts = made.row_placement.holder_sets, made.row_placement.counts
    used = sets.holds[counts.any(axis=0)]
    assert (used[:, :3].sum(axis=1) <= 1).all()
    assert (used[:, 3:].sum(axis=1) <= 1).all()
    assert made.cost.extra_bytes > 0
    assert known_gap(made.certificate) < 1e-3


def test_the_balance_of_lookups_is_of_what_the_objective_has() -> None:
    """Of several hosts E has reads of other hosts, and nothing evens out the rows served."""
    made = planned(hosts(2, 3), "inference", 0.0)
    E = made.cost.lookup_seconds
    assert made.cost.dob.lookups == E.min() / E.max()
    assert E.min() / E.max() != made.cost.lookups.min() / made.cost.lookups.max()


def test_a_cheap_allreduce_still_pays_in_training() -> None:
    """Replicas can be had on one host, by an AllReduce that costs next to nothing."""
    cheap = replace(
        Topology.load("cpu:4"), allreduce_bandwidth=1e15, latency=Latency.of_hops(1e-12)
    )
    made = planned(cheap, "training", 0.05)
    assert made.cost.extra_bytes > 0
    assert made.cost.allreduce_method != "none"
    assert known_gap(made.certificate) < 1e-3


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize(
    "topology",
    [
        Topology.load("cpu:3"),
        hosts(2, 2),
        hosts(2, 2, memory=("shared", "linked")),
        hosts(1, 3, link_cost=np.array([[1, 2, 3], [2, 1, 1], [3, 1, 2]]) / 8e9),
    ],
    ids=["cpu:3", "hosts", "one shared", "per pair"],
)
def test_plans_are_near_their_bound_and_pass_the_check(
    topology: Topology, mode: str, tmp_path: Path
) -> None:
    workload = Workload(mode, "raw", 4096)  # type: ignore[arg-type]
    profile = zipf_profile(900)
    made = make_plan(profile, topology, workload, PlanSettings(extra_memory=0.05))
    made.save(tmp_path / "plan")
    assert made.certificate is not None
    assert known_gap(made.certificate) < 2e-3
    plan = Plan.load(tmp_path / "plan")
    assert plan.topology.memory == topology.memory
    assert not [finding for finding in check(tmp_path / "plan") if finding.wrong]


@given(topologies(most_ranks=6), st.integers(0, 2**32 - 1))
@examples(30)
def test_swaps_keep_the_time_of_reads_and_gradients(topology: Topology, seed: int) -> None:
    random, workload = np.random.default_rng(seed), Workload("training", "raw", 64)
    accesses = random.integers(0, 900, 12).tolist()
    classes = make_classes(accesses, [3] * 12, workload, topology.ranks)
    sets = single_owner_sets(topology.ranks)
    counts = np.stack(
        [random.multinomial(n, np.full(len(sets), 1 / len(sets))) for n in classes.rows]
    )
    directions = classes.traffic(topology, workload).directions(sets)

    def seconds(counts: np.ndarray) -> np.ndarray:
        return np.sum([(bytes @ counts) @ columns for bytes, columns in directions], axis=0)

    before = seconds(counts)
    search = SwapSearch(counts.copy(), directions, classes.width, before.copy())
    search.run()
    np.testing.assert_allclose(seconds(search.counts), search.seconds, rtol=1e-9)
    assert search.seconds.max() <= before.max() * (1 + 1e-12)


def one_host(link_over_own: float) -> Topology:
    """A host of 4 ranks; rows of another rank cost `link_over_own` times as much as one's own."""
    cost = np.full((4, 4), link_over_own / 8e9)
    np.fill_diagonal(cost, 1 / 8e9)
    return hosts(1, 4, link_cost=cost)


# From 1 on, where reads cost the same everywhere, over the number of ranks, where gradients do.
LINKS_OVER_OWN = [1.0, 2.0, 3.9, 4.0, 4.1, 8.0]


@pytest.mark.parametrize("link_over_own", LINKS_OVER_OWN)
def test_swaps_even_out_the_time_of_ranks(link_over_own: float) -> None:
    topology, workload = one_host(link_over_own), Workload("training", "raw", 4096)
    accesses = [*range(900, 50, -10), 3, 2, 1]
    classes = make_classes(accesses, [1] * 85 + [50, 80, 90], workload, 4, samples=10_000)
    random = np.random.default_rng(3)
    counts = np.stack([random.multinomial(n, [0.4, 0.3, 0.2, 0.1]) for n in classes.rows])
    directions = classes.traffic(topology, workload).directions(single_owner_sets(4))
    seconds = np.sum([(bytes @ counts) @ columns for bytes, columns in directions], axis=0)
    before = np.ptp(seconds)
    search = SwapSearch(counts, directions, classes.width, seconds)
    search.run()
    assert np.ptp(search.seconds) < 1e-2 * before


@pytest.mark.parametrize("link_over_own", LINKS_OVER_OWN)
def test_one_direction_is_exact_on_one_host(link_over_own: float) -> None:
    """There reads and gradients move T the same way."""
    topology, workload = one_host(link_over_own), Workload("training", "raw", 64)
    classes = make_classes([900, 30, 4], [1, 2, 3], workload, 4)
    directions = classes.traffic(topology, workload).directions(single_owner_sets(4))
    assert len(directions) == 2
    bytes, columns = main_direction(directions)
    for g in range(4):
        moved = sum(b[:, None] * (c[g] - c[0]) for b, c in directions)
        np.testing.assert_allclose(bytes[:, None] * (columns[g] - columns[0]), moved, atol=1e-20)


def test_where_gradients_cost_the_same_everywhere_reads_say_the_direction() -> None:
    """A rank's own gradient takes twice its link's time: no move of a row changes that part."""
    links = np.array([[1e-9, 2e-9], [2e-9, 1e-9]])
    topology = Topology("x", (0, 0), links, 1e9, Latency.of_hops(1e-6), memory=("shared",))
    workload = Workload("training", "raw", 64)
    classes = make_classes([900, 30, 4], [1, 2, 3], workload, 2)
    directions = classes.traffic(topology, workload).directions(single_owner_sets(2))
    assert np.ptp(directions[-1].columns) == 0  # or this tests nothing
    assert np.ptp(main_direction(directions).columns) > 0


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_rows_served_are_evened_out_where_time_stays(mode: str) -> None:
    """Hot rows are touched in every batch: their gradients cost the same, their reads do not."""
    topology, workload = hosts(1, 4), Workload(mode, "raw", 4096)  # type: ignore[arg-type]
    accesses = [*range(9000, 500, -100), 3, 2, 1]
    classes = make_classes(accesses, [1] * 85 + [50, 80, 90], workload, 4, samples=10_000)
    sets = single_owner_sets(4)
    random = np.random.default_rng(3)
    counts = np.stack([random.multinomial(n, [0.4, 0.3, 0.2, 0.1]) for n in classes.rows])
    directions = classes.traffic(topology, workload).directions(sets)

    def seconds(counts: np.ndarray) -> np.ndarray:
        return np.sum([(bytes @ counts) @ columns for bytes, columns in directions], axis=0)

    after = counts.copy()
    served = 4 * (classes.R @ counts)
    assert even_rows_served(classes, sets, directions, after, served) > 0
    np.testing.assert_allclose(4 * (classes.R @ after), served)
    np.testing.assert_allclose(seconds(after), seconds(counts), rtol=1e-8)
    assert (after.sum(axis=0) == counts.sum(axis=0)).all()
    assert (after.sum(axis=1) == classes.rows).all()
    before = classes.R @ counts
    assert served.max() / served.mean() - 1 < (before.max() / before.mean() - 1) / 3
    # Elsewhere a read's time depends on where the row is.
    linked = classes.traffic(replace(topology, memory=()), workload).directions(sets)
    assert even_rows_served(classes, sets, linked, after, served) == 0
