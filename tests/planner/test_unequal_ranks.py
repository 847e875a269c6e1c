"""Plans where ranks differ: limits kept in every mode, small gaps, small problems solved."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.planning.random_topologies import case
from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.baselines import milp_solver
from oper.planner.class_placement.heterogeneous import place_on_heterogeneous
from oper.planner.lp.pricing import DualPrices, cheapest, pricing_items
from oper.planner.make_placement import (
    InfeasibleError,
    Planned,
    check_limits,
    make_placement,
    within_limits,
)
from oper.planner.problem.problem import make_problem
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.capacity import CapacityError
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.examples import at_least, examples
from tests.support.planner.gaps import known_gap
from tests.support.planner.instances import zipf_counts, zipf_problem


def one_table(counts: np.ndarray) -> Profile:
    none = np.zeros(0, dtype=np.uint32)
    samples = max(int(counts.sum()), 1)
    table = Table("t", len(counts), dim=16)
    return Profile((table,), samples, counts.astype(np.uint32), none, (False,))


def keeps_limits(planned: Planned) -> bool:
    cost, problem = planned.cost, planned.problem
    return cost.feasible and cost.extra_bytes <= problem.budget_bytes * (1 + 1e-9)


# Among them are drafts that exceed a capacity by a few rows, uneven nodes, budgets of a few rows,
# of which a part pays for some copies of a row alone, and rows that are a tenth of a rank's time.
@pytest.mark.parametrize("seed", [2, 14, 15, 22, 29, 37, 46, 49, 50])
def test_plans_on_unequal_ranks_are_near_the_bound(seed: int) -> None:
    made = case(seed)
    planned = make_placement(
        one_table(zipf_counts(20_000, 400_000)),
        made.topology,
        made.workload,
        PlanSettings(made.extra_memory),
    )
    assert keeps_limits(planned)
    assert 0 <= known_gap(planned.certificate) <= 2.5e-3


def test_no_row_is_kept_whole_where_all_classes_have_many() -> None:
    counts = np.repeat([3, 2], 300)
    made = case(2)
    problem = make_problem(one_table(counts), made.topology, made.workload, PlanSettings(0.2))
    placed = place_on_heterogeneous(problem, 1.0, whole=True)
    assert placed.counts.sum() == len(counts)


@pytest.mark.parametrize("seed", [3, 8, 9, 14, 23, 26, 46])
def test_even_links_keep_capacities_and_extra_memory(seed: int) -> None:
    made = case(seed)
    planned = make_placement(
        one_table(zipf_counts(20_000, 400_000)),
        made.topology,
        made.workload,
        PlanSettings(made.extra_memory, balance="link"),
    )
    assert keeps_limits(planned)
    assert known_gap(planned.certificate) >= 0


@pytest.mark.parametrize("topology", ["2x4-a100", "4x4-a100"])
@pytest.mark.parametrize("extra_memory", [3.0, 6.9, 14.0])
def test_even_links_promote_no_more_rows_than_the_extra_memory_holds(
    topology: str, extra_memory: float
) -> None:
    planned = make_placement(
        one_table(zipf_counts(20_000, 400_000)),
        Topology.load(topology),
        Workload("inference", "distinct", 4096),
        PlanSettings(extra_memory, balance="link"),
    )
    assert keeps_limits(planned)
    assert known_gap(planned.certificate) >= 0


@at_least(25)
@examples(25)
@given(st.integers(0, 2**32 - 1))
def test_small_problems_on_wildly_unequal_links_are_solved(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, rows = int(random.integers(2, 4)), int(random.integers(1, 5))
    cost = 10 ** random.uniform(0, 3, (ranks, ranks)) / 80e9
    topology = Topology("wild", (0,) * ranks, cost, 72e9, Latency.of_hops(5e-6))
    counts = random.integers(0, random.choice([3, 50, 3000]), rows)
    mode, fetch = random.choice(["training", "inference"]), random.choice(["raw", "distinct"])
    workload = Workload(str(mode), str(fetch), 64)  # type: ignore[arg-type]
    asked = PlanSettings(float(random.choice([0, 0.3, 1.0, 3.0])))
    planned = make_placement(one_table(counts), topology, workload, asked)
    problem = planned.problem
    each = np.repeat(np.eye(len(problem.classes)), problem.classes.rows, axis=1)
    limits = (problem.capacity_bytes, problem.budget_bytes)
    best = milp_solver.solve(problem.classes.sums(each), topology, workload, *limits, 5, 1e-6)
    assume(best.status == "optimal")
    assert planned.cost.objective_seconds <= best.objective_seconds * 1.0011
    assert planned.certificate.lower_bound_seconds <= best.objective_seconds * (1 + 1e-6)
    assert 0 <= known_gap(planned.certificate) <= 1.1e-3


@pytest.mark.parametrize("node_of", [(0,) * 9 + (2,) * 9, (7,) * 6 + (3,) * 12])
def test_nodes_may_have_any_numbers(node_of: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    cost = random.uniform(1, 4, (18, 18)) / 80e9
    topology = Topology("gaps", node_of, cost, 72e9, Latency.of_hops(5e-6))
    same = Topology(
        "gaps",
        tuple(sorted(set(node_of)).index(n) for n in node_of),
        cost,
        72e9,
        Latency.of_hops(5e-6),
    )
    # The relaxed price of many ranks goes node by node.
    workload = Workload("inference", "raw", 4096)
    items = pricing_items(zipf_problem(same, workload).classes, same, workload, "none")
    prices = DualPrices(random.uniform(0, 1, 18), random.uniform(0, 1e-9, 18), 1e-9)
    assert (cheapest(items, topology, prices) == cheapest(items, same, prices)).all()


def test_limits_that_are_exceeded_are_an_error_that_says_which(monkeypatch) -> None:
    profile, workload = one_table(zipf_counts(300, 6000)), Workload("inference", "raw", 64)
    planned = make_placement(profile, Topology.load("cpu:4"), workload, PlanSettings())
    check_limits(planned.problem, planned.cost)
    over = replace(planned.cost, capacity_bytes=planned.cost.memory_bytes - np.array([0, 0, 7, 0]))
    assert not within_limits(planned.problem, over)
    planned.problem.capacity_bytes[:] = over.capacity_bytes
    with pytest.raises(InfeasibleError, match=r"rank 2 would hold .* 7 too few .*raise the cap"):
        check_limits(planned.problem, over)
    with pytest.raises(CapacityError):
        check_limits(planned.problem, over)
    assert issubclass(InfeasibleError, OperError)
    more = replace(
        planned.cost,
        capacity_bytes=planned.cost.memory_bytes,
        extra_bytes=planned.problem.budget_bytes + 68,
    )
    with pytest.raises(InfeasibleError, match=r"extra memory: .*bytes of extra copies") as raised:
        check_limits(planned.problem, more)
    assert not isinstance(raised.value, CapacityError)
