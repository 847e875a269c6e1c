"""Parts of plans: every row keeps its holders and paths, and slots are as dense as the plan's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.plan.address_map import AddressMap, unpack
from oper.plan.layout import LOCAL
from oper.plan.plan import Plan
from oper.plan.plan_parts import part_of
from oper.tables.table import Table
from tests.support.examples import examples
from tests.support.planner.layouts import random_layout
from tests.support.planner.layouts import tables_of as tables_of_layout
from tests.support.runtime.runtime_plans import random_plan


def addresses(
    plan: Plan, table: int, map_of: Callable[[Plan, int], AddressMap] = AddressMap.of
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Field and slot of every row of a table for every rank, [M, rows] each."""
    every = torch.arange(plan.tables[table].rows)
    found = [unpack(map_of(plan, r).translate(table, every)) for r in range(plan.ranks)]
    fields, slots = (torch.stack(parts).numpy() for parts in zip(*found, strict=True))
    return fields, slots


def held_slots(plan: Plan) -> list[list[NDArray[Any]]]:
    """The slots of the rows that each rank holds, ascending, by width and rank."""
    found: list[list[list[Any]]] = [
        [[np.zeros(0, np.int64)] for _ in range(plan.ranks)] for _ in plan.layout.slots
    ]
    for table, width in enumerate(plan.layout.width_of_table):
        fields, slots = addresses(plan, table, AddressMap.of_copies)
        for rank in range(plan.ranks):
            found[width][rank].append(slots[rank][fields[rank] == LOCAL])
    return [[np.sort(np.concatenate(parts)) for parts in of_width] for of_width in found]


def assert_same_places(part: Plan, plan: Plan) -> None:
    """Every reader finds every row at the rank where it finds it by the whole plan."""
    for number, table in enumerate(part.tables):
        mine, _ = addresses(part, number)
        whole, _ = addresses(plan, plan.table_index(table.name))
        assert np.array_equal(mine, whole)


tables = st.lists(
    st.tuples(st.integers(1, 600), st.sampled_from([4, 8]), st.sampled_from(["sgd", "adam"])),
    min_size=2,
    max_size=6,
).map(
    lambda sizes: tuple(
        Table(f"t{n}", rows, dim, optimizer=optimizer)
        for n, (rows, dim, optimizer) in enumerate(sizes)
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
    st.data(),
)
def test_parts_of_any_plan(tables, seed, ranks, replicated, listed, mode, data):
    plan = random_plan(seed, tables, ranks, replicated=replicated, listed=listed, mode=mode)
    share = data.draw(st.lists(st.integers(0, 2), min_size=len(tables), max_size=len(tables)))
    parts = [
        part_of(plan, [t for t, n in enumerate(share) if n == number]) for number in set(share)
    ]
    widths = [(t.row_bytes, t.memory_bytes(mode)) for t in tables]
    total = {width: np.zeros(ranks, dtype=np.int64) for width in widths}
    for part in parts:
        assert_same_places(part, plan)
        for of_rank, size in zip(held_slots(part), part.layout.slots, strict=True):
            for slots, most in zip(of_rank, size, strict=True):
                assert np.array_equal(slots, np.arange(most))
        for width in set(part.layout.width_of_table.tolist()):
            (key,) = {
                (t.row_bytes, t.memory_bytes(mode))
                for t, w in zip(part.tables, part.layout.width_of_table, strict=True)
                if w == width
            }
            total[key] += part.layout.slots[width]
        assert_replicas_first(part)
    for table, width in enumerate(plan.layout.width_of_table):
        assert np.array_equal(total[widths[table]], plan.layout.slots[width])


def assert_replicas_first(plan: Plan) -> None:
    """Rows on all ranks have the same slots everywhere, the first ones."""
    everywhere: list[list[Any]] = [[] for _ in plan.layout.slots]
    for table, width in enumerate(plan.layout.width_of_table):
        fields, slots = addresses(plan, table, AddressMap.of_copies)
        held = slots[:, (fields == LOCAL).all(axis=0)]
        assert (held == held[0]).all()
        everywhere[width].append(held[0])
    for parts in everywhere:
        slots = np.sort(np.concatenate(parts))
        assert np.array_equal(slots, np.arange(len(slots))) or plan.ranks == 1


@given(st.integers(0, 1000), st.integers(1, 4), st.booleans())
def test_parts_of_plans_made_from_older_ones(seed, ranks, wide):
    random = np.random.default_rng(seed)
    rows = random.integers(1, 1500, 4).tolist()
    layout = random_layout(random, rows, ranks, wide=wide, moved=True)
    names = tables_of_layout(layout)
    plan = random_plan(seed, names, ranks)
    plan = Plan(**vars(plan) | {"layout": layout})
    part = part_of(plan, [3, 1])
    assert_same_places(part, plan)
    assert_replicas_first(part)
    (of_rank,) = held_slots(part)
    moved = 0
    for slots, most in zip(of_rank, part.layout.slots[0], strict=True):
        assert len(np.unique(slots)) == len(slots)
        assert slots.max(initial=-1) < most
        moved += int(most) - len(slots)
    stripes = part.layout.stripe_bitmap
    if stripes is None:  # no row of the two tables has left its stripe
        stripes = part.layout.bitmap
        assert not moved
    marked, frozen = (
        np.bitwise_count(bitmap[:, 1:]).sum() for bitmap in (part.layout.bitmap, stripes)
    )
    assert moved == marked - frozen


def test_a_plan_is_its_own_part():
    tables = (Table("a", 5, 4), Table("b", 7, 4), Table("c", 9, 8))
    plan = random_plan(0, tables, 2)
    assert part_of(plan, [1, 2, 0]) is plan
    assert part_of(plan, [2, 0]).tables == (tables[0], tables[2])


def test_parts_pool_their_own_tables() -> None:
    tables = tuple(Table(name, 10, 4) for name in "abc")
    plan = replace(random_plan(1, tables, 2), pooled_tables=("a", "c"))
    assert part_of(plan, [1, 2]).pooled_tables == ("c",)
    assert part_of(plan, [1]).pooled_tables == ()


def test_tables_of_the_tier_are_not_pooled() -> None:
    tables = (Table("a", 10, 4), Table("b", 10, 8))
    plan = random_plan(1, tables, 2, tier=(1,))
    with pytest.raises(OperError, match="table 'b': is in the hosts' memory"):
        replace(plan, pooled_tables=("a", "b"))
    with pytest.raises(OperError, match="table 'z': the plan has no such table; it has a, b"):
        replace(plan, pooled_tables=("z",))
