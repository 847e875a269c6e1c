"""`oper plan diff`: plans for different numbers of ranks are compared by their figures."""

import json
from pathlib import Path

import pytest

from oper.analysis.plan_differences import diff
from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.replan.replan import replan
from oper.topology.topology import Topology
from tests.support.commands import fine
from tests.support.planner.profiles import make_profile


def made(folder: Path, preset: str, rows: tuple[int, ...] = (400, 30)) -> Path:
    workload = Workload("inference", "raw", 256)
    profile = make_profile(1, rows)
    make_plan(profile, Topology.load(preset), workload, PlanSettings(extra_memory=0.05)).save(
        folder
    )
    return folder


def test_plans_for_different_numbers_of_ranks(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", "cpu:2"), made(tmp_path / "new", "cpu:4")
    found = diff(Plan.load(old), Plan.load(new))
    assert (found.old.ranks, found.new.ranks) == (2, 4)
    assert (found.rows_changed, found.bytes_changed, found.tables) == (None, None, None)
    for side, folder in ((found.old, old), (found.new, new)):
        plan = Plan.load(folder)
        assert side.objective_seconds == plan.cost.objective_seconds
        assert side.memory_bytes == plan.cost.memory_bytes.max()
        assert (side.asked, side.limits, side.dob) == (plan.asked, plan.limits, plan.cost.dob)
    text = fine("plan", "diff", old, new)
    words = " ".join(text.split())
    assert f"{old} is for 2 ranks and {new} for 4 ranks: their rows are not compared" in words
    assert "transfer time" in text
    content = json.loads(fine("plan", "diff", old, new, "--json"))
    assert content == json.loads(json.dumps(found.to_json()))
    assert (content["rows_changed"], content["bytes_changed"]) == (None, None)
    assert content["tables"] == []
    same = diff(Plan.load(old), Plan.load(old))
    assert same.tables is not None
    assert (same.rows_changed, same.bytes_changed, len(same.tables)) == (0, 0, 2)


def test_bytes_of_changed_rows_are_those_of_their_move(tmp_path: Path) -> None:
    """The optimizer's state moves with a row, and a replan counts it."""
    topology, workload = Topology.load("cpu:2"), Workload("training", "raw", 256)
    old = make_plan(make_profile(1, (400, 30)), topology, workload)
    found = replan(old, make_profile(2, (400, 30)))
    changed = diff(old, found.plan)
    assert changed.tables is not None
    assert changed.rows_changed
    assert all(table.optimizer == "rowwise_adagrad" for table in old.tables)
    assert [t.bytes_changed for t in changed.tables] == [
        rows.rows_changed * (table.row_bytes + 4)
        for rows, table in zip(changed.tables, old.tables, strict=True)
    ]


def test_plans_of_other_data_are_told_apart(tmp_path: Path) -> None:
    """Times of plans that were made from different profiles differ by the data too."""
    folders = [tmp_path / name for name in ("old", "same", "new")]
    topology, workload = Topology.load("cpu:2"), Workload("inference", "raw", 256)
    for folder, seed, memory in zip(folders, (1, 1, 2), (0.05, 0.1, 0.05), strict=True):
        settings = PlanSettings(extra_memory=memory)
        make_plan(make_profile(seed, (400, 30)), topology, workload, settings).save(folder)
    old, same, new = folders
    assert "different profiles" not in fine("plan", "diff", old, same)
    assert "made from different profiles" in " ".join(fine("plan", "diff", old, new).split())
    content = json.loads(fine("plan", "diff", old, new, "--json"))
    assert content["old"]["profile"] != content["new"]["profile"]


def test_plans_for_other_tables(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", "cpu:2"), made(tmp_path / "new", "cpu:4", (400, 31))
    with pytest.raises(OperError, match="different tables"):
        diff(Plan.load(old), Plan.load(new))
