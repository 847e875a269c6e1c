"""The schedule of a migration and the map that follows it, beside rows that move one by one."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.plan import Plan
from oper.runtime.migration.changed_rows import ChangedRows, changed_rows
from oper.runtime.migration.movable_rows import MovableRows
from oper.runtime.migration.schedule import Schedule, SlotPool
from oper.tables.table import Table
from tests.support.examples import examples
from tests.support.runtime.runtime_plans import random_plan

Copies = dict[tuple[int, int], dict[int, int]]  # slot by rank, of each table and row


def places_of(plan: Plan) -> Copies:
    """Where all copies of all rows are, by the maps of all ranks."""
    found: Copies = {}
    for rank in range(plan.ranks):
        address_map = AddressMap.of_copies(plan, rank)
        for t, table in enumerate(plan.tables):
            at = address_map.translate(t, torch.arange(table.rows)).tolist()
            for row, address in enumerate(at):
                copies = found.setdefault((t, row), {})
                if address >> SLOT_BITS == LOCAL:
                    copies[rank] = address & SLOT_MASK
    return found


def read_from(plan: Plan, rank: int, table: int) -> list[tuple[int, int]]:
    """The rank and slot from which a rank reads each row of a table."""
    at = AddressMap.of(plan, rank).translate(table, torch.arange(plan.tables[table].rows)).tolist()
    return [
        (rank if address >> SLOT_BITS == LOCAL else address >> SLOT_BITS, address & SLOT_MASK)
        for address in at
    ]


def move_one_by_one(
    copies: Copies, rows: ChangedRows, schedule: Schedule, moving: list[int]
) -> None:
    """Move the rows of a step: all of them leave, and then they come."""
    for n in moving:
        copies[int(rows.table[n]), int(rows.id[n])] = {}
    width_of = dict(zip(rows.table.tolist(), rows.width.tolist(), strict=True))
    taken = {
        (w, rank, slot)
        for (table, _), of_row in copies.items()
        if (w := width_of.get(table)) is not None
        for rank, slot in of_row.items()
    }
    for n in moving:
        slot, w = int(schedule.slot[n]), int(rows.width[n])
        for rank in np.flatnonzero(rows.sets.holds[rows.after[n]]).tolist():
            assert (w, rank, slot) not in taken, "a slot that another row has"
            taken.add((w, rank, slot))
            copies[int(rows.table[n]), int(rows.id[n])][rank] = slot


def received(rows: ChangedRows, schedule: Schedule, moving: list[int], sizes: np.ndarray) -> int:
    """The most bytes that a rank copies in a step."""
    copied = [n for n in moving if not schedule.stays[n]]
    each = rows.sets.holds[rows.after[copied]] * sizes[rows.width[copied]][:, None]
    return int(each.sum(axis=0).max(initial=0))


plan_cases = st.fixed_dictionaries(
    {
        "sizes": st.lists(
            st.tuples(st.integers(1, 600), st.sampled_from([4, 8])), min_size=1, max_size=3
        ),
        "ranks": st.integers(1, 4),
        "mode": st.sampled_from(["training", "inference"]),
        "shares": st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=4),
        "listed": st.sampled_from([0.0, 0.5, 1.0]),
        "seed": st.integers(0, 1000),
    }
)


@examples(20)
@given(plan_cases, st.sampled_from([1, 200, 5000]))
def test_every_row_has_a_place_of_its_own_in_every_step(case, bytes_per_step):
    tables = tuple(Table(f"t{n}", rows, dim) for n, (rows, dim) in enumerate(case["sizes"]))
    plans = [
        random_plan(
            case["seed"] + n, tables, case["ranks"], replicated=share, listed=case["listed"],
            mode=case["mode"],
        )
        for n, share in enumerate(case["shares"])
    ]  # fmt: skip
    now, pool = plans[0], SlotPool(plans[0].layout.slots)
    sizes = np.array([16, 32, 48])[: len(now.layout.slots)]
    for wanted in plans[1:]:
        rows = changed_rows(now, wanted)
        schedule = Schedule.of(rows, pool, sizes, bytes_per_step)
        assert sorted(schedule.order.tolist()) == list(range(len(rows)))
        copies = places_of(now)
        movable = MovableRows(now.layout, rows, int(schedule.most_slots.max(initial=1)))
        moving = replace(now, layout=movable.layout)
        assert places_of(moving) == copies, "rows are listed where they are"
        ends = [int(n) for n in schedule.starts[1:]]
        checked = {*ends[:2], *ends[-1:]}
        for first, end in zip(schedule.starts.tolist(), ends, strict=False):
            step = schedule.order[first:end].tolist()
            assert len(step) == 1 or received(rows, schedule, step, sizes) <= bytes_per_step
            move_one_by_one(copies, rows, schedule, step)
            movable.move(
                schedule.order[first:end],
                rows.after[schedule.order[first:end]],
                schedule.slot[schedule.order[first:end]],
            )
            if end in checked:
                assert places_of(moving) == copies
        pool = schedule.pool
        now = replace(now, layout=replace(movable.layout, slots=pool.ends))
        for w in range(len(now.layout.slots)):
            for rank in range(now.ranks):
                mine = [
                    of_row[rank]
                    for (t, _), of_row in places_of(now).items()
                    if rank in of_row and now.layout.width_of_table[t] == w
                ]
                assert max(mine, default=-1) < pool.ends[w, rank]
        assert_read_as(now, wanted)


def assert_read_as(now: Plan, wanted: Plan) -> None:
    """Every rank reads every row from the rank from which another plan has it read."""
    for rank in range(now.ranks):
        for t in range(len(now.tables)):
            mine, theirs = read_from(now, rank, t), read_from(wanted, rank, t)
            assert [r for r, _ in mine] == [r for r, _ in theirs]


def test_plans_with_tables_in_another_order_are_followed_by_name():
    tables = (Table("a", 300, 8), Table("b", 200, 8), Table("c", 50, 4))
    now, other = random_plan(1, tables, 3), random_plan(2, tables[::-1], 3)
    rows = changed_rows(now, other)
    schedule = Schedule.of(rows, SlotPool(now.layout.slots), np.array([16, 32]), 1 << 20)
    movable = MovableRows(now.layout, rows, int(schedule.most_slots.max()))
    movable.move(schedule.order, rows.after[schedule.order], schedule.slot[schedule.order])
    moved = replace(now, layout=movable.layout)
    for rank in range(3):
        for t in range(3):
            mine, theirs = read_from(moved, rank, t), read_from(other, rank, 2 - t)
            assert [r for r, _ in mine] == [r for r, _ in theirs]


def test_a_plan_that_is_followed_already_moves_nothing():
    plan = random_plan(1, (Table("a", 300, 8),), 3)
    rows = changed_rows(plan, plan)
    schedule = Schedule.of(rows, SlotPool(plan.layout.slots), np.array([32]), 1 << 20)
    assert (len(rows), schedule.steps) == (0, 0)
