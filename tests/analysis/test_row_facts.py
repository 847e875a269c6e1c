"""Facts of rows: the reasons given are those of the plan's own counts, settings and topology."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from oper.analysis.row_facts import CountBasis, RowReason, explain
from oper.cli.plan_commands.row_text import row_sentences
from oper.cost.expected_reads import expected_reads
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.profiling.distinct_rows import Distinct
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.topology import Topology

TRAINING = Workload("training", "distinct", 64)
INFERENCE = Workload("inference", "raw", 64)


def a_profile(distinct: Distinct | None = None) -> Profile:
    tables = (Table("a", 50, 16), Table("b", 30, 16))
    accesses = np.r_[np.arange(50, 0, -1) * 3, np.arange(30, 0, -1) - 1].astype(np.uint32)
    return Profile(tables, 5000, accesses, np.zeros(0, np.uint32), (False, False), distinct)


def planned(
    folder: Path, topology: str, workload: Workload, extra: float, profile: Profile | None = None
) -> Plan:
    made = a_profile() if profile is None else profile
    make_plan(made, Topology.load(topology), workload, PlanSettings(extra_memory=extra)).save(
        folder
    )
    return Plan.load(folder)


def said_of(plan: Plan, table: str, row: int) -> str:
    """Return the output of `oper plan explain` for a row."""
    return " ".join(row_sentences(explain(plan, table, row)))


def test_one_rank_replicates_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan", "cpu:1", TRAINING, 0.05)
    found = explain(plan, "a", 0)
    assert (found.kind, found.owner, found.replicas) == ("listed", 0, [])
    assert found.why == RowReason.ONE_RANK
    assert said_of(plan, "a", 0).endswith("Why: there is only one rank")


def test_rows_that_nothing_reads_say_so(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan", "cpu:2", TRAINING, 0.05)
    found = explain(plan, "b", 29)
    assert found.accesses == 0
    assert found.why == RowReason.NEVER_READ
    assert "never read" in said_of(plan, "b", 29)


def test_what_an_unread_row_is_expected_to_take_is_in_the_profile(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan", "2x2-a100", INFERENCE, 0.05)
    assert explain(plan, "b", 29).why == RowReason.UNREAD
    assert "is told with --profile" in said_of(plan, "b", 29)
    found = explain(plan, "b", 29, a_profile())
    assert found.accesses == 0
    assert found.cost is not None
    # Of each count there is one row, so that unread ones are as those of one access, and so on.
    fewer = explain(plan, "b", 28, a_profile()).cost
    assert fewer is not None
    assert 0 < found.cost.reads <= fewer.reads
    assert found.cost.basis == fewer.basis == CountBasis.PLANNED
    counted = explain(plan, "b", 28).cost
    assert counted is not None
    assert counted.basis == CountBasis.COUNTED


def test_without_room_for_a_copy_no_other_row_is_said_to_have_it(tmp_path: Path) -> None:
    none = planned(tmp_path / "none", "2x2-a100", INFERENCE, 0.0)
    assert explain(none, "a", 0).why == RowReason.NO_ROOM
    assert "would exceed the extra memory" in said_of(none, "a", 0)
    some = planned(tmp_path / "some", "2x2-a100", INFERENCE, 0.1)
    assert explain(some, "a", 0).replicas
    assert explain(some, "b", 10).why == RowReason.OTHERS_SAVE_MORE
    assert "used by rows that save more" in said_of(some, "b", 10)


def test_reads_follow_the_measured_ratio_of_the_table(tmp_path: Path) -> None:
    ratio = (1.0, 0.5), (1.0, 0.5)
    measured = Distinct(64, 2, *ratio, batches=9, rank_rows=(1.0, 1.0), union_rows=(1.0, 1.0))
    plan = planned(tmp_path / "plan", "cpu:2", TRAINING, 0.0, a_profile(measured))
    reads, _, _ = expected_reads(np.array([29]), np.array([29]), 5000, TRAINING, 2, 0.5, 0.5)
    assert f"reads it {reads[0]:.3g} times" in said_of(plan, "b", 0)
    unmeasured = replace(plan, distinct_ratio=None)
    assert f"reads it {2 * reads[0]:.3g} times" in said_of(unmeasured, "b", 0)
