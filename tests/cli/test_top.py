"""`oper top`: the newest state of a monitored job, and errors for what is none."""

import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from oper.monitoring.period_report import Moving
from tests.support.commands import fine, refused
from tests.support.monitoring.reports import a_report
from tests.support.planner.judgements import a_judgement


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    worse = (None, 0.01, 0.2)
    lines = [a_report(period, 12, worse[period]).line() for period in range(3)]
    (tmp_path / "run.jsonl").write_text("".join(lines))
    return tmp_path / "run.jsonl"


def test_the_newest_state_is_shown(run: Path) -> None:
    said = fine("top", "run.jsonl", "--once")
    assert said == fine("top", "run.jsonl")  # not a terminal
    assert max(map(len, said.splitlines())) <= 100
    assert "run.jsonl: 30,000 iterations; period 2" in said
    assert "Replan: a step takes 24 µs" in " ".join(said.split())
    assert "and 4 ranks that serve less" in said
    verdicts = [line.split()[-1] for line in said.splitlines()[-3:]]
    assert verdicts == ["judged", "keep", "replan"]


def test_the_newest_run_of_a_file_and_its_new_plans(run: Path) -> None:
    more = [a_report(0, 12, None), replace(a_report(1, 12, 0.01), new_plan="plans/period-1")]
    with run.open("a", encoding="utf-8") as file:
        file.writelines(report.line() for report in more)
    last = fine("top", "run.jsonl").splitlines()[-3:]
    assert last[0].split()[:1] == ["period"]
    assert [line.split()[0] for line in last[1:]] == ["0", "1"]
    assert last[0].endswith("new plan")
    assert last[2].endswith("period-1")
    assert max(map(len, last)) <= 100


def test_a_plan_that_is_moved_to_is_not_kept_or_judged(run: Path) -> None:
    decided = replace(a_report(3, 12, 0.01), new_plan="plans/period-3")
    begun = Moving("plans/period-3", 12, 40)
    more = [
        decided,  # with the policy to propose
        replace(decided, period=4, moving=Moving("plans/period-4"), new_plan="plans/period-4"),
        replace(a_report(5, 12, None), why_not_judged="rows are on their way", moving=begun),
    ]
    with run.open("a", encoding="utf-8") as file:
        file.writelines(report.line() for report in more)
    said = fine("top", "run.jsonl")
    assert "Migrating to plans/period-3, step 12 of 40" in said
    shown = [" ".join(line.split()) for line in said.splitlines()[-3:]]
    ends = ["new plan period-3", "migrating period-4", "migrating period-3, 12/40"]
    assert all(line.endswith(end) for line, end in zip(shown, ends, strict=True)), shown
    assert "keep" not in "".join(shown)
    assert max(map(len, said.splitlines())) <= 100
    assert json.loads(fine("top", "run.jsonl", "--json"))["moving"] == {
        "plan": "plans/period-3",
        "steps_made": 12,
        "steps": 40,
    }


def test_reports_without_a_migration_are_read(run: Path) -> None:
    assert '"moving"' not in run.read_text()
    assert "Replan: a step takes" in fine("top", "run.jsonl")


def test_steps_of_full_copies_have_a_column_and_a_figure(run: Path) -> None:
    plain = a_report(3, 12, 0.01)
    assert "full copies" not in fine("top", "run.jsonl")
    assert "oper/step_seconds/full_copies" not in plain.scalars()
    judgement = a_judgement(2e-5, 2.1e-5, 2.2e-5, 12.34e-6)
    report = replace(plain, judgement=judgement, new_plan="plans/period-3")
    assert report.scalars()["oper/step_seconds/full_copies"] == 12.34e-6
    with run.open("a", encoding="utf-8") as file:
        file.write(report.line())
    said = fine("top", "run.jsonl")
    assert "full copies" in said
    assert "12.34 µs" in said.splitlines()[-1]
    assert max(map(len, said.splitlines())) <= 100


def test_json_is_the_newest_line(run: Path) -> None:
    assert json.loads(fine("top", "run.jsonl", "--json")) == json.loads(
        run.read_text().splitlines()[-1]
    )


@pytest.mark.usefixtures("run")
def test_what_is_none_of_a_monitors_is_refused(tmp_path: Path) -> None:
    refused("top none.jsonl", "none.jsonl: no such file")
    (tmp_path / "empty.jsonl").touch()
    refused("top empty.jsonl", "has no report yet", "monitor.report()")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    refused("top other.jsonl", "other.jsonl, line 1: is not what a monitor writes")
    (tmp_path / "broken.jsonl").write_text(a_report().line() + "{\n")
    refused("top broken.jsonl", "broken.jsonl, line 2: is not what a monitor writes")
    refused("top .", "expected a file of a monitor's JSON lines, got a folder")


def test_on_a_terminal_it_follows_the_file_until_ctrl_c(run: Path) -> None:
    here, there = pty.openpty()
    command = [sys.executable, "-m", "oper", "top", run.name]  # a short name: lines are wrapped
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "60"}
    with subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True
    ) as top:
        os.close(there)
        try:
            shown = read_until(here, "30,000 iterations")
            assert "40,000 iterations" not in shown
            with run.open("a") as file:
                file.write(a_report(3, 12).line())
            read_until(here, "40,000 iterations")
            top.send_signal(2)
            assert top.wait(20) == 0
        finally:
            top.kill()
            os.close(here)


def read_until(terminal: int, words: str) -> str:
    """Return the output up to these words."""
    shown, end = "", time.monotonic() + 60
    while words not in shown:
        assert time.monotonic() < end, shown
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown
