"""Tiny pooled problems against every placement there is: no bound above the optimum, and in
training no plan below it.

Each row is on one rank, on all, or on the ranks at one position of each node; what that costs is
written out (test_place_pooled.py), with nothing of the planner's in it. In inference copies may lie
otherwise too, so that the least found is no less than the optimum.

On ranks whose links differ placements are priced as plans are, on the true links.
"""

from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.cost.holder_sets import (
    everywhere_set,
    per_node_sets,
    single_owner_sets,
    trained_node_sets,
)
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.bounds.certify import certify
from oper.planner.bounds.pooled_bound import pooled_bound
from oper.planner.make_placement import within_limits
from oper.planner.make_plan import make_plan
from oper.planner.place_by_table import Drafts, Way
from oper.planner.price_plan import price_counts, problem_of
from oper.topology.capacity import CapacityError
from scripts.plan_digests import profile as counted
from tests.planner.test_place_pooled import (
    PER_NODE,
    M,
    cost_written_out,
    fits,
    profiled,
    topology,
)

pytestmark = pytest.mark.usefixtures("small_programmes")

QUICK, SEEDS = 6, 2000
# Rows of the tables, and how many problems there are of such: 7 ways of each row.
ROWS: list[tuple[int, ...]] = [(3,), (2, 1), (1, 1), (1, 2), (1, 1, 1), (2,), (4,), (2, 2)]
FEW_ROWS: list[tuple[int, ...]] = [(2, 1), (1, 2), (1, 1, 1), (1, 1)]
BATCH = 64  # no smaller than the log, whose samples then are drawn one by one
ROUNDING = 1e-9
LATENCY = 2e-11  # of all hops of copies' sums, in seconds: what is written out leaves it out


def check(folder: Path, seed: int) -> float | None:
    """In training the plan's objective over the least of all placements."""
    random: Any = np.random.default_rng([30, seed])
    rows = ROWS[seed % 6 if seed % 10 else 6 + seed % 20 // 10]
    mode = str(random.choice(["training", "inference"]))
    extra = float(random.choice([0.0, 0.3, 1.0, 3.0, 6.0]))
    profile = profiled(folder, seed, rows, int(random.integers(2, 60)))
    ranks = topology(str(random.choice(["linked", "shared"])))
    workload = Workload(mode, "pooled", BATCH)  # type: ignore[arg-type]
    plan = make_plan(profile, ranks, workload, PlanSettings(extra_memory=extra))
    # In inference plans are for further samples; here the log's own are read.
    problem = problem_of(plan, profile, as_counted=True)
    bound = certify(problem, 1.0).lower_bound_seconds
    least = np.inf
    for ways in product(range(M + 1 + PER_NODE), repeat=sum(rows)):
        owner = np.split(np.array(ways), np.cumsum(rows)[:-1])
        if fits(profile, owner, problem):
            cost = cost_written_out(profile, BATCH, owner, mode == "training", ranks)
            least = min(least, cost)
    assert bound <= least * (1 + ROUNDING) + LATENCY
    if mode == "inference":
        return None
    assert plan.cost.objective_seconds >= least * (1 - ROUNDING)
    return plan.cost.objective_seconds / least if least > 0 else 1.0


def check_unequal(seed: int) -> float | None:
    """Return the bound of a problem on unequal ranks over the least of its placements; None if a
    row fits on no rank."""
    random: Any = np.random.default_rng([31, seed])
    profile = counted(seed, rows=FEW_ROWS[seed % 4], divide=int(random.choice([1, 100, 5000])))
    ranks = topology(str(random.choice(["linked", "shared"])))
    noise = float(random.choice([0.0, 0.02, 0.3, 1.0]))  # of ten's exponent: "wild"
    cost = ranks.link_cost * 10 ** random.uniform(-noise, noise, ranks.link_cost.shape)
    capacity = tuple(random.uniform(1.0, 4.0, M).tolist()) if random.random() < 0.5 else None
    ranks = replace(ranks, link_cost=cost, capacity=capacity)
    mode = str(random.choice(["training", "inference"]))
    workload = Workload(mode, "pooled", BATCH)  # type: ignore[arg-type]
    asked = PlanSettings(float(random.choice([0.0, 0.3, 1.0, 3.0, 6.0])))
    pooled = frozenset(table.name for table in profile.tables)
    try:
        problem = Drafts(profile, ranks, asked).problem(Way(pooled, workload))
    except CapacityError:
        return None
    charges = Charges.of(problem.topology)
    sets = single_owner_sets(M) + everywhere_set(M)
    if workload.training:
        sets += trained_node_sets(ranks)
    else:
        sets += per_node_sets(ranks, charges.read_seconds)
    # Rows of a class are interchangeable.
    ways = [
        list(combinations_with_replacement(range(len(sets)), rows))
        for rows in problem.classes.rows.tolist()
    ]
    bound, least = pooled_bound(problem), np.inf
    for chosen in product(*ways):
        counts = np.stack([np.bincount(of_class, minlength=len(sets)) for of_class in chosen])
        placed = price_counts(problem, sets, counts)
        if within_limits(problem, placed):
            least = min(least, placed.objective_seconds)
    assert bound <= least * (1 + ROUNDING)
    return float(bound / least)


@pytest.mark.parametrize("seed", [1, 3])
def test_no_bound_of_unequal_ranks_is_above_the_optimum(seed: int) -> None:
    assert (check_unequal(seed) or 0.0) > 0


@pytest.mark.slow
def test_of_many_problems_on_unequal_ranks_no_bound_is_above_the_optimum() -> None:
    found = [check_unequal(seed) for seed in range(SEEDS // 4)]
    ratios = np.array([ratio for ratio in found if ratio is not None])
    assert len(ratios) >= 0.9 * len(found)
    print(f"bound over the optimum: median {np.median(ratios):.3f}, least {ratios.min():.3f}")


@pytest.mark.parametrize("seed", range(QUICK))
def test_no_bound_is_above_the_optimum(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


@pytest.mark.slow
def test_of_many_tiny_problems_no_bound_is_above_the_optimum(tmp_path: Path) -> None:
    found = [check(tmp_path, seed) for seed in range(QUICK, SEEDS)]
    ratios = np.array([ratio for ratio in found if ratio is not None])
    assert len(ratios) >= 900
    print(f"of {len(ratios)} plans above the optimum by 1 % and more: {(ratios > 1.01).mean():.1%}")
    print(f"median {np.median(ratios):.3f}, the worst {ratios.max():.3f}")
