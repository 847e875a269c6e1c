"""The step of a plan if a tenth of the reads goes to rows that its log never read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from oper.analysis.wording import unread_sentence
from oper.cost.workload import Fetch, Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import predict_priced, priced_under, problem_of
from oper.planner.unread_reads import UNREAD_SHARE, with_unread_reads
from oper.profiling.profile import Profile, with_held_out
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.examples import examples
from tests.support.planner.drifting import planned, seeds

ROWS, SAMPLES = 400, 1000
MODES = ("training", "inference")


def profile(read: int, reads: int = 50) -> Profile:
    """Return the counts of a table whose first rows were read equally often, and of one that was
    read whole."""
    counts = np.where(np.arange(ROWS) < read, reads, 0)
    accesses = np.concatenate([counts, np.full(8, reads)]).astype(np.uint32)
    tables = (Table("t", ROWS, dim=16), Table("all", 8, dim=16))
    return Profile(tables, SAMPLES, accesses, np.zeros(0, np.uint32), (False, False))


@given(seeds)
@examples(20)
def test_each_table_keeps_its_reads(seed: int) -> None:
    """Tables with unread rows give a tenth of their reads to these; other tables do not change."""
    plan, (counts, _) = planned(seed)
    problem = problem_of(plan, counts)
    classes = problem.classes
    found = with_unread_reads(problem, UNREAD_SHARE)
    unread = classes.accesses == 0
    total = classes.rows @ classes.expected
    assert np.isclose(found.rows @ found.expected, total)
    has_unread = [
        (counts.table_accesses(t) == 0).any() and (counts.table_accesses(t) > 0).any()
        for t in range(len(counts.tables))
    ]
    moved = UNREAD_SHARE * counts.accesses_of_tables[has_unread].sum()
    assert np.isclose((found.rows * found.expected)[unread].sum(), moved)
    for name in ("R", "D", "U", "D_of_node"):
        values = getattr(found, name)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    assert (found.U <= 1 + 1e-12).all()
    assert (found.D <= found.U + 1e-9).all()


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_step_of_such_counts(mode: str, fetch: Fetch) -> None:
    """The prediction with these counts for the same rows differs only by the drawing of samples."""
    workload = Workload(mode, fetch, 64)  # type: ignore[arg-type]
    counts = profile(read=300)
    topology = Topology.load("2x2-a100")
    plan = make_plan(counts, topology, workload, PlanSettings(0.0))
    # A tenth of 300 · 50 reads to 100 rows is 15 each, and the others keep 45.
    later = replace(counts, accesses=counts.accesses.copy())
    later.accesses[:ROWS] = np.where(counts.accesses[:ROWS] > 0, 45, 15)
    problem = problem_of(plan, later, as_counted=True)

    (priced,) = priced_under([plan], [problem])
    step = predict_priced(problem, priced)
    assert plan.unread_step_seconds == pytest.approx(step.seconds, rel=1e-3)


def test_copies_of_all_rows_make_it_the_step(tmp_path: Path) -> None:
    topology = Topology.load("2x4-a100")
    counts, workload = profile(read=40), Workload("inference", None, 4096)
    copied = make_plan(counts, topology, workload)
    alone = make_plan(counts, topology, workload, PlanSettings(0.0))
    assert copied.step_time is not None
    assert alone.step_time is not None
    assert copied.unread_step_seconds is not None
    assert alone.unread_step_seconds is not None
    assert copied.unread_step_seconds < alone.step_time.seconds < alone.unread_step_seconds
    said = unread_sentence(alone)
    assert said is not None
    assert "10%" in said
    alone.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").unread_step_seconds == alone.unread_step_seconds
    assert alone.to_json()["unread_step_seconds"] == alone.unread_step_seconds


@pytest.mark.parametrize("mode", MODES)
def test_no_step_is_stated_if_later_data_are_known_or_all_rows_were_read(mode: str) -> None:
    workload = Workload(mode, None, 4096)  # type: ignore[arg-type]
    topology = Topology.load("dgx-a100")
    some, every, none = profile(read=40), profile(read=ROWS), profile(read=0, reads=0)
    for counts in (with_held_out(some, every), every, none):
        plan = make_plan(counts, topology, workload)
        assert plan.unread_step_seconds is None
        assert unread_sentence(plan) is None
