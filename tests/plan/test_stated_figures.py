"""A plan whose figures are not what they should be is refused in one line, wherever it is read."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oper.plan.stated_figures import check_stated

from oper.base.errors import OperError
from oper.files.manifest import write_manifest
from oper.plan.plan import FORMAT, MARKER, Plan
from tests.support.commands import fine, oper, write_log

PARTS = ("figures", "certificate", "partitions", "settings")
# Read by nothing, as they stand elsewhere in plan.json too; and what may be null.
REPEATED = {"mode", "fetch", "batch_size", "ranks", "rows", "status"}
MAY_BE_NULL = {"greedy_dob", "hot_row", "memory", "lookups", "link_cost", "reserve"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stated")
    write_log(folder / "log.parquet")
    fine("profile", folder / "log.parquet", "-o", folder / "p", "--columns", "C*")
    fine("plan", folder / "p", "-o", folder / "q", "--topology", "2x2-a100", "--fetch", "raw")
    return folder / "q"


def leaves(content: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all values that are not objects, vectors' first elements among them."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, (*path, key))
    else:
        yield path
        if isinstance(content, list):
            yield from leaves(content[0], (*path, 0))


def edited(content: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(content)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


@pytest.mark.parametrize("key", ["mode", "fetch", "batch_size"])
def test_a_workload_is_whole(saved: Path, key: str) -> None:
    content = json.loads((saved / MARKER).read_text())
    with pytest.raises(ValueError, match=key):
        check_stated(edited(content, ("workload", key), None), 4)
    del content["workload"][key]
    with pytest.raises((KeyError, ValueError), match=key):
        check_stated(content, 4)


def test_every_value_of_another_kind_is_found(saved: Path) -> None:
    content = json.loads((saved / MARKER).read_text())
    check_stated(content, 4)
    tried = 0
    for name in PARTS:
        for path in leaves(content[name], (name,)):
            if path[1] in REPEATED:
                continue
            bad: list[Any] = [float("nan"), {}, True if path[-1] != "feasible" else 1]
            bad += ["much"] if not isinstance(content[path[0]][path[1]], str) else []
            bad += [None] if path[-1] not in MAY_BE_NULL else []
            for value in bad:
                if path[-1] == "hot_row" and value == "much":
                    continue
                with pytest.raises((ValueError, TypeError), match=r"was needed"):
                    check_stated(edited(content, path, value), 4)
                tried += 1
    assert tried > 150


SAMPLES = {"from_sample": 0, "to_sample": 9}
TIMES = {"column": "t", "from_value": 0.5, "to_value": 1.0}
EXACT = {**TIMES, "every": 0.5, "number": 1, "from": "1970-01-01", "to": "1970-01-01"}
PARTS_OF_LOGS: tuple[dict[str, Any], ...] = (
    {"rows": "0:9", "sampled": {"share": 0.5, "seed": 3}},
    {"window": SAMPLES},
    {"window": TIMES, "time_unit": "ms"},
    {"window": EXACT},
    {"window": {"from": 0, "to": 9}},  # of `oper synth`
)


def test_every_value_of_a_part_of_a_log_is_checked(saved: Path) -> None:
    content = json.loads((saved / MARKER).read_text())
    for part in PARTS_OF_LOGS:
        check_stated(content | {"log_part": part}, 4)
        for path in leaves(part):
            right: Any = part
            for key in path:
                right = right[key]
            bad: list[Any] = [None, [], {}, True, {"a": 1}, 1 if isinstance(right, str) else "x"]
            bad += [0.5, -(1 << 63)] if path[-1] in ("from_sample", "to_sample", "number") else []
            bad += [-1, 1 << 64] if path[-1] == "seed" else []
            bad += [0, -0.5] if path[-1] in ("share", "every") else []
            for value in bad:
                with pytest.raises(ValueError, match=rf"{path[-1]}.* is .*was needed"):
                    check_stated(content | {"log_part": edited(part, path, value)}, 4)
    for gone in EXACT.keys() - {"from", "to"}:
        window = {key: value for key, value in EXACT.items() if key != gone}
        with pytest.raises(ValueError, match=rf"log_part.window.{gone}"):
            check_stated(content | {"log_part": {"window": window}}, 4)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("figures", "objective_seconds"), None),
        (("figures", "rank_seconds"), ["1", "2", "3", "4"]),
        (("figures", "rank_seconds"), [1.0, 2.0]),
        (("figures", "dob"), None),
        (("figures", "greedy_dob"), {"memory": "much", "lookups": 1}),
        (("certificate", "certified_gap"), None),
        (("certificate",), None),
        (("partitions", "memory_bounded"), "many"),
        (("settings", "extra_memory"), None),
        (("settings", "reserve"), "x"),
        (("certificate", "bound_note"), [1]),
        (("log_part",), 5),
        (("log_part",), {"rows": 5}),
        (("log_part",), {"sampled": {"share": "a", "seed": 0}}),
        (("log_part",), {"window": {"column": "ts"}}),
    ],
)
def test_show_says_so_in_one_line(saved: Path, path: tuple[str | int, ...], value: Any) -> None:
    marker = saved / MARKER
    before = marker.read_bytes()
    try:
        write_manifest(saved, FORMAT, edited(json.loads(before), path, value))
        said = oper("plan", "show", saved)
        assert said.status == 2
        assert said.errors.count("\n") == 1
        assert "plan.json: is damaged" in said.errors
        assert ".".join(map(str, path[:2])) in said.errors
        with pytest.raises(OperError):
            Plan.load(saved)
    finally:
        marker.write_bytes(before)


@pytest.mark.parametrize("part", ["certificate", "partitions", "settings"])
def test_plans_put_together_by_hand_lack_parts_and_are_shown(saved: Path, part: str) -> None:
    marker = saved / MARKER
    before = marker.read_bytes()
    try:
        write_manifest(saved, FORMAT, edited(json.loads(before), (part,), {}))
        assert "Predicted iteration" in fine("plan", "show", saved)
        fine("plan", "show", saved, "--json")
        fine("plan", "check", saved)
    finally:
        marker.write_bytes(before)
