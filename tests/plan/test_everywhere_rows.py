"""Plans in which most listed rows are on all ranks: marks instead of codes, in every reader."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from oper.analysis.row_facts import CountBasis, RowReason, explain
from oper.base.arrays import as_int64, as_tensor
from oper.base.errors import OperError
from oper.checker.check import check
from oper.checker.replay import replay
from oper.cli.plan_commands.row_text import row_sentences
from oper.cost.workload import Workload
from oper.files.manifest import write_manifest
from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.plan.plan import FORMAT, MARKER, ListedCounts, Plan
from oper.plan.plan_parts import part_of
from oper.plan.row_codes import pack_positions
from oper.plan.settings import PlanSettings
from oper.plan.validate import validate
from oper.planner.make_plan import make_plan
from oper.planner.replan.drift import drift
from oper.planner.replan.replan import replan
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.topology import Topology
from oper.torchrec.planning.planner_statistics import planner_statistics

TABLES = (Table("a", 40_000, 16), Table("b", 3000, 64), Table("c", 1, 16), Table("d", 9000, 16))
ALL_COPIES = 3.0  # of 4 ranks


def a_profile(seed: int = 0, moved: float = 0.0) -> Profile:
    """Zipf counts; bags in table b. `moved` of the rows have other rows' counts."""
    random = np.random.default_rng(seed)
    accesses = random.zipf(1.5, sum(t.rows for t in TABLES)).clip(1, 4000).astype(np.uint32)
    accesses -= np.uint32(1)
    which = np.flatnonzero(random.random(len(accesses)) < moved)
    accesses[which] = accesses[random.permutation(which)]
    bags = np.minimum(accesses[40_000:43_000], 30)
    return Profile(TABLES, 10_000, accesses, bags, (False, True, False, False))


def save_plan(folder: Path, extra_memory: float, mode: str = "inference") -> Path:
    workload = Workload(mode, "raw", 512)  # type: ignore[arg-type]
    asked = PlanSettings(extra_memory=extra_memory, threshold=0.05, dob=0.5)
    make_plan(a_profile(), Topology.load("1x4-a100"), workload, asked).save(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plan(tmp_path_factory.mktemp("plans") / "plan", 1.0)


@pytest.fixture(scope="module")
def plan(saved: Path) -> Plan:
    found = Plan.load(saved)
    marked = found.layout.listed - len(found.layout.codes)
    assert 0.2 * a_profile().rows < marked < found.layout.listed
    return found


def addresses_of(plan: Plan) -> list[list[int]]:
    """Of all rows, table after table, for each rank."""
    found = []
    for rank in range(plan.ranks):
        made = AddressMap.of(plan, rank)
        every = [made.translate(t, as_int64(np.arange(n.rows))) for t, n in enumerate(plan.tables)]
        found.append(np.concatenate(every).tolist())
    return found


@pytest.mark.parametrize("extra_memory", [0.3, 1.0, ALL_COPIES])
def test_rows_on_all_ranks_take_two_bits(tmp_path: Path, extra_memory: float) -> None:
    folder = save_plan(tmp_path / "plan", extra_memory)
    assert [f.wrong for f in check(folder) if f.wrong is not None] == []
    layout = Plan.load(folder).layout
    fields = np.array(addresses_of(Plan.load(folder))) >> SLOT_BITS
    everywhere = int((fields == LOCAL).all(axis=0).sum())
    assert len(layout.codes) == layout.listed - everywhere
    lines = 2 * int(layout.line_offset[-1])
    # A code and two counters for each of the others, as there are bags. NumPy's headers have 128.
    arrays = sum(file.stat().st_size - 128 for file in folder.glob("*.npy"))
    assert arrays == 64 * lines + 12 * len(layout.codes)
    assert layout.bitmap_bytes_per_row() == (64 * lines + 4 * len(layout.codes)) / 52_001


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_plans_without_copies_have_no_marks(tmp_path: Path, mode: str) -> None:
    folder = save_plan(tmp_path / "plan", 0.0, mode)
    content = json.loads((folder / MARKER).read_text())
    assert content["rows"]["everywhere"] == 0
    assert "everywhere_bitmap.npy" not in content["files"]
    assert not [name for name in load_file(folder / "layout.safetensors") if "everywhere" in name]


def without_marks(plan: Plan, profile: Profile) -> Plan:
    """The plan with codes and counts of all listed rows, as where codes take fewer bytes."""
    layout = plan.layout
    group, position = layout.listed_places()
    listed = np.concatenate(
        [
            np.unpackbits(
                np.ascontiguousarray(layout.bitmap[first:end, 1:]).view(np.uint8).ravel(),
                bitorder="little",
            )[:rows].astype(bool)
            for first, end, rows in zip(
                layout.line_offset[:-1], layout.line_offset[1:], layout.rows, strict=True
            )
        ]
    )
    samples = np.concatenate([profile.table_samples_with_row(t) for t in range(len(TABLES))])
    coded = replace(
        layout,
        codes=pack_positions(group, position, len(layout.group_width)),
        everywhere_bitmap=None,
        everywhere_group=None,
        everywhere_first=None,
    )
    none = np.zeros(len(TABLES), dtype=np.int64)
    counts = ListedCounts(profile.accesses[listed], samples[listed], none, none)
    return replace(plan, layout=coded, counts=counts)


def test_marks_change_no_address_and_no_figure(plan: Plan, tmp_path: Path) -> None:
    profile, folder = a_profile(), tmp_path / "codes"
    without_marks(plan, profile).save(folder)
    coded = Plan.load(folder)
    assert coded.layout.everywhere_bitmap is None
    assert len(coded.layout.codes) == coded.layout.listed == plan.layout.listed
    assert addresses_of(coded) == addresses_of(plan)
    assert [f.wrong for f in check(folder) if f.wrong is not None] == []
    rows = (
        (t, np.repeat(np.arange(n.rows), profile.table_accesses(t))) for t, n in enumerate(TABLES)
    )
    assert [f.wrong for f in replay(folder, rows)] == [None]
    # Its arrays are written again as they were read.
    coded.save(tmp_path / "again")
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    newer = a_profile(0, 0.1)
    then = [drift(p, newer, 0.05).to_json() for p in (coded, plan)]
    assert then[0] == then[1]


def test_another_version_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "plan"))
    content = json.loads((folder / MARKER).read_text())
    write_manifest(folder, FORMAT, content | {"version": 6})
    with pytest.raises(OperError) as raised:
        Plan.load(folder)
    assert str(raised.value) == (
        f"{folder / MARKER}: expected version 5, got 6, written by a newer oper; install that "
        "oper, or plan again with this oper"
    )


def everywhere_row(plan: Plan, table: int) -> int:
    """A row of a table on all ranks."""
    every = as_int64(np.arange(plan.tables[table].rows))
    fields = [
        AddressMap.of(plan, r).translate(table, every) >> SLOT_BITS for r in range(plan.ranks)
    ]
    return int(np.flatnonzero((np.stack(fields) == LOCAL).all(axis=0))[5])


def test_explain_knows_bounds_and_with_the_profile_counts(plan: Plan) -> None:
    profile = a_profile()
    for number, table in enumerate(TABLES[:2]):
        row = everywhere_row(plan, number)
        found = explain(plan, table.name, row)
        counted = int(profile.table_accesses(number)[row])
        at = plan.layout.locate(number, np.arange(table.rows))
        marked = (at.group >= 0) & (at.code_index < 0)
        least = int(profile.table_accesses(number)[marked].min())
        assert (found.kind, found.replicas) == ("replicated", [0, 1, 2, 3])
        assert (found.accesses, found.accesses_at_least) == (None, least)
        assert found.accesses_at_most is None
        assert "at least" in " ".join(row_sentences(found))
        if found.cost is None:
            assert found.why == RowReason.ROOM_EVERYWHERE
        else:
            assert found.cost.basis != CountBasis.PLANNED
        exact = explain(plan, table.name, row, profile)
        assert exact.accesses == counted >= least
        assert exact.accesses_at_least == exact.accesses_at_most == counted
        assert exact.cost is None or exact.cost.basis == CountBasis.PLANNED
        assert "at least" not in " ".join(row_sentences(exact))
        assert exact.slots == found.slots
    with pytest.raises(OperError, match="the plan was made from"):
        explain(plan, "a", 0, a_profile(1))


def test_marks_are_there_with_their_groups_and_mark_something(plan: Plan) -> None:
    layout = plan.layout
    assert layout.everywhere_bitmap is not None
    none = np.zeros_like(layout.everywhere_bitmap)
    for wrong, words in ((None, "is missing"), (none, "marks no row")):
        damaged = replace(plan, layout=replace(layout, everywhere_bitmap=wrong))
        with pytest.raises(ValueError, match=f"everywhere_bitmap: {words}"):
            validate(damaged)


def test_the_kernel_needs_a_mark_for_each_line(plan: Plan) -> None:
    arguments: list[Any] = list(AddressMap.of(plan, 0)._arguments)
    bitmap = as_tensor(plan.layout.bitmap.view(np.int64)).reshape(-1)
    at = next(
        n
        for n, part in enumerate(arguments)
        if isinstance(part, torch.Tensor)
        and part.numel() == bitmap.numel()
        and not torch.equal(part.reshape(-1), bitmap)
    )
    arguments[at] = arguments[at][:1].clone()
    short = AddressMap.of(plan, 0)
    short._arguments = tuple(arguments)
    with pytest.raises(ValueError, match="everywhere_bitmap: must have as many lines"):
        short.translate(0, torch.arange(10))


def test_check_finds_counts_of_marked_rows_that_are_not_so(plan: Plan, tmp_path: Path) -> None:
    more = replace(plan.counts, everywhere_accesses=plan.counts.everywhere_accesses + 1)
    replace(plan, counts=more).save(tmp_path / "plan")
    wrong = [f.invariant for f in check(tmp_path / "plan") if f.wrong is not None]
    assert wrong == ["accesses of replicated rows are the plan's"]


def test_parts_of_a_plan_keep_marks_and_counts(plan: Plan) -> None:
    profile = a_profile()
    for tables in ([0, 3], [1], [2]):
        part = part_of(plan, tables)
        counts, layout = part.counts, part.layout
        assert len(layout.codes) == len(counts.accesses) == len(counts.samples_with_row)
        for n, t in enumerate(tables):
            found = layout.locate(n, np.arange(TABLES[t].rows)).code_index
            coded, index = found >= 0, found[found >= 0]
            assert (counts.accesses[index] == profile.table_accesses(t)[coded]).all()
            samples = profile.table_samples_with_row(t)[coded]
            assert (counts.samples_with_row[index] == samples).all()
        assert (counts.everywhere_accesses == plan.counts.everywhere_accesses[tables]).all()
        held = [(np.array(a) >> SLOT_BITS == LOCAL).sum() for a in addresses_of(part)]
        assert held == layout.slots.sum(axis=0).tolist()


def test_statistics_count_rows_with_marks(plan: Plan) -> None:
    lines = planner_statistics(plan, {t.name: "model" for t in TABLES}, 1.0)
    (of_table,) = [line.split() for line in lines if " model.a " in line]
    fields = (np.array(addresses_of(plan))[:, :40_000] >> SLOT_BITS == LOCAL).sum(axis=0)
    assert int(of_table[6].replace(",", "")) == (fields > 1).sum()


def test_replanned_rows_keep_their_slots_and_get_codes_where_they_must(
    saved: Path, tmp_path: Path
) -> None:
    old = Plan.load(saved)
    newer = a_profile(0, 0.02)
    made = replan(old, newer, 10**6)
    replace(made.plan, companions=(made.moves.save,)).save(tmp_path / "new")
    assert [f.wrong for f in check(tmp_path / "new") if f.wrong is not None] == []
    moved = set(made.moves.entries["row"].tolist())
    assert moved
    before, after = addresses_of(old), addresses_of(made.plan)
    for rank in range(old.ranks):
        stay = [n for n in range(newer.rows) if n not in moved]
        assert [before[rank][n] for n in stay] == [after[rank][n] for n in stay]
