"""Tiny pooled problems against every placement there is: no bound above the optimum, and in
training no plan below it.

Each row is on one rank, on all, or on the ranks at one position of each node; what that costs is
written out (test_place_pooled.py), with nothing of the planner's in it. In inference copies may lie
otherwise too, so that the least found is no less than the optimum.
"""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.bounds.certify import certify
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import problem_of
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
