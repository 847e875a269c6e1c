"""`oper.compare`, `replan`, `drift`, `check`, `diff`, `explain` and `write_report`: what the
commands of these names print, from objects or from folders, and shown in notebooks."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

import oper
from oper.planner.replan.drift import WindowDrift
from tests.support.commands import fine
from tests.support.planner.drifting import make_profile
from tests.support.planner.instances import zipf_counts


class Folders(NamedTuple):
    """Two profiles of the same tables, a plan for each, and a re-plan of the first."""

    profile: Path
    newer: Path
    plan: Path
    other: Path
    again: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    place = tmp_path_factory.mktemp("public")
    random = np.random.default_rng(0)
    tables = (oper.Table("hot", 3000), oper.Table("cold", 400))
    counts = [random.permutation(zipf_counts(t.rows, 20 * t.rows, 1.05)) for t in tables]
    found = Folders(*(place / name for name in Folders._fields))
    profile = make_profile(tables, counts)
    profile.save(found.profile)
    newer = make_profile(tables, [random.permutation(c) for c in counts])
    newer.save(found.newer)
    workload = oper.Workload("inference", "raw", 512)
    settings = oper.PlanSettings(extra_memory=0.02)
    for counted, folder in ((profile, found.plan), (newer, found.other)):
        oper.make_plan(counted, "2x2-a100", workload, settings).save(folder)
    oper.replan(found.plan, found.newer).plan.save(found.again)
    return found


def without_times(content: Any) -> Any:
    """Return the content without measured times."""
    if isinstance(content, dict):
        timed = ("seconds_spent", "plan_seconds")
        kept = {k: without_times(v) for k, v in content.items() if k not in timed}
        if isinstance(kept.get("seconds"), dict):
            del kept["seconds"]
        return kept
    return [without_times(item) for item in content] if isinstance(content, list) else content


def printed(*command: object) -> Any:
    return without_times(json.loads(fine(*command, "--json")))


def test_drift_is_what_the_command_prints(folders: Folders) -> None:
    found = oper.drift(folders.plan, folders.newer)
    said = printed("drift", folders.plan, folders.newer)
    names = {"plan": str(folders.plan), "profile": str(folders.newer)}
    names["plan_digest"] = oper.Plan.load(folders.plan).digest
    assert said == names | found.to_json()
    assert said["judgement"]["threshold"] == 0.01
    plan, newer = oper.Plan.load(folders.plan), oper.Profile.load(folders.newer)
    assert oper.drift(plan, newer).to_json() == found.to_json()
    windows = oper.drift_by_window(plan, [newer])
    said = printed("drift", folders.plan, folders.newer, "--all-windows")
    assert said == names | windows.to_json()


def test_replan_is_what_the_command_prints(folders: Folders, tmp_path: Path) -> None:
    said = printed("replan", folders.plan, folders.newer, "-o", tmp_path / "new")
    found = oper.replan(folders.plan, folders.newer)
    mine = without_times(found.to_json())
    assert mine == {name: said[name] for name in mine}
    assert said["horizon"] == 10_000
    assert said["changed_rows"] > 0
    # What was saved by either has the same bytes.
    for file in sorted((tmp_path / "new").iterdir()):
        assert file.read_bytes() == (folders.again / file.name).read_bytes(), file.name
    assert (folders.again / "moves.npy").exists()
    from_objects = oper.replan(oper.Plan.load(folders.plan), oper.Profile.load(folders.newer))
    assert from_objects.to_json()["moved_bytes"] == said["moved_bytes"]


def test_check_is_what_the_command_prints(folders: Folders) -> None:
    found = oper.check(folders.plan)
    assert found.ok
    assert printed("plan", "check", folders.plan) == {"plan": str(folders.plan), **found.to_json()}


def test_diff_is_what_the_command_prints(folders: Folders) -> None:
    found = oper.diff(folders.plan, oper.Plan.load(folders.again))
    assert found.rows_changed
    assert printed("plan", "diff", folders.plan, folders.again) == found.to_json()


def test_explain_is_what_the_command_prints(folders: Folders) -> None:
    explain = ("plan", "explain", folders.plan, "--table", "cold", "--row", 7)
    found = oper.explain(folders.plan, "cold", 7)
    assert printed(*explain) == found.to_json()
    exact = oper.explain(oper.Plan.load(folders.plan), "cold", 7, folders.profile)
    assert printed(*explain, "--profile", folders.profile) == exact.to_json()
    assert exact.accesses is not None


def test_compare_is_what_the_command_prints(folders: Folders) -> None:
    methods = ["oper", "row_wise"]
    workload = oper.Workload("inference", "raw", 512)
    found = oper.compare(folders.profile, "2x2-a100", workload, methods=methods)
    said = printed(
        *("compare", folders.profile, "--topology", "2x2-a100", "--mode", "inference"),
        *("--fetch", "raw", "--batch-size", 512, "--methods", ",".join(methods)),
    )
    assert said == {"runs": [without_times(found.to_json())]}


def test_a_report_is_written(folders: Folders, tmp_path: Path) -> None:
    workload = oper.Workload("inference", "raw", 512)
    compared = oper.compare(folders.profile, "2x2-a100", workload, methods=["oper", "row_wise"])
    page = tmp_path / "page.html"
    missing = oper.write_report(folders.plan, page, folders.profile, compared)
    assert "OPER and other methods" in page.read_text()
    assert [option.split()[0].strip(":,") for option in missing] == ["`drift`", "`counters`"]


def test_print_shows_the_commands_tables(folders: Folders, tmp_path: Path) -> None:
    plan, newer = oper.Plan.load(folders.plan), oper.Profile.load(folders.newer)
    workload = oper.Workload("inference", "raw", 512)
    methods = ["oper", "row_wise"]
    compared = oper.compare(folders.profile, "2x2-a100", workload, methods=methods)
    pairs = [
        (plan, ("plan", "show", folders.plan)),
        (oper.drift(plan, newer), ("drift", folders.plan, folders.newer)),
        (
            oper.drift_by_window(plan, [newer]),
            ("drift", folders.plan, folders.newer, "--all-windows"),
        ),
        (
            oper.replan(plan, newer),
            ("replan", folders.plan, folders.newer, "-o", tmp_path / "again"),
        ),
        (oper.check(folders.plan), ("plan", "check", folders.plan)),
        (oper.diff(plan, folders.again), ("plan", "diff", folders.plan, folders.again)),
        (
            compared,
            (
                *("compare", folders.profile, "--topology", "2x2-a100", "--mode", "inference"),
                *("--fetch", "raw", "--batch-size", 512, "--methods", ",".join(methods)),
            ),
        ),
    ]
    for made, command in pairs:
        text, shown = str(made), fine(*command)
        # Commands that would do what is advised are named with their flags.
        assert "--" not in re.sub("`[^`]*`", "", text), text
        assert max(map(len, text.splitlines())) <= 100
        tables = [line for line in shown.splitlines() if re.search(r"  +[0-9]", line)]
        assert tables or command[1] == "check"
        if command[0] != "compare":  # whose last column is of a clock
            for line in tables:
                assert line.rstrip() in text.replace("oper.", ""), (command, line)
        assert f"{made}" == text


def test_print_is_the_same_in_a_terminal_and_in_threads(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = oper.Plan.load(folders.plan)
    plain = str(plan)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(str, [plan] * 16)) == {plain}
    assert repr(plan).startswith("<Plan of")


def test_dir_lists_public_names_alone() -> None:
    assert dir(oper) == sorted([*oper.__all__, "__version__"])
    assert all(hasattr(oper, name) for name in dir(oper))


CALLS: dict[str, Callable[[Any], Any]] = {
    "drift: plan: expected Plan or Path or str, got int": lambda f: oper.drift(3, f.newer),  # type: ignore[arg-type]
    "drift: profile: expected Profile or Path or str, got int": lambda f: oper.drift(f.plan, 3),  # type: ignore[arg-type]
    "replan: plan: expected .*got int": lambda f: oper.replan(3, f.newer),  # type: ignore[arg-type]
    "horizon: expected 1 to 1,000,000,000,000 iterations, got 0": lambda f: oper.replan(
        f.plan, f.newer, 0
    ),
    "check: folder: expected Path or str, got Plan": lambda f: oper.check(oper.Plan.load(f.plan)),  # type: ignore[arg-type]
    "diff: new: expected .*got int": lambda f: oper.diff(f.plan, 3),  # type: ignore[arg-type]
    "explain: table: expected .*got int": lambda f: oper.explain(f.plan, 3, 0),  # type: ignore[arg-type]
    "row: expected a whole number, got '0.5'": lambda f: oper.explain(f.plan, "hot", 0.5),  # type: ignore[arg-type]
    "row 3000 of table 'hot': its rows are 0 to 2999": lambda f: oper.explain(f.plan, "hot", 3000),
    "compare: profile: expected .*got int": lambda f: oper.compare(
        3,  # type: ignore[arg-type]
        "cpu:2",
        oper.Workload("inference"),
    ),
    "write_report: plan: expected .*got int": lambda f: oper.write_report(3, "x.html"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", CALLS)
def test_other_arguments_are_errors_that_say_what_is_expected(
    folders: Folders, message: str
) -> None:
    with pytest.raises(oper.OperError, match=message):
        CALLS[message](folders)


SHOWN: dict[str, tuple[Callable[[Folders], Any], tuple[str, ...]]] = {
    "plan": (
        lambda f: oper.Plan.load(f.plan),
        ("predicted step", "from optimal, at most", "rank", "3"),
    ),
    "profile": (lambda f: oper.Profile.load(f.profile), ("3,400 rows of 2 tables", "cold")),
    "drift": (lambda f: oper.drift(f.plan, f.newer), ("Verdict: replan", "time lost", "hot")),
    "windows": (
        lambda f: oper.drift_by_window(f.plan, [oper.Profile.load(f.newer)]),
        ("Verdict: replan", "Not re-planning costs", "@0"),
    ),
    "replanned": (
        lambda f: oper.replan(f.plan, f.newer),
        ("within 10,000 steps", "as it was", "from scratch"),
    ),
    "differences": (
        lambda f: oper.diff(f.plan, f.again),
        ("Two plans for 3,400 rows", "rows that are held elsewhere", "fullest rank"),
    ),
    "findings": (lambda f: oper.check(f.plan), ("all 12 invariants hold", "yes")),
}


@pytest.mark.parametrize("name", SHOWN)
def test_results_show_themselves_in_notebooks_and_to_rich(folders: Folders, name: str) -> None:
    make, words = SHOWN[name]
    found = make(folders)
    shown = found._repr_html_()
    console = Console(width=200)
    with console.capture() as capture:
        console.print(found)
    for word in words:
        assert word in shown, word
        assert word in capture.get(), word


def test_a_lost_invariant_is_shown(folders: Folders) -> None:
    from oper.checker.findings import Finding, Findings

    found = Findings((Finding("fine"), Finding("not <fine>", "broken")))
    assert not found.ok
    assert [finding.invariant for finding in found.wrong] == ["not <fine>"]
    shown = found._repr_html_()
    assert "1 of 2 invariants do not hold" in shown
    assert "not &lt;fine&gt;" in shown


def test_windows_that_are_read_back_are_of_the_same_type(folders: Folders) -> None:
    windows = oper.drift_by_window(folders.plan, [oper.Profile.load(folders.newer)])
    assert WindowDrift.from_json(windows.to_json()).verdict == windows.verdict


def test_completion_knows_the_public_names() -> None:
    """Completion lists names that load on first use, too, in a process that used none."""
    script = "import oper; print(*(set(oper.__all__) - set(dir(oper))), '__version__' in dir(oper))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert printed.stdout.split() == [b"True"]
