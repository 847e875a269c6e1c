"""Layouts put together and taken apart: every row keeps its address in every rank's map."""

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oper.plan.address_map import AddressMap
from oper.plan.layout import Layout, rank_map
from oper.plan.layout_parts import LayoutPart, join_layouts, select_layout
from tests.support.examples import examples
from tests.support.planner.layouts import random_layout, tables_of


def assert_same(one: Layout, other: Layout) -> None:
    """All arrays are equal, in type too, but that of codes, which may be wider."""
    for field in fields(Layout):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "orders":
            for order, same in zip(a, b, strict=True):
                assert np.array_equal(order, same)
            continue
        assert (a is None) == (b is None), field.name
        if a is not None:
            assert np.array_equal(a, b), field.name
            assert a.dtype == b.dtype or field.name == "codes", field.name


kinds = st.fixed_dictionaries(
    {"wide": st.booleans(), "moved": st.booleans(), "everywhere": st.booleans()}
)
sizes = st.lists(st.integers(1, 1500), min_size=1, max_size=3)


@examples(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), sizes, sizes, kinds, kinds)
def test_tables_keep_their_addresses(seed, ranks, rows, tier_rows, kind, tier_kind):
    random = np.random.default_rng(seed)
    layouts = [
        random_layout(random, n, ranks, groups=int(random.integers(2, 6)), **k)
        for n, k in ((rows, kind), (tier_rows, tier_kind))
    ]
    shuffled = random.permutation(len(rows) + len(tier_rows))
    numbers = np.sort(shuffled[: len(rows)]), np.sort(shuffled[len(rows) :])
    parts = [LayoutPart(one, tables) for one, tables in zip(layouts, numbers, strict=True)]
    whole = join_layouts(parts)
    for part in parts:
        for index, number in enumerate(part.tables):
            ids = np.arange(int(part.layout.rows[index]))
            for rank in range(ranks):
                mine = part.layout.addresses(index, ids, rank)
                assert np.array_equal(mine, whole.addresses(int(number), ids, rank))
                mapped = AddressMap(tables_of(whole), whole, rank_map(whole, rank))
                assert np.array_equal(mine, mapped.translate(int(number), ids).numpy())
        widths = whole.width_of_table[part.tables]
        assert not np.isin(whole.width_of_table[np.setdiff1d(shuffled, part.tables)], widths).any()
        assert_same(select_layout(whole, part.tables), _used(part.layout))


def _used(layout: Layout) -> Layout:
    """The layout without what none of its tables uses: patterns, and stripes by an older bitmap
    that is the same."""
    patterns = np.unique(layout.pattern_of)
    same = layout.stripe_bitmap is not None and np.array_equal(layout.stripe_bitmap, layout.bitmap)
    changes: dict[str, Any] = {
        "orders": tuple(layout.orders[n] for n in patterns),
        "pattern_of": np.searchsorted(patterns, layout.pattern_of),
        "stripe_bitmap": None if same else layout.stripe_bitmap,
    }
    if layout.everywhere_group is not None and (layout.everywhere_group < 0).all():
        changes |= {"everywhere_bitmap": None, "everywhere_group": None, "everywhere_first": None}
    return Layout(**{f.name: getattr(layout, f.name) for f in fields(Layout)} | changes)


def test_tables_that_share_an_arena_keep_their_slots_in_it():
    layout = random_layout(np.random.default_rng(0), [5, 7], 2)
    chosen = select_layout(layout, np.array([1]))
    assert np.array_equal(chosen.slots, layout.slots)
    for rank in range(2):
        ids = np.arange(7)
        assert np.array_equal(chosen.addresses(0, ids, rank), layout.addresses(1, ids, rank))
