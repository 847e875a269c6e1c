"""The file of JSON lines: whole lines, read back as they were; what is none of it is refused."""

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper.base.errors import OperError
from oper.monitoring.json_lines import GrowingReports, JsonLines
from oper.monitoring.period_report import PeriodReport
from tests.support.monitoring.reports import a_report
from tests.support.planner.judgements import a_judgement


@pytest.mark.parametrize("worse", [None, -0.01, 0.02, 0.3])
@pytest.mark.parametrize("ranks", [1, 5])
def test_a_line_is_read_back_as_it_was(worse: float | None, ranks: int) -> None:
    report = a_report(3, ranks, worse)
    found = PeriodReport.from_json(json.loads(report.line()))
    assert found.line() == report.line()
    np.testing.assert_array_equal(found.counted.link_bytes, report.counted.link_bytes)
    assert found.verdict == ("not judged" if worse is None else ("keep", "replan")[worse > 0.05])
    assert report.line().count("\n") == 1


def test_the_sentence_of_a_judgement_has_all_candidates() -> None:
    judgement = a_judgement(2e-5, 1.9e-5, 1.8e-5, 5e-6)
    said = replace(a_report(), judgement=judgement).judged()
    assert said.startswith(
        "replan: a step takes 20 µs, replanned 19 µs, from scratch 18 µs, copies of all rows 5 µs "
        "(5% tolerated)"
    )


def test_reports_are_appended_and_followed(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    lines = JsonLines(file)
    follower = GrowingReports(file)
    assert follower.new(5) == []
    for period in range(4):
        lines.append(a_report(period))
    assert [r.period for r in follower.new(3)] == [1, 2, 3]
    lines.close()
    lines.close()
    again = JsonLines(file)  # of a job that goes on
    again.append(a_report(0))
    again.close()
    assert [r.period for r in follower.new(3)] == [0]
    assert follower.new(3) == []
    assert [r.period for r in GrowingReports(file).new(9)] == [0, 1, 2, 3, 0]


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    file, line = tmp_path / "run.jsonl", a_report().line()
    follower = GrowingReports(file)
    file.write_text(line + line[:100])
    assert len(follower.new(5)) == 1
    assert follower.new(5) == []
    file.write_text(line + line)
    assert len(follower.new(5)) == 1
    file.write_text(line)  # another file, of fewer bytes
    assert len(follower.new(5)) == 1


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    lines = JsonLines(file)
    lines.append(a_report(0))
    whole = file.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, before[1]))
    try:
        with pytest.raises(OperError, match=r"run\.jsonl: a line could not be written"):
            lines.append(a_report(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert file.read_bytes() == whole
    lines.append(a_report(1))
    lines.close()
    assert [r.period for r in GrowingReports(file).new(9)] == [0, 1]


FOREIGN = {
    "text": "hello\n",
    "other JSON": '{"schema": "oper.plan", "version": 1}\n',
    "a list": "[1, 2]\n",
    "another version": a_report().line().replace('"version": 2', '"version": 3'),
    "a key that is missing": a_report().line().replace('"samples": 1277952, ', ""),
    "another number of ranks": a_report().line().replace('"lookups": [', '"lookups": [1.0, ', 1),
    "a text for a number": a_report().line().replace('"period": 0', '"period": "0"'),
    "a time that is none": a_report().line().replace('"ended": 1800000000.0', '"ended": 1e300'),
    "moves that gain next to nothing": a_report(worse=0.3)
    .line()
    .replace('"step_seconds": 2e-05', '"step_seconds": 2.5999999999999998e-05')
    .replace('"moving_seconds": 2e-06', '"moving_seconds": 1e308'),
    "no text at all": "\x00\x00\n",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_other_files_are_refused(tmp_path: Path, what: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(FOREIGN[what])
    with pytest.raises(OperError, match="line 1: is not what a monitor writes"):
        GrowingReports(file).new(1)
    with pytest.raises(OperError, match="line 1: is not what a monitor writes"):
        JsonLines(file)
    assert file.read_text() == FOREIGN[what]


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperError, match=r"cannot be written.*a folder that is there"):
        JsonLines(tmp_path / "none" / "run.jsonl")
    with pytest.raises(OperError, match="got a device"):
        JsonLines("/dev/null")
