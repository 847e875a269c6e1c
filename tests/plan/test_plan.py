"""Plans on disk: what is saved is loaded, damage is named, and `check` finds what is wrong."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.checker.check import check
from oper.checker.replay import replay
from oper.cost.expected_counts import expected_counts
from oper.cost.expected_reads import expected_reads
from oper.cost.workload import Workload
from oper.files import manifest
from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.plan.plan import FORMAT, MARKER, Plan, rank_file
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import DEVICES
from oper.topology.links import LINKED, SHARED
from oper.topology.topology import Topology
from tests.support.examples import examples
from tests.support.planner.gaps import known_gap

TABLES = (Table("a", 20_000, 16), Table("b", 500, 64), Table("c", 1, 16), Table("d", 9000, 16))
BAGGED = (False, True, False, False)


def a_profile(seed: int, tables: tuple[Table, ...] = TABLES, zipf: float = 1.5) -> Profile:
    rng = np.random.default_rng(seed)
    rows = sum(t.rows for t in tables)
    accesses = rng.zipf(zipf, rows).clip(1, 4000).astype(np.uint32) - np.uint32(1)
    bagged = BAGGED[: len(tables)]
    offsets = np.r_[0, np.cumsum([t.rows for t in tables])]
    samples_with_row = [
        np.minimum(accesses[offsets[n] : offsets[n + 1]], 30) if bag else accesses[:0]
        for n, bag in enumerate(bagged)
    ]
    return Profile(tables, 10_000, accesses, np.concatenate(samples_with_row), bagged)


def save_plan(folder: Path, profile: Profile, topology: str = "2x2-a100", **asked: Any) -> Path:
    # Partitions so coarse that cold rows are striped, and no backtracking to finer ones; memory for
    # copies of some rows.
    asked = {"threshold": 0.05, "dob": 0.5, "extra_memory": 0.5} | asked
    workload = Workload(asked.pop("mode", "inference"), asked.pop("fetch", "raw"), 512)
    ranks = Topology.load(topology)
    make_plan(profile, ranks, workload, PlanSettings(**asked)).save(folder, overwrite=True)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_plan(tmp_path_factory.mktemp("plans") / "plan", a_profile(0))


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "plan"))


def stamp(folder: Path) -> None:
    """Make the record of the folder agree with its files again."""
    content = json.loads((folder / MARKER).read_text())
    (folder / MARKER).unlink()
    content["files"] = manifest.describe_files(folder)
    manifest.write_manifest(folder, FORMAT, content)


def wrong(folder: Path) -> dict[str, str]:
    return {f.invariant: f.wrong for f in check(folder) if f.wrong is not None}


def test_a_saved_plan_is_loaded(saved):
    plan = Plan.load(saved, TABLES)
    assert plan.tables == TABLES
    assert plan.ranks == 4
    assert plan.layout.rows.tolist() == [t.rows for t in TABLES]
    assert plan.workload == Workload("inference", "raw", 512)
    assert repr(plan).startswith("<Plan of 29,501 rows of 4 tables on 4 ranks (")
    assert repr(a_profile(0)) == "<Profile of 29,501 rows of 4 tables in 10,000 samples>"
    assert plan.digest == replace(plan).digest != replace(plan, profile="0" * 64).digest
    again = saved.parent / "again"
    plan.save(again)
    for file in sorted(saved.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert Plan.load(again).digest == plan.digest


def test_the_same_input_gives_the_same_bytes(saved, tmp_path):
    other = save_plan(tmp_path / "elsewhere", a_profile(0))
    names = sorted(p.name for p in saved.iterdir())
    assert names == sorted(p.name for p in other.iterdir())
    for name in names:
        assert (saved / name).read_bytes() == (other / name).read_bytes(), name


def test_other_files_go_along(saved, tmp_path):
    def write(folder: Path) -> None:
        (folder / "moves.txt").write_text("none")

    replace(Plan.load(saved), companions=(write,)).save(tmp_path / "p")
    assert "moves.txt" in json.loads((tmp_path / "p" / MARKER).read_text())["files"]
    (tmp_path / "p" / "moves.txt").write_text("some")
    with pytest.raises(OperError, match=r"moves\.txt: its SHA-256"):
        Plan.load(tmp_path / "p")


@pytest.mark.parametrize(
    "name", ["bitmap.npy", "codes.npy", "layout.safetensors", rank_file(0), "listed_accesses.npy"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damaged_files_are_named(copied, name, damage):
    file = copied / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-5])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(OperError, match=name):
        Plan.load(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=99), "got 99, written by a newer oper"),
        (lambda c: c.update(schema="other"), "expected schema .*, got 'other'"),
        (lambda c: c.pop("topology"), "is damaged"),
        (lambda c: c["tables"][0].update(rows=7), "not those of its fingerprint"),
        (lambda c: c["files"].pop("codes.npy"), "is damaged"),
    ],
)
def test_a_changed_record_is_noticed(copied, change, message):
    content = json.loads((copied / MARKER).read_text())
    change(content)
    manifest.write_manifest(copied, FORMAT, content)
    with pytest.raises(OperError, match=message):
        Plan.load(copied)


def test_cut_off_record(copied):
    text = (copied / MARKER).read_text()
    (copied / MARKER).write_text(text[: len(text) // 2])
    with pytest.raises(OperError, match=r"plan\.json, line \d+, column \d+"):
        Plan.load(copied)


def test_not_a_plan(tmp_path):
    with pytest.raises(OperError, match="no such folder"):
        Plan.load(tmp_path / "none")
    with pytest.raises(OperError, match=r"expected a plan .*plan\.json.* got an empty folder"):
        Plan.load(tmp_path)


def test_a_plan_for_other_tables(saved):
    with pytest.raises(OperError, match="4 tables, and 1 were given"):
        Plan.load(saved, TABLES[:1])
    other = (*TABLES[:2], replace(TABLES[2], dim=32), TABLES[3])
    with pytest.raises(OperError, match=r"of dim 16.* of dim 32"):
        Plan.load(saved, other)


def test_unknown_table(saved):
    with pytest.raises(OperError, match="it has a, b, c, d"):
        Plan.load(saved).table_index("z")


@examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    topology=st.sampled_from(["cpu:1", "cpu:3", "2x2-a100"]),
    mode=st.sampled_from(["training", "inference"]),
    fetch=st.sampled_from(["raw", "distinct"]),
    extra_memory=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_plans_pass_every_check(tmp_path, seed, topology, mode, fetch, extra_memory):
    profile = a_profile(seed)
    folder = save_plan(
        tmp_path / "plan", profile, topology, mode=mode, fetch=fetch, extra_memory=extra_memory
    )
    assert wrong(folder) == {}
    assert [f.wrong for f in replay(folder, rows_of(profile))] == [None]


def slow_memories(memory: str) -> Topology:
    """Three ranks of which the first two read their own rows slower than each other's."""
    cost = np.array([[9, 2, 8], [3, 9, 8], [8, 8, 1]]) / 100e9
    return Topology("slow memories", (0, 0, 0), cost, 72e9, DEVICES, memory=(memory,))  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [LINKED, SHARED])
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_holders_read_cheaper_copies_than_their_own(tmp_path, memory, fetch):
    profile = a_profile(1)
    workload, asked = Workload("inference", fetch, 512), PlanSettings(extra_memory=0.3)
    planned = make_plan(profile, slow_memories(memory), workload, asked)
    planned.save(tmp_path / "plan")
    plan = Plan.load(tmp_path / "plan")
    if memory == SHARED:  # where owners serve reads, no copy there is worth the time of its owner
        assert plan.layout.unread_copies.any()
    assert wrong(tmp_path / "plan") == {}
    assert [f.wrong for f in replay(tmp_path / "plan", rows_of(profile))] == [None]
    assert planned.certificate is not None
    assert 0 <= known_gap(planned.certificate) < 0.01
    # What readers find by their maps is what the plan was priced by.
    reads = np.zeros((3, 3))
    of_table = np.repeat(np.arange(len(plan.tables)), [table.rows for table in plan.tables])
    each = np.ones(len(of_table), dtype=np.int64)
    samples = [profile.table_samples_with_row(t) for t in range(len(plan.tables))]
    foreseen = expected_counts(
        of_table, profile.accesses.astype(int), np.concatenate(samples).astype(int), each
    )
    for t, table in enumerate(plan.tables):
        counts = foreseen.accesses[of_table == t], foreseen.samples_with_row[of_table == t]
        R, _, _ = expected_reads(*counts, profile.samples, workload, 3)
        for rank in range(3):
            addresses = AddressMap.of(plan, rank).translate(t, torch.arange(table.rows)).numpy()
            field = addresses >> SLOT_BITS
            source = np.where(field == LOCAL, rank, field)
            reads[rank] += np.bincount(source, R * table.row_bytes, minlength=3)
    np.fill_diagonal(reads, 0.0)
    np.testing.assert_allclose(reads, plan.cost.link_bytes, rtol=1e-9)


def test_check_finds_replicas_that_training_would_not_read(tmp_path):
    folder = save_plan(tmp_path / "plan", a_profile(0), mode="training", extra_memory=0.3)
    layout = Plan.load(folder).layout
    assert not layout.unread_copies.any()
    group = int(np.flatnonzero(layout.holds.all(axis=1))[0])
    source = layout.source.copy()
    source[group, 1] = 0
    with_layout(folder, source=source)
    found = wrong(folder)["in training every rank reads the replicas that it has"]
    assert "rank 1 has a replica, and reads that of rank 0" in found


def rows_of(profile: Profile):
    """The rows that a log with the profile's counts reads."""
    for t in range(len(profile.tables)):
        yield t, np.repeat(np.arange(profile.tables[t].rows), profile.table_accesses(t))


def test_a_replay_of_another_log_is_told(saved):
    rows = [(t, r) for t, r in rows_of(a_profile(0))]
    rows.append((0, np.array([19_999])))
    (finding,) = replay(saved, rows)
    assert finding.wrong is not None
    assert "is it the log that was profiled?" in finding.wrong


def test_pooled_tables_are_saved_in_the_tables_order_and_only_where_there_are_any(copied):
    plan = Plan.load(copied)
    assert "pooled_tables" not in json.loads((copied / MARKER).read_text())
    pooled = replace(plan, pooled_tables=("d", "a"))
    assert pooled.pooled_tables == ("a", "d")
    pooled.save(copied, overwrite=True)
    assert json.loads((copied / MARKER).read_text())["pooled_tables"] == ["a", "d"]
    assert Plan.load(copied).pooled_tables == ("a", "d")
    assert wrong(copied) == {}
    replace(pooled, pooled_tables=()).save(copied, overwrite=True)
    assert "pooled_tables" not in json.loads((copied / MARKER).read_text())


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (
            ["x"],
            "table 'x': the plan has no such table; it has a, b, c, d - at `\\$.pooled_tables`",
        ),
        (["d", "a"], "Expected what follows from the rest of the plan - at `\\$.pooled_tables`"),
        (["a", "a"], "Expected what follows from the rest of the plan - at `\\$.pooled_tables`"),
        ([], "`pooled_tables` is no key of a plan - at `\\$`"),
        ("a", "Expected `array`, got `str` - at `\\$.pooled_tables`"),
    ],
)
def test_names_of_pooled_tables_that_no_plan_has_are_refused(copied, names, error):
    content = json.loads((copied / MARKER).read_text())
    (copied / MARKER).unlink()
    manifest.write_manifest(copied, FORMAT, content | {"pooled_tables": names})
    with pytest.raises(OperError, match=error):
        Plan.load(copied)


def with_layout(folder: Path, **changes: Any) -> None:
    plan = Plan.load(folder)
    replace(plan, layout=replace(plan.layout, **changes)).save(folder, overwrite=True)


def test_check_finds_shared_slots(copied):
    layout = Plan.load(copied).layout
    base = layout.stripe_base.copy()
    base[3] -= 1  # one slot into what lies before
    with_layout(copied, stripe_base=base)
    found = wrong(copied)
    assert (
        "is shared with another row"
        in found["no two rows share a slot, and all are within the arenas"]
    )
    assert "every slot of the arenas holds a row" in found


def test_check_finds_slots_beyond_the_arena(copied):
    layout = Plan.load(copied).layout
    with_layout(copied, slots=layout.slots - 1)
    with pytest.raises(OperError, match=r"plan\.json: is damaged .*arena"):
        check(copied)


def test_check_finds_rank_maps_that_disagree(copied):
    shutil.copy(copied / rank_file(1), copied / rank_file(0))
    stamp(copied)
    found = wrong(copied)
    assert "every row is read from a rank that holds it, at one slot" in found
    assert "maps agree with the layout by its definition" in found


def with_cost(folder: Path, **changes: Any) -> None:
    """Write the plan with other figures, and with what follows from them."""
    plan = Plan.load(folder)
    (memory,) = plan.memories
    cost = replace(memory.cost, **changes)
    replace(plan, memories=(replace(memory, cost=cost),)).save(folder, overwrite=True)


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (lambda c: {"rank_seconds": with_first(c.rank_seconds, 1.0)}, "the figures add up"),
        (lambda c: {"dob": replace(c.dob, memory=0.5)}, "the figures add up"),
        (
            lambda c: {"communication_bytes": replace(c.communication_bytes, fetch=1.0)},
            "the figures add up",
        ),
        (
            lambda c: {"memory_bytes": with_first(c.memory_bytes, c.memory_bytes[0] + 64)},
            "memory of each rank is the plan's",
        ),
        (
            lambda c: {"capacity_bytes": with_first(c.capacity_bytes, 1)},
            "memory is within each rank's capacity",
        ),
        (
            lambda c: {"extra_bytes": c.total_bytes / 2},
            "copies take the extra memory stated, within that allowed",
        ),
    ],
)
def test_check_finds_figures_that_are_not_so(copied, change, invariant):
    with_cost(copied, **change(Plan.load(copied).cost))
    assert invariant in wrong(copied)


def with_first(values: np.ndarray, first: float) -> np.ndarray:
    """The values but for the first."""
    return np.append(np.array([first], dtype=values.dtype), values[1:])


def test_check_finds_a_bound_above_the_objective(copied):
    plan = Plan.load(copied)
    (memory,) = plan.memories
    assert memory.certificate is not None
    twice = replace(
        memory.certificate, lower_bound_seconds=2 * memory.certificate.lower_bound_seconds
    )
    replace(plan, memories=(replace(memory, certificate=twice),)).save(copied, overwrite=True)
    assert "the objective is not below its lower bound" in wrong(copied)


def test_check_finds_a_certificate_of_another_objective(copied):
    plan = Plan.load(copied)
    (memory,) = plan.memories
    assert memory.certificate is not None
    other = memory.certificate.of(1.001 * memory.certificate.objective_seconds)
    replace(plan, memories=(replace(memory, certificate=other),)).save(copied, overwrite=True)
    assert "certificate" in wrong(copied)["the figures add up"]


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_folder_of_an_older_oper_is_refused_and_may_be_replaced(copied, saved, version):
    content = json.loads((copied / MARKER).read_text())
    older = content | {"schema": "oper-plan", "version": version}
    manifest.write_manifest(copied, FORMAT, older)
    with pytest.raises(OperError) as raised:
        Plan.load(copied)
    assert str(raised.value) == (
        f"{copied / MARKER}: expected version 5, got {version}, written by an older oper; plan "
        "again with this oper"
    )
    plan = Plan.load(saved)
    plan.save(copied, overwrite=True)
    assert addresses(Plan.load(copied)) == addresses(plan)


def addresses(plan: Plan) -> list[list[int]]:
    """The addresses of all rows on each rank."""
    return [
        plan.layout.addresses(t, np.arange(table.rows), rank).tolist()
        for rank in range(plan.ranks)
        for t, table in enumerate(plan.tables)
    ]
