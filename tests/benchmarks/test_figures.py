"""README.md and docs/results.md state the figures that docs/figures.json keeps."""

import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from benchmarks.common import LOGS, REAL_LOGS, REPOSITORY, publish
from benchmarks.figures import KEPT, STATEMENTS, restate, restated, say
from benchmarks.planning.criteo_log import (
    LOG,
    METHODS,
    TOPOLOGIES,
    counted,
    measure,
    published,
)


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("page", STATEMENTS)
def test_a_page_states_the_kept_figures(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert restated(page, kept()) == text, "run `python -m benchmarks.figures`"


def test_kept_figures_have_a_commit_and_are_published() -> None:
    statements = [statement for of_page in STATEMENTS.values() for statement in of_page]
    named = {name for each in statements for _, name, _, _ in Formatter().parse(each) if name}
    for name, figure in kept().items():
        assert re.fullmatch("[0-9a-f]{8}", figure["commit"]), name
        assert {"command", "date", "load", "timed", "value"} <= set(figure), name
    assert named - {"commit"} <= set(kept())


@pytest.mark.check
@pytest.mark.skipif(not (LOGS / REAL_LOGS[LOG][0]).exists(), reason="needs the real Criteo log")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kept_steps_for_the_criteo_log_are_those_of_this_code(topology: str) -> None:
    methods = tuple(method for method in METHODS if method != "torchrec")
    found = published(measure(counted(), topology, methods))
    expected = {name: kept()[name]["value"] for name in found}
    assert found == pytest.approx(expected), "run benchmarks/run.sh predicted"


def test_another_figure_or_other_words_fail() -> None:
    page = "| plan | 0.4 s, 12.7\nGB | `a1` |"
    statement = "| plan | {s:.1f} s, {gb:.1f} GB | `{commit}` |"
    same = {"s": {"value": 0.41, "commit": "a1"}, "gb": {"value": 12.74, "commit": "a1"}}
    assert restate(page, statement, same) == page
    newer = same | {"s": {"value": 0.38, "commit": "b2"}, "gb": {"value": 9.0, "commit": "a1"}}
    assert restate(page, statement, newer) == "| plan | 0.4 s, 9.0\nGB | `a1, b2` |"
    for text in ("| plan | 0.4 seconds |", f"{page} {page}"):
        with pytest.raises(ValueError, match="expected the statement once in the page"):
            restate(text, statement, same)


def test_values_can_be_rounded_up() -> None:
    values = (0.0481, 0.05, 0.0500001, 22.2)
    assert [say(value, "up2") for value in values] == ["0.05", "0.05", "0.06", "22.20"]
    assert say(22.2, "up0") == "23"
    assert say(22.2, ".0f") == "22"


def test_a_run_keeps_its_figures_and_leaves_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    path.write_text('{"a": {"value": 1}, "z": {"value": 2}}')
    given = Namespace(json=False, save=None, figures=path)
    monkeypatch.setattr(sys, "argv", ["/b/gap.py", "tmall", "--figures", str(path), "--scale", "1"])
    publish(given, {}, lambda: "", figures={"a": 3.0}, timings={"m": 4.0})
    found = json.loads(path.read_text())
    assert list(found) == ["a", "m", "z"]
    assert [found[name]["value"] for name in found] == [3.0, 4.0, 2]
    assert (found["a"]["timed"], found["m"]["timed"]) == (False, True)
    assert found["a"]["command"] == "gap tmall --scale 1"
