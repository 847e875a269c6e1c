"""Rows and bytes by kind: the same as counting the addresses of all rows one by one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.arrays import as_int64
from oper.cost.workload import Workload
from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.plan.memories import DEVICE, HOST
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import RankBytes, RowsByKind, rows_by_kind
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.replan.replan import replan
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.examples import examples
from tests.support.planner.layouts import random_layout, tables_of
from tests.support.planner.tiers import drawn
from tests.support.runtime.runtime_plans import random_plan


def counted(plan: Plan) -> RowsByKind:
    """By the address of every row on every rank, and a look at its mark in the bitmap."""
    tables, ranks = len(plan.tables), plan.ranks
    rows = {kind: np.zeros(tables, dtype=np.int64) for kind in ("replicated", "listed", "striped")}
    copies, ranks_with_rows = np.zeros((2, tables), dtype=np.int64)
    memory_of_row = np.array([t.memory_bytes(plan.workload.mode) for t in plan.tables])
    held = {
        memory.name: {kind: np.zeros(ranks, dtype=np.int64) for kind in rows}
        for memory in plan.memories
    }
    for t, table in enumerate(plan.tables):
        every = np.arange(table.rows)
        maps = [AddressMap.of_copies(plan, rank) for rank in range(ranks)]
        local = np.stack([m.translate(t, as_int64(every)) >> SLOT_BITS == LOCAL for m in maps])
        listed = plan.layout.locate(t, every).group >= 0
        several = local.sum(axis=0) > 1
        for kind, here in (
            ("replicated", several),
            ("listed", listed & ~several),
            ("striped", ~listed & ~several),
        ):
            rows[kind][t] = here.sum()
            held[plan.memory_of(t).name][kind] += local[:, here].sum(axis=1) * memory_of_row[t]
        copies[t] = local[:, several].sum()
        ranks_with_rows[t] = local.any(axis=1).sum()
    in_tier = np.isin(plan.layout.width_of_table, plan.layout.width_of_table[list(plan.tier)])
    memory: dict[str, RankBytes] = {}
    for name, of_kind in held.items():
        slots = np.zeros(ranks, dtype=np.int64)
        for width in set(plan.layout.width_of_table[in_tier == (name == HOST)].tolist()):
            t = int(np.flatnonzero(plan.layout.width_of_table == width)[0])
            slots += plan.layout.slots[width] * memory_of_row[t]
        memory[name] = RankBytes(**of_kind, unused=slots - sum(of_kind.values()))
    return RowsByKind(
        **rows,
        copies=copies,
        ranks_with_rows=ranks_with_rows,
        memory_of_row=memory_of_row,
        listed_accesses=np.zeros(tables, dtype=np.int64),
        memory=memory,
    )


def assert_counts_are_true(plan: Plan) -> RowsByKind:
    found, expected = rows_by_kind(plan), counted(plan)
    counts = ("replicated", "listed", "striped", "copies", "ranks_with_rows", "memory_of_row")
    for name in counts:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.memory.keys() == expected.memory.keys()
    for name in found.memory:
        for kind in RankBytes._fields:
            mine, other = (getattr(f.memory[name], kind) for f in (found, expected))
            assert np.array_equal(mine, other), (name, kind)
    assert np.array_equal(found.rows, plan.layout.rows)
    return found


tables = st.lists(
    st.tuples(st.integers(1, 900), st.sampled_from([4, 8]), st.sampled_from(["sgd", "adam"])),
    min_size=1,
    max_size=5,
).map(
    lambda sizes: tuple(
        Table(f"t{n}", *size[:2], optimizer=size[2]) for n, size in enumerate(sizes)
    )
)


@examples(60)
@given(
    tables,
    st.integers(0, 1000),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(["training", "inference"]),
    st.sets(st.integers(0, 4)),
)
def test_any_plan(tables, seed, ranks, replicated, listed, mode, tier):
    chosen = tuple(sorted(n for n in tier if n < len(tables)))
    plan = random_plan(
        seed, tables, ranks, replicated=replicated, listed=listed, mode=mode, tier=chosen
    )
    found = assert_counts_are_true(plan)
    assert found.memory.keys() == ({DEVICE, HOST} if chosen else {DEVICE})
    held = sum(memory.total.sum() for memory in found.memory.values())
    assert found.bytes_of_tables.sum() == held
    for memory in found.memory.values():
        assert not memory.unused.any()


@examples(40)
@given(st.integers(0, 1000), st.integers(1, 4), st.booleans(), st.booleans())
def test_layouts_whose_stripes_rows_have_left(seed, ranks, wide, moved):
    random = np.random.default_rng(seed)
    rows = random.integers(1, 1500, 4).tolist()
    layout = random_layout(random, rows, ranks, wide=wide, moved=moved)
    plan = random_plan(seed, tables_of(layout), ranks)
    assert_counts_are_true(replace(plan, layout=layout))


def test_long_tables_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if of bitmaps and codes only a few were looked at together."""
    for name in ("_CHUNK_CODES", "CHUNK_LINES", "_LINES_OF_LEFT_ROWS"):
        monkeypatch.setattr(f"oper.plan.rows_by_kind.{name}", 3)
    random = np.random.default_rng(1)
    layout = random_layout(random, [5000, 3, 2000], 3, moved=True)
    assert_counts_are_true(replace(random_plan(1, tables_of(layout), 3), layout=layout))


def hot(seed: int) -> Profile:
    random = np.random.default_rng(seed)
    tables = (Table("a", 40_000, 16), Table("b", 3000, 64), Table("c", 1, 16))
    accesses = random.zipf(1.5, sum(t.rows for t in tables)).clip(1, 4000).astype(np.uint32) - 1
    return Profile(tables, 10_000, accesses, accesses[:0], (False,) * 3)


@pytest.mark.parametrize("extra_memory", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_kinds_add_up_to_the_memory_of_the_plan(
    tmp_path: Path, extra_memory: float, mode: str
) -> None:
    workload = Workload(mode, "raw", 512)  # type: ignore[arg-type]
    asked = PlanSettings(extra_memory=extra_memory, threshold=0.05, dob=0.5)
    make_plan(hot(0), Topology.load("2x2-a100"), workload, asked).save(tmp_path / "plan")
    plan = Plan.load(tmp_path / "plan")
    found = assert_counts_are_true(plan)
    assert np.array_equal(found.memory[DEVICE].total, plan.cost.memory_bytes)
    assert not found.memory[DEVICE].unused.any()
    for t, table in enumerate(plan.tables):
        listed = plan.layout.locate(t, np.arange(table.rows)).group >= 0
        assert found.listed_accesses[t] == hot(0).table_accesses(t)[listed].sum(dtype=np.int64)
    made = replan(plan, hot(1), 10**9)
    again = assert_counts_are_true(made.plan)
    assert np.array_equal(again.memory[DEVICE].total, made.plan.cost.memory_bytes)
    assert made.moves.entries.size


@pytest.mark.parametrize("seed", range(8))
def test_the_tier_is_counted_apart(tmp_path: Path, seed: int) -> None:
    (profile,), topology, workload, asked = drawn(seed)
    make_plan(profile, topology, workload, asked).save(tmp_path / "plan")
    plan = Plan.load(tmp_path / "plan")
    assert plan.host is not None
    found = assert_counts_are_true(plan)
    assert np.array_equal(found.memory[DEVICE].total, plan.cost.memory_bytes)
    assert np.array_equal(found.memory[HOST].total, plan.host.cost.memory_bytes)
    assert not found.replicated[list(plan.tier)].any()
