"""A plan whose figures are not what they should be is refused in one line, wherever it is read."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from oper.base.errors import OperError
from oper.cost.objective import Communication, Cost
from oper.files import manifest
from oper.files.manifest import write_manifest
from oper.plan.certificate import Certificate
from oper.plan.plan import FORMAT, MARKER, Plan
from oper.plan.plan_file import from_json
from oper.topology.topology import Topology
from tests.support.commands import fine, oper, write_log
from tests.support.planner.instances import topologies

Place = tuple[str | int, ...]

# What may be null, by its last key, and what was asked of the extra memory.
MAY_BE_NULL = {
    ("asked", "extra_memory"),
    *("link_cost", "reserve", "full_memory_bound_seconds", "hot_row_share", "bound_note"),
    *("distinct_ratio", "greedy_dob", "replan", "certificate", "partitions", "limits", "missing"),
    *("held_out", "held_out_seconds"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plan of a log, and one with a tier for half of it, replanned for the other half."""
    folder = tmp_path_factory.mktemp("stated")
    log, asked = folder / "log.parquet", ("--topology", "2x2-a100", "--fetch", "raw")
    write_log(log)
    fine("profile", log, "-o", folder / "p", "--columns", "C*")
    fine("profile", log, "-o", folder / "w", "--columns", "C*", "--windows", "2")
    fine("plan", folder / "p", "-o", folder / "devices", *asked)
    tier = ("--tier", "C1", "--batch-size", "4096", "--extra-memory", "10%")
    fine("plan", f"{folder / 'w'}@0", "-o", folder / "first", *asked, *tier)
    fine("replan", folder / "first", f"{folder / 'w'}@1", "-o", folder / "both")
    return {name: folder / name for name in ("devices", "both")}


@pytest.fixture(scope="module")
def saved(folders: dict[str, Path]) -> Path:
    return folders["devices"]


def stated(folder: Path) -> dict[str, Any]:
    """The content of plan.json."""
    content: dict[str, Any] = json.loads((folder / MARKER).read_text())
    return content


def leaves(content: Any, path: Place = ()) -> Iterator[Place]:
    """The places of all values that are not objects, vectors' first elements among them."""
    if isinstance(content, dict) and content:
        for key, value in content.items():
            yield from leaves(value, (*path, key))
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        for number, value in enumerate(content):
            yield from leaves(value, (*path, number))
    else:
        yield path
        if isinstance(content, list) and content:
            yield from leaves(content[0], (*path, 0))


def value_at(content: Any, path: Place) -> Any:
    for key in path:
        content = content[key]
    return content


def edited(content: Any, path: Place, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(content)
    value_at(made, path[:-1])[path[-1]] = value
    return made


def place(path: Place) -> str:
    """As errors name it."""
    return "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def of_other_kinds(path: Place, right: Any) -> list[Any]:
    """Values that cannot be at a place, where there is one that can."""
    bad: list[Any] = [{"a": 1}, 1 if isinstance(right, bool) else True]
    bad += [float("nan"), float("inf"), -float("inf")]
    bad += [["x"]] if path[-2:] != ("asked", "tier") else [["x", 1], "some"]
    bad += [7] if isinstance(right, str) and path[-1] not in ("capacity", "host_memory") else []
    bad += ["much"] if not isinstance(right, str) else []
    bad += [None] if not {path[-1], path[-2:]} & MAY_BE_NULL else []
    bad += [0.5] if isinstance(right, int) and path[-1] != "extra_memory" else []
    return bad


def refusal(folder: Path) -> str | None:
    """What is said where a plan is not read; None where it is."""
    try:
        Plan.load(folder)
    except OperError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["devices", "both"])
def test_every_value_of_another_kind_is_found(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders[name]
    # Thousands of times: without indentation, and the other files' digests only where they changed.
    verify_files = manifest.verify_files
    monkeypatch.setattr(manifest, "write_json", lambda file, new: file.write_text(json.dumps(new)))
    content = stated(folder)
    tried, wrong = 0, []
    try:
        for path in leaves(content):
            if path == ("sha256",):  # is written anew
                continue
            listed = path[0] == "files"
            monkeypatch.setattr(
                manifest,
                "verify_files",
                lambda folder, files, digests, of=listed: verify_files(folder, files, of),
            )
            for value in of_other_kinds(path, value_at(content, path)):
                write_manifest(folder, FORMAT, edited(content, path, value))
                tried += 1
                if (said := refusal(folder)) is None or "\n" in said:
                    wrong.append((place(path), value, said))
    finally:
        monkeypatch.undo()
        write_manifest(folder, FORMAT, content)
    Plan.load(folder)
    assert wrong == []
    assert tried > 900


@pytest.mark.parametrize("name", ["devices", "both"])
def test_every_key_must_be_there_and_no_other(folders: dict[str, Path], name: str) -> None:
    content = stated(folders[name])
    content.pop("sha256")
    from_json(content, 4)
    tried = 0
    for path in objects({key: content[key] for key in ("workload", "asked", "limits", "memories")}):
        found = value_at(content, path)
        with pytest.raises(ValueError, match=re.escape(place(path))):
            from_json(edited(content, (*path, "more"), 1), 4)
        for key in found:
            less = edited(content, path, {k: v for k, v in found.items() if k != key})
            with pytest.raises(ValueError, match=f"`{key}`"):
                from_json(less, 4)
            tried += 1
    assert tried > 60
    for key in content.keys() - {"schema", "version", "files", "step_time"}:  # not of all plans
        with pytest.raises((KeyError, ValueError), match=key):
            from_json({k: v for k, v in content.items() if k != key}, 4)
    with pytest.raises(ValueError, match="`more` is no key"):
        from_json(content | {"more": 1}, 4)


def objects(content: Any, path: Place = ()) -> Iterator[Place]:
    """The places of all objects below."""
    if isinstance(content, dict):
        if path:
            yield path
        for key, value in content.items():
            yield from objects(value, (*path, key))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from objects(value, (*path, number))


@pytest.mark.parametrize("name", ["devices", "both"])
def test_every_figure_that_follows_from_others_is_compared(
    folders: dict[str, Path], name: str
) -> None:
    content = stated(folders[name])
    content.pop("sha256")
    plan = Plan.load(folders[name])
    at: dict[Place, Any] = {}
    for number, memory in enumerate(plan.memories):
        at["memories", number, "cost"] = memory.cost
        at["memories", number, "cost", "communication_bytes"] = memory.cost.communication_bytes
        at["memories", number, "certificate"] = memory.certificate
    at["certificate",] = plan.whole_certificate
    known = {path: value for path, value in at.items() if value is not None}
    assert {type(value) for value in known.values()} == {Cost, Communication, Certificate}
    for path, value in known.items():
        for figure in type(value).DERIVED:
            right = getattr(value, figure)
            for wrong in (not right,) if isinstance(right, bool) else (right * 1.01 + 1, -1.0):
                there = (*path, figure)
                message = "follows from other figures - at `" + re.escape(place(there))
                with pytest.raises(ValueError, match=message):
                    from_json(edited(content, there, wrong), 4)


@pytest.mark.parametrize(
    "path",
    [
        *[("rows", kind) for kind in ("total", "listed", "striped", "everywhere")],
        ("arena_slots", 0, 0),
        ("topology", "latency_seconds"),
        ("tables", 0, "features"),
    ],
)
def test_what_follows_from_the_layout_and_the_ranks_is_compared(saved: Path, path: Place) -> None:
    content = stated(saved)
    right = value_at(content, path)
    # Null and no features are allowed, and understood as what would be written otherwise.
    wrong: Any = right + 1 if isinstance(right, int) else {"features": {}}.get(str(path[-1]))
    try:
        write_manifest(saved, FORMAT, edited(content, path, wrong))
        with pytest.raises(OperError, match=rf"follows from the rest .*{path[0]}"):
            Plan.load(saved)
    finally:
        write_manifest(saved, FORMAT, content)


@given(topologies())
def test_ranks_are_written_as_they_are_understood(topology: Topology) -> None:
    written = topology.to_dict()
    assert Topology.from_dict(json.loads(json.dumps(written)), "x").to_dict() == written


@pytest.mark.parametrize("key", ["mode", "fetch", "batch_size"])
def test_a_workload_is_whole(saved: Path, key: str) -> None:
    content = stated(saved)
    content.pop("sha256")
    with pytest.raises(ValueError, match=key):
        from_json(edited(content, ("workload", key), None), 4)
    del content["workload"][key]
    with pytest.raises((KeyError, ValueError), match=key):
        from_json(content, 4)


@pytest.mark.parametrize("bad", [1 << 63, -(1 << 64), 1 << 2000], ids=["2^63", "-2^64", "2^2000"])
@pytest.mark.parametrize(
    "path",
    [("samples",), ("memories", 0, "owner_accesses", 0), ("memories", 0, "replica_accesses")],
)
def test_integers_have_64_bits(saved: Path, path: Place, bad: int) -> None:
    content = stated(saved)
    content.pop("sha256")
    with pytest.raises(ValueError, match=str(path[0])):
        from_json(edited(content, path, bad), 4)


SAMPLES = {"from_sample": 0, "to_sample": 9}
TIMES = {"column": "t", "from_value": 0.5, "to_value": 1.0}
EXACT = {**TIMES, "every": 0.5, "number": 1, "from": "1970-01-01", "to": "1970-01-01"}
PARTS_OF_LOGS: tuple[dict[str, Any], ...] = (
    {"rows": "0:9", "sampled": {"share": 0.5, "seed": 3}},
    {"window": SAMPLES},
    {"window": TIMES, "time_unit": "ms"},  # of profiles of before
    {"window": EXACT},
    {"window": {"from": 0, "to": 9}},  # of `oper synth`
)


def test_every_value_of_a_part_of_a_log_is_checked(saved: Path) -> None:
    content = stated(saved)
    content.pop("sha256")
    for part in PARTS_OF_LOGS:
        assert from_json(content | {"log_part": part}, 4).log_part == part
        for path in leaves(part):
            right = value_at(part, path)
            bad: list[Any] = [None, [], {}, True, {"a": 1}, 1 if isinstance(right, str) else "x"]
            whole = ("from_sample", "to_sample", "number")
            bad += [0.5, -(1 << 63) - 1, 1 << 63] if path[-1] in whole else []
            bad += [-1, 1 << 64] if path[-1] == "seed" else []
            bad += [0, -0.5] if path[-1] in ("share", "every") else []
            bad += [1.5] if path[-1] == "share" else []
            bad += [float("nan"), float("inf")] if isinstance(right, float) else []
            for value in bad:
                with pytest.raises(ValueError, match=rf"{path[-1]}"):
                    from_json(content | {"log_part": edited(part, path, value)}, 4)
        for path in [(), *objects(part)]:
            with pytest.raises(ValueError, match="no other keys"):
                from_json(content | {"log_part": edited(part, (*path, "more"), 1)}, 4)
    for gone in EXACT.keys() - {"from", "to"}:
        window = {key: value for key, value in EXACT.items() if key != gone}
        with pytest.raises(ValueError, match=rf"`{gone}` of log_part.window"):
            from_json(content | {"log_part": {"window": window}}, 4)


def test_a_part_of_a_log_by_a_profile_of_before_is_read(saved: Path, tmp_path: Path) -> None:
    replace(Plan.load(saved), log_part={"window": TIMES}).save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").log_part == {"window": TIMES}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("memories", 0, "cost", "objective_seconds"), None),
        (("memories", 0, "cost", "rank_seconds"), ["1", "2", "3", "4"]),
        (("memories", 0, "cost", "rank_seconds"), [1.0, 2.0]),
        (("memories", 0, "cost", "dob"), None),
        (("memories", 0, "record", "greedy_dob"), {"memory": "much", "lookups": 1}),
        (("memories", 0, "certificate", "certified_gap"), None),
        (("memories", 0, "certificate"), []),
        (("certificate",), []),
        (("memories", 0, "partitions", "memory_bounded"), "many"),
        (("asked", "extra_memory"), "5%"),
        (("limits", "extra_memory"), None),
        (("limits", "reserve"), "x"),
        (("memories", 0, "certificate", "bound_note"), [1]),
        (("memories", 0, "certificate", "bound_note"), "a note"),
        (("memories", 0, "record", "threshold_reason"), "a reason"),
        (("log_part",), 5),
        (("log_part",), {"rows": 5}),
        (("log_part",), {"sampled": {"share": "a", "seed": 0}}),
        (("log_part",), {"window": {"column": "ts"}}),
    ],
)
def test_show_says_so_in_one_line(saved: Path, path: Place, value: Any) -> None:
    marker = saved / MARKER
    before = marker.read_bytes()
    try:
        write_manifest(saved, FORMAT, edited(json.loads(before), path, value))
        said = oper("plan", "show", saved)
        assert said.status == 2
        assert said.errors.count("\n") == 1
        assert "plan.json: is damaged" in said.errors
        assert place(path).removeprefix("$.") in said.errors
        with pytest.raises(OperError):
            Plan.load(saved)
    finally:
        marker.write_bytes(before)


def test_plans_put_together_by_hand_lack_parts_and_are_shown(saved: Path, tmp_path: Path) -> None:
    plan = Plan.load(saved)
    (memory,) = plan.memories
    for number, by_hand in enumerate(
        (
            replace(plan, memories=(replace(memory, certificate=None),)),
            replace(plan, memories=(replace(memory, partitions=None),)),
            replace(plan, memories=(replace(memory, record=None),)),
            replace(plan, limits=None),
        )
    ):
        folder = tmp_path / str(number)
        by_hand.save(folder)
        assert "transfer time" in fine("plan", "show", folder)
        fine("plan", "show", folder, "--json")
        fine("plan", "check", folder)
    assert np.array_equal(Plan.load(tmp_path / "0").cost.rank_seconds, plan.cost.rank_seconds)
