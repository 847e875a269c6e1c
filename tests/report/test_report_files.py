"""`oper report` and files: what is no material of it, and what it must not replace."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import WORKLOAD, Reported
from tests.support.commands import fine, oper, refused

MADE_BY = {
    "compare": "what `oper compare --json` printed",
    "drift": "what `oper drift --json` printed",
    "counters": "a list of what `oper.counters(model)` returned on each rank",
}


@pytest.mark.parametrize("option", MADE_BY)
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "[1]", '{"runs": 3, "verdict": 1}', "[{}]"]
)
def test_files_that_no_command_printed(
    reported: Reported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    content: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.json").write_text(content)
    refused(
        f"report {reported.file('plan')} --{option} odd.json -o x.html",
        f"--{option} odd.json: expected ",
        MADE_BY[option],
        ", got ",
    )


def test_files_of_other_options(
    reported: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = reported.file("plan")
    for option in MADE_BY:
        for other in set(MADE_BY) - {option}:
            refused(
                f"report {plan} --{option} {reported.file(f'{other}.json')} -o x.html",
                f"expected {MADE_BY[option]}",
                f"got {MADE_BY[other]}",
            )
        for given, got in (
            (reported.page, "a file that cannot be read as JSON"),
            (reported.file("plan"), "a plan's folder"),
            (reported.file("plan") / "plan.json", "JSON with 'schema'"),
            ("absent", "nothing"),
        ):
            refused(
                f"report {reported.file('plan')} --{option} {given} -o x.html",
                MADE_BY[option],
                f"got {got}",
            )


def test_every_cut_of_a_file_is_an_error_or_a_page(reported: Reported, tmp_path: Path) -> None:
    """Keys left out one by one: an error of one line, or a page that did not need it."""
    page = tmp_path / "x.html"
    for option in ("compare", "drift", "windows"):
        content = json.loads(reported.file(f"{option}.json").read_text())
        for path in paths(content):
            file = tmp_path / "cut.json"
            file.write_text(json.dumps(without(content, path)))
            given = "drift" if option == "windows" else option
            said = oper("report", reported.file("plan"), f"--{given}", file, "-o", page, "--force")
            assert said.status in (0, 2), (path, said)
            assert said.errors.count("\n") == (said.status == 2), (path, said)


def paths(content: object, depth: int = 3) -> list[tuple[object, ...]]:
    if depth == 0 or not isinstance(content, dict | list):
        return []
    keys: list[Any] = list(content) if isinstance(content, dict) else list(range(len(content)))[:1]
    found: list[tuple[object, ...]] = []
    for key in keys:
        inner = content[key]
        found += [(key,), *((key, *rest) for rest in paths(inner, depth - 1))]
    return found


def without(content: object, path: tuple[object, ...]) -> object:
    copied = json.loads(json.dumps(content))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copied


def test_bad_arguments(reported: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = reported.file("plan")
    refused(f"report {one} {one} {one} -o x.html", "PLAN: expected one, or two", "got 3")
    profile = reported.file("profile")
    refused(f"report {one} {one} --profile {profile} -o x.html", "--profile", "one plan")
    refused("report nothing -o x.html", "nothing")
    Path("x.html").write_text("mine")
    refused(f"report {one} -o x.html", "x.html", "was not written by oper")
    refused(f"report {one} -o no/such/../../x.html", "x.html")
    other = tmp_path / "other"
    write = "synth criteo-kaggle --scale 0.0001 --counts --dim 16 -o profile"
    fine(*write.split())
    fine("plan", "profile", "--topology", "2x2-a100", "-o", other)
    refused(f"report {one} {other} -o y.html", "different tables")


def test_json(reported: Reported, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    said = json.loads(fine("report", reported.file("plan"), "-o", page, "--json"))
    assert said == {"report": str(page), "bytes": page.stat().st_size}


def test_a_page_never_replaces_what_it_is_made_of(reported: Reported) -> None:
    plan, profile = reported.file("plan"), reported.file("profile")
    drift = reported.file("drift.json")
    before = {path: path.read_bytes() for path in (plan / "plan.json", drift)}
    for output in (plan / "plan.json", plan / "page.html", profile / "x.html", drift):
        said = oper("report", plan, "--drift", drift, "-o", output, "--force")
        assert said.status == 2, output
        assert said.errors.startswith(f"error: {output}: ")
    assert not (profile / "x.html").exists()
    assert before == {path: path.read_bytes() for path in before}


def test_a_file_that_is_called_like_a_marker_is_in_nobodys_way(
    reported: Reported, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text('{"mine": 1}')
    fine("report", reported.file("plan"), "-o", tmp_path / "page.html")


def test_drift_and_comparison_of_another_plan(reported: Reported, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(fine("drift", reported.file("day"), reported.file("days@2"), "--json"))
    said = oper("report", reported.file("plan"), "--drift", other, "-o", tmp_path / "x.html")
    assert said.status == 2
    assert "--drift: expected the drift of this plan" in said.errors
    other.write_text(
        fine("compare", reported.file("days@0"), *WORKLOAD, "--methods", "oper", "--json")
    )
    said = oper("report", reported.file("plan"), "--compare", other, "-o", tmp_path / "x.html")
    assert said.status == 2
    assert "--compare: expected profile" in said.errors


def test_the_drift_of_a_plan_with_the_same_iteration_time(
    reported: Reported, tmp_path: Path
) -> None:
    content = json.loads(reported.file("drift.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(content | {"plan_digest": "0" * 64}))
    arguments = ("report", reported.file("plan"), "-o", tmp_path / "x.html")
    said = oper(*arguments, "--drift", tmp_path / "other.json")
    assert said.status == 2
    assert "--drift: expected the drift of this plan" in said.errors
    fine(*arguments, "--drift", reported.file("drift.json"))
