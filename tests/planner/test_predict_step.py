"""What a step is predicted from: rows expected of batches, against batches that are drawn; and what
a plan states of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import oper
from oper.plan.plan_parts import plans_of_memories
from oper.plan.row_locator import RowLocator
from oper.planner.predict_step import bags_of_rank, predict_step, rows_of_classes, touched_together
from oper.planner.price_plan import problem_of
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.problem import make_problem
from oper.profiling.profile import Profile
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.planner.profiles import make_profile

BOTH = np.array([True, True])  # tables

SAMPLES, RANKS, NODES, BATCH = 600, 6, 2, 20


def log_and_profile() -> tuple[np.ndarray, Profile]:
    """A table of 200 rows, one id a sample."""
    random = np.random.default_rng(5)
    ids = (200 ** random.random(SAMPLES)).astype(np.int64) - 1
    profile = Profile(
        tables=(Table("t", 200, 8, features=("f",)),),
        samples=SAMPLES,
        accesses=np.bincount(ids, minlength=200).astype(np.uint32),
        samples_with_row=np.zeros(0, dtype=np.uint32),
        bagged=(False,),
        distinct=None,
        source={},
    )
    return ids, profile


def drawn_rows(ids: np.ndarray, batches: int, again: bool) -> dict[str, float]:
    """Distinct rows of a rank, of a node, of the ranks at one position, and of all: means."""
    random = np.random.default_rng(6)
    found = {"of_rank": 0.0, "of_node": 0.0, "of_position": 0.0, "of_any": 0.0}
    for _ in range(batches):
        size = RANKS * BATCH
        given = random.integers(SAMPLES, size=size) if again else random.permutation(SAMPLES)
        read = ids[given[:size]].reshape(NODES, RANKS // NODES, BATCH)
        found["of_rank"] += len(np.unique(read[0, 0]))
        found["of_node"] += len(np.unique(read[0]))
        found["of_position"] += len(np.unique(read[:, 0]))
        found["of_any"] += len(np.unique(read))
    return {name: count / batches for name, count in found.items()}


def test_rows_of_a_batch_are_expected() -> None:
    """Each within 1.5 % of the mean of 2,000 batches, whose samples are not drawn again."""
    ids, profile = log_and_profile()
    topology = Topology.load(f"{NODES}x{RANKS // NODES}-h100")
    workload = oper.Workload("training", "distinct", RANKS * BATCH)
    problem = make_problem(profile, topology, workload, oper.PlanSettings())
    rows = rows_of_classes(problem)
    for name, mean in drawn_rows(ids, 2000, again=False).items():
        expected = float(getattr(rows, name).rows @ problem.classes.rows)
        assert expected == pytest.approx(mean, rel=0.015), name
    assert float(rows.read.rows @ problem.classes.rows) == pytest.approx(BATCH)
    np.testing.assert_allclose(rows.read.bytes, 32 * rows.read.rows)


def test_rows_of_several_ranks_are_drawn_together() -> None:
    """Of samples that may be drawn again, 1 - (1 - D)^k; of a part of the log, as of k times as
    many samples."""
    D = np.array([0.0, 0.1, 1.0])
    often = touched_together(D, 3, drawn=100, ranks=8, samples=100)
    np.testing.assert_allclose(often, [0, 1 - 0.9**3, 1])
    single = touched_together(np.array([0.01]), 8, drawn=1, ranks=8, samples=100)
    np.testing.assert_allclose(single, [0.08])  # a row of one sample, and 8 of 100 are drawn


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_plan_states_its_step(tmp_path: Path, mode: str, fetch: str) -> None:
    """It is kept in the file; and of rows that are striped nearly what it is row by row."""
    profile = make_profile(3, rows=(4000, 30, 900), bags=False)
    workload = oper.Workload(mode, fetch, 256)  # type: ignore[arg-type]
    plan = oper.make_plan(profile, "2x2-h100", workload, oper.PlanSettings(extra_memory=0.05))
    plan.save(tmp_path / "plan")
    assert oper.Plan.load(tmp_path / "plan").step_time == plan.step_time
    assert plan.step_time is not None
    (part,) = plans_of_memories(plan)
    problem = problem_of(part, profile)
    locator = RowLocator(part)
    counts = locator.by_holder_set(locator.count(ClassFinder(profile, problem.classes)))
    exact = predict_step(problem, locator.holder_sets, counts, plan.allreduce_method)
    assert [phase.name for phase in exact.phases] == [phase.name for phase in plan.step_time.phases]
    for one, other in zip(exact.phases, plan.step_time.phases, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=0.02), one.name


def test_plans_without_a_step(tmp_path: Path) -> None:
    profile = make_profile(3)
    plan = oper.make_plan(profile, "2x2-h100", oper.Workload("training", batch_size=64))
    assert plan.step_time is not None
    assert plan.to_json()["step_time"]["seconds"] == plan.step_time.seconds
    replace(plan, step_time=None).save(tmp_path / "without")
    assert oper.Plan.load(tmp_path / "without").step_time is None


def test_bags_of_a_rank() -> None:
    """Of features, or as they were counted: two tables of 16 and 8 values."""
    profile = make_profile(3, rows=(40, 3), bags=False)
    topology = Topology.load("2x2-h100")
    workload = oper.Workload("training", "distinct", 64)
    bags = bags_of_rank(make_problem(profile, topology, workload, oper.PlanSettings()), BOTH)
    assert (bags.number, bags.output_bytes) == (32, 16 * 4 * (16 + 8))
    assert bags.value_ratio == 1.0
    pairs = np.array([[0, 1, 500], [0, 4, 500], [1, 2, 250]])
    counted = BagLengths.of_pairs(pairs, np.array([600, 300]))
    profile.bag_lengths = counted
    bags = bags_of_rank(make_problem(profile, topology, workload, oper.PlanSettings()), BOTH)
    assert bags.number == pytest.approx(16 * 1.25)
    assert bags.output_bytes == pytest.approx(4 * 16 * (16 + 8 * 0.25))
