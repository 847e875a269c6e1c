"""Plans on links that were measured: nearly as good as on equal links, within all limits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.planning.noise import measured
from oper.base.errors import OperError
from oper.cost.objective import Cost
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.baselines import milp_solver
from oper.planner.compare import compare
from oper.planner.make_plan import make_plan, place_fetched, plan_and_placement
from oper.planner.memory_curve import memory_curve
from oper.planner.price_plan import costs_under, problem_of
from oper.planner.replan.drift import drift
from oper.profiling.profile import Profile
from oper.topology.nearly_alike import with_mean_capacity
from oper.topology.topology import Topology
from scripts.plan_digests import profile as counted
from tests.planner.test_place_pooled import profiled
from tests.planner.test_unequal_ranks import keeps_limits, one_table
from tests.support.commands import fine
from tests.support.examples import examples
from tests.support.planner.gaps import known_gap
from tests.topology.test_nearly_alike import noisy

pytestmark = pytest.mark.usefixtures("small_programmes")

SLOWER = 1.01  # than a plan for the means, at most
PROFILE = counted(seed=3, rows=(700, 300, 60, 1))


def on_true_links(plan: Plan, profile: Profile, topology: Topology) -> Cost:
    """Price a plan for other links on those of `topology`."""
    there = replace(plan, topology=replace(plan.topology, link_cost=topology.link_cost))
    (cost,) = costs_under([there], [problem_of(there, profile)])
    return cost


@examples(12)
@given(
    preset=st.sampled_from(["dgx-a100", "2x2-a100", "4x2-h100", "cpu:3"]),
    amount=st.sampled_from([0.005, 0.02, 0.05]),
    seed=st.integers(0, 1000),
    mode=st.sampled_from(["training", "inference"]),
    fetch=st.sampled_from(["raw", "distinct", "pooled"]),
    extra_memory=st.sampled_from([None, 0.0, 0.02, 0.5]),
    capacity=st.sampled_from([None, None, 1.6]),
    varied=st.sampled_from(["links", "links", "adapters", "memory"]),
)
@example("2x2-a100", 0.01, 1, "training", "pooled", 0.02, None, "links")
@example("2x2-a100", 0.01, 1, "inference", "pooled", 0.5, None, "links")
@example("2x2-a100", 0.05, 1, "training", "distinct", None, None, "memory")
@example("2x2-a100", 0.05, 1, "inference", "pooled", 0.02, None, "adapters")
def test_a_plan_is_as_good_as_one_for_the_means(
    preset: str,
    amount: float,
    seed: int,
    mode: Any,
    fetch: Any,
    extra_memory: float | None,
    capacity: float | None,
    varied: Any,
) -> None:
    if preset == "cpu:3" and varied == "memory":
        varied = "links"  # its ranks have no devices
    topology = measured(Topology.load(preset), amount, capacity, seed, varied)
    workload, asked = Workload(mode, fetch, 512), PlanSettings(extra_memory)
    placed = place_fetched(PROFILE, topology, workload, asked)
    means = make_plan(PROFILE, with_mean_capacity(topology), workload, asked)
    there = on_true_links(means, PROFILE, topology)
    assert placed.cost.objective_seconds <= SLOWER * there.objective_seconds
    assert placed.problem.topology.link_cost.shape == topology.link_cost.shape
    assert keeps_limits(placed)
    bound = placed.certificate.lower_bound_seconds
    assert 0 < bound <= min(placed.cost.objective_seconds, there.objective_seconds)


def test_pooled_tables_keep_their_homes_on_measured_links() -> None:
    equal = Topology.load("2x4-a100")
    workload, asked = Workload("training", "pooled", 4096), PlanSettings(0.005)
    placed = place_fetched(PROFILE, noisy(equal, 0.02), workload, asked)
    on_equal = place_fetched(PROFILE, equal, workload, asked)
    assert placed.step == on_equal.step == "homes"
    assert placed.cost.objective_seconds <= 1.03 * on_equal.cost.objective_seconds
    gaps = known_gap(placed.certificate), known_gap(on_equal.certificate)
    assert 0 <= gaps[0] <= gaps[1] + 0.05


@examples(10)
@given(
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(["training", "inference"]),
    fetch=st.sampled_from(["raw", "distinct"]),
)
def test_small_problems_on_measured_links_are_nearly_solved(
    seed: int, mode: Any, fetch: Any
) -> None:
    random = np.random.default_rng(seed)
    ranks, rows = int(random.integers(2, 4)), int(random.integers(1, 5))
    topology = noisy(Topology.load(f"{ranks}x1-a100"), 0.05, seed)
    counts = random.integers(1, random.choice([4, 50, 3000]), rows)
    asked = PlanSettings(float(random.choice([0, 0.3, 1.0, 3.0])))
    placed = place_fetched(one_table(counts), topology, Workload(mode, fetch, 64), asked)
    problem = placed.problem
    each = np.repeat(np.eye(len(problem.classes)), problem.classes.rows, axis=1)
    limits = (problem.capacity_bytes, problem.budget_bytes)
    sums = problem.classes.sums(each)
    best = milp_solver.solve(sums, topology, problem.workload, *limits, 5, 1e-6)
    assert best.status == "optimal"
    # A placement for the means, at the most: each link is within 5 % of its own.
    assert placed.cost.objective_seconds <= best.objective_seconds * 1.0011 * 1.05 / 0.95
    assert placed.certificate.lower_bound_seconds <= best.objective_seconds * (1 + 1e-6)


@pytest.mark.parametrize("fetch", ["distinct", "pooled"])
@pytest.mark.parametrize("factor", [1.06, 1.2, 2.0])
def test_no_capacity_is_exceeded(fetch: Any, factor: float) -> None:
    random = np.random.default_rng(5)
    capacity = tuple((factor * random.uniform(0.97, 1.03, 4)).tolist())
    topology = replace(noisy(Topology.load("2x2-a100"), 0.02), capacity=capacity)
    placed = place_fetched(PROFILE, topology, Workload("inference", fetch, 512), PlanSettings(0.5))
    assert keeps_limits(placed)
    total = placed.problem.classes.total_bytes
    allowed = np.array(capacity) * total / 4
    assert (placed.cost.memory_bytes <= allowed).all()
    assert placed.problem.topology.capacity == capacity


def test_tables_that_only_the_larger_capacities_hold_are_placed() -> None:
    capacity = (1.15, 1.15, 0.95, 0.95)
    topology = replace(noisy(Topology.load("dgx-a100"), 0.02), capacity=capacity * 2)
    placed = place_fetched(PROFILE, topology, Workload("inference", "raw", 512), PlanSettings(0.0))
    assert keeps_limits(placed)


def test_devices_of_nearly_one_size_count_as_the_smallest() -> None:
    devices = tuple(40_000_000_000 - 100_000_000 * rank for rank in range(4))
    equal = Topology.load("2x2-a100")
    topology = replace(equal, device_memory_bytes=devices)
    workload = Workload("training", "pooled", 512)
    placed = place_fetched(PROFILE, topology, workload, PlanSettings())
    smallest = replace(equal, device_memory_bytes=(min(devices),) * 4)
    expected = place_fetched(PROFILE, smallest, workload, PlanSettings())
    assert placed.cost.objective_seconds <= expected.cost.objective_seconds * (1 + 1e-9)
    assert (placed.problem.capacity_bytes <= expected.problem.capacity_bytes).all()
    full = placed.certificate.full_memory_bound_seconds
    assert full is not None
    assert 0 < full <= placed.cost.objective_seconds


def test_a_log_without_bags_is_refused_on_measured_links_too() -> None:
    without = replace(PROFILE, bag_lengths=None)
    topology = noisy(Topology.load("2x2-a100"), 0.01)
    with pytest.raises(OperError, match="how long bags are"):
        place_fetched(without, topology, Workload("training", "pooled", 512), PlanSettings(0.0))


def test_other_views_of_a_plan_on_measured_links_agree_with_it() -> None:
    """The comparison, the drift from counts that did not change, and the curve over memory."""
    topology = noisy(Topology.load("2x2-a100"), 0.02)
    workload, asked = Workload("training", "pooled", 512), PlanSettings(0.02)
    plan, placed = plan_and_placement(PROFILE, topology, workload, asked)
    seconds = plan.cost.objective_seconds
    compared = compare(PROFILE, topology, workload, asked, ["oper", "row_wise"])
    assert compared.oper is not None
    assert compared.oper.objective_seconds == seconds
    assert compared.lower_bound_seconds <= seconds
    assert drift(plan, PROFILE).worse == pytest.approx(0, abs=2e-3)
    (mine,) = [point for point in memory_curve(placed, topology).points if point.plan]
    assert mine.objective_seconds == seconds


def test_the_checker_confirms_a_plan_on_measured_links(tmp_path: Path) -> None:
    profiled(tmp_path, 7, (600, 500, 400, 550), 400)
    topology = noisy(Topology.load("2x2-a100"), 0.02)
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(topology.to_dict()), encoding="utf-8")
    made = ("--topology", tmp_path / "t.yaml", "--batch-size", 512, "--extra-memory", "20%")
    for mode, fetch in (("training", "pooled"), ("inference", "distinct")):
        plan = tmp_path / mode
        fine("plan", tmp_path / "p", "-o", plan, "--mode", mode, "--fetch", fetch, *made)
        fine("plan", "check", plan, tmp_path / "log.parquet")
    assert "ranks alike within 25%" in fine("topology", "show", tmp_path / "t.yaml")
