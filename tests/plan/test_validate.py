"""Plans with changed contents and right digests: every index is compared before kernels use it."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from oper.analysis.plan_differences import diff
from oper.analysis.row_facts import explain
from oper.base.errors import OperError
from oper.checker.check import check
from oper.files.manifest import describe_files, write_manifest
from oper.plan.address_map import AddressMap
from oper.plan.bitmap import header_of
from oper.plan.plan import FORMAT, MARKER, Plan, rank_file
from tests.plan.test_plan import TABLES, a_profile, save_plan
from tests.support.examples import examples
from tests.support.planner.layouts import random_layout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid") / "plan"
    return save_plan(folder, a_profile(0), extra_memory=0.02, mode="training")


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "plan"))


def stamp(folder: Path, change: Any = lambda content: None) -> None:
    """Change the marker, and make it agree with the files."""
    content = json.loads((folder / MARKER).read_text())
    change(content)
    (folder / MARKER).unlink()
    content["files"] = describe_files(folder)
    write_manifest(folder, FORMAT, content)


def used(folder: Path, other: Path) -> None:
    """All that reads a plan; OperError, and nothing else, may come of it."""
    plan = Plan.load(folder)
    check(folder)
    diff(plan, Plan.load(other))
    diff(Plan.load(other), plan)
    for table, rows in enumerate(plan.layout.rows.tolist()):
        explain(plan, plan.tables[table].name, rows - 1)
    for rank in range(plan.ranks):
        AddressMap.load(folder, rank)


def save_with(folder: Path, **changes: Any) -> None:
    plan = Plan.load(folder)
    layout = replace(plan.layout, **changes)
    # Saving counts the listed rows, which a bitmap that is none would not let it.
    vars(layout)["listed_offset"] = plan.layout.listed_offset
    replace(plan, layout=layout).save(folder, overwrite=True)


def test_a_plan_is_valid(saved: Path) -> None:
    used(saved, saved)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("codes", lambda a: a | np.uint32(0xFFFFFF00), "codes: number 0 is of no group, or beyond"),
        ("codes", lambda a: a[:-1], "the bitmap lists"),
        ("codes", lambda a: a.astype(np.float32), "codes: expected .* got float32"),
        ("bitmap", lambda a: ~a, "headers: must count its bits"),
        ("bitmap", lambda a: a[:-1], "bitmap: expected .* got uint64"),
        ("bitmap", lambda a: a.view(np.int64), "bitmap: expected .* got int64"),
        ("line_offset", lambda a: a * 1000, "line_offset"),
        ("rows", lambda a: a + 448, "rows: are not those"),
        ("width_of_table", lambda a: a + 5, "width_of_table: entry 5"),
        ("width_of_table", lambda a: a - 1, "width_of_table: entry -1"),
        ("group_width", lambda a: a - 9, "group_width: entry -9"),
        ("pattern_of", lambda a: a + 1000, "pattern_of: entry 1000"),
        ("rotation", lambda a: a - 7_000_000, "rotation: entry -"),
        ("source", lambda a: (a + np.uint16(1)) % 4, "source: must name ranks"),
        ("holds", lambda a: ~a, "holds|source"),
        ("base", lambda a: a + 10**12, "base: must be slots"),
        ("base", lambda a: a - 10**12, "base: must be slots"),
        ("stripe_base", lambda a: a + 10**9, "stripe_base of table 0"),
        ("stripe_base", lambda a: a - 10**9, "stripe_base of table 0"),
        ("slots", lambda a: a * 0, "base: must be|codes: number"),
        ("slots", lambda a: a + 10**12, "slots: entry"),
        ("slots", lambda a: a[:, :-1], "slots: expected .* got int64"),
        ("orders", lambda a: tuple(o + np.uint16(9) for o in a), "order_00000: entry"),
        ("orders", lambda a: tuple(o[:0] for o in a), "expected 1 to 65536 steps, got 0"),
        (
            "stripe_bitmap",
            lambda a: np.zeros((3, 8), np.uint64),
            "stripe_bitmap: expected .* got uint64",
        ),
    ],
)
def test_a_layout_with_an_index_of_nothing(
    copied: Path, name: str, change: Any, message: str
) -> None:
    save_with(copied, **{name: change(getattr(Plan.load(copied).layout, name))})
    with pytest.raises(OperError, match=rf"plan\.json: is damaged \(ValueError: .*{message}"):
        Plan.load(copied)


def test_a_row_that_is_striped_must_be_numbered_as_striped(copied: Path) -> None:
    layout = Plan.load(copied).layout
    frozen = np.zeros_like(layout.bitmap)
    frozen[:, 1:] = ~layout.bitmap[:, 1:]
    counts = np.bitwise_count(frozen[:, 1:]).astype(np.int64)
    before = np.cumsum(counts.sum(axis=1)) - counts.sum(axis=1)
    frozen[:, 0] = header_of(before, counts)
    save_with(copied, stripe_bitmap=frozen)
    with pytest.raises(OperError, match="stripe_bitmap"):
        Plan.load(copied)


@given(seed=st.integers(0, 10**6))
def test_headers_are_those_of_the_kernel(seed: int) -> None:
    random = np.random.default_rng(seed)
    layout = random_layout(random, random.integers(0, 3000, 4).tolist(), 3)
    counts = np.bitwise_count(layout.bitmap[:, 1:]).astype(np.int64)
    before = np.cumsum(counts.sum(axis=1)) - counts.sum(axis=1)
    assert np.array_equal(header_of(before, counts), layout.bitmap[:, 0])


def cost_of(content: dict[str, Any]) -> dict[str, Any]:
    """What plan.json states of the cost of rows on the devices."""
    found: dict[str, Any] = content["memories"][0]["cost"]
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda c: cost_of(c).update(lookups=[1.0]),
        lambda c: cost_of(c).update(rank_seconds=[[1.0]] * 4),
        lambda c: cost_of(c).update(link_bytes=[1.0, 2.0, 3.0, 4.0]),
        lambda c: cost_of(c).update(objective_seconds="x"),
        lambda c: cost_of(c).update(allreduce_method="mail"),
        lambda c: cost_of(c).update(feasible="no"),
        lambda c: cost_of(c).update(mailbox_bytes=None),
        lambda c: cost_of(c)["dob"].update(memory=[]),
        lambda c: c["memories"][0]["record"].update(threshold="much"),
        lambda c: c.update(certificate=[]),
        lambda c: c["memories"][0].update(certificate=[]),
        lambda c: c["memories"][0]["certificate"].update(certified_gap="small"),
        lambda c: c.update(samples="many"),
        lambda c: c.update(asked=3),
        lambda c: c.update(limits=3),
        lambda c: c["asked"].update(extra_memory="5%"),
        lambda c: c["limits"].update(extra_memory="5%"),
        lambda c: c["memories"][0].update(partitions=[]),
        lambda c: c.update(distinct_ratio=[1.0]),
        lambda c: c["memories"][0].update(replica_accesses=None),
        lambda c: c["memories"][0].update(owner_accesses=[1]),
        lambda c: c.update(profile=7),
        lambda c: c["topology"].update(node_of=[0]),
        lambda c: c["workload"].update(batch_size=0.5),
        lambda c: c["workload"].update(more=1),
        lambda c: c.update(tables=c["tables"][:-1]),
        lambda c: c.update(tables={}),
    ],
)
def test_figures_of_another_kind(copied: Path, saved: Path, change: Any) -> None:
    stamp(copied, change)
    with pytest.raises(OperError) as raised:
        used(copied, saved)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["listed_accesses", "codes", "bitmap"])
@pytest.mark.parametrize("bad", [np.zeros(3), np.zeros((0, 8), np.uint64), np.array("text")])
def test_arrays_of_another_kind(copied: Path, name: str, bad: Any) -> None:
    np.save(copied / f"{name}.npy", bad)
    stamp(copied)
    with pytest.raises(OperError, match=name):
        Plan.load(copied)


def test_rank_maps_of_another_plan(copied: Path, tmp_path: Path) -> None:
    other = save_plan(tmp_path / "other", a_profile(3, TABLES[:1]), "cpu:2")
    shutil.copy(other / rank_file(0), copied / rank_file(0))
    stamp(copied)
    with pytest.raises(OperError, match=rf"{rank_file(0)}: is damaged"):
        check(copied)
    shutil.copy(copied / rank_file(1), copied / rank_file(0))
    stamp(copied)
    with pytest.raises(OperError, match="of rank 0's map is not that of the layout"):
        AddressMap.load(copied, 0)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_contents_with_right_digests(
    saved: Path, tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "plan"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    names = sorted(p.name for p in saved.iterdir() if p.suffix in (".npy", ".safetensors"))
    name = data.draw(st.sampled_from(names))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content)
    stamp(folder)
    with contextlib.suppress(OperError):
        used(folder, saved)
