"""Stripes against the pattern written out position by position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oper.plan.layout import LONGEST_PERIOD
from oper.planner.row_placement.striping import make_stripes, period


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 0.1),
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
)
def test_rows_on_each_rank_are_those_of_the_repeated_pattern(
    shares: list[float], table_rows: list[int]
) -> None:
    made = make_stripes(np.array(shares), np.array(table_rows))
    position = 0
    for table, rows in enumerate(table_rows):
        assert made.rotation[table] == position % len(made.order)
        ranks = made.order[(position + np.arange(rows)) % len(made.order)]
        assert made.rows[table].tolist() == np.bincount(ranks, minlength=len(shares)).tolist()
        position += rows


@given(st.integers(2, 16), st.lists(st.integers(0, 10_000), min_size=1, max_size=30))
def test_equal_shares_are_even_over_all_tables_together(ranks: int, table_rows: list[int]) -> None:
    made = make_stripes(np.ones(ranks), np.array(table_rows))
    total = made.rows.sum(axis=0)
    assert len(made.order) == ranks
    assert total.max() - total.min() <= 1


def test_any_stretch_of_an_unequal_period_keeps_the_proportions() -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    order = period(shares)
    assert len(order) <= LONGEST_PERIOD
    for begin in range(0, len(order), 997):
        stretch = np.take(order, np.arange(begin, begin + 2000), mode="wrap")
        found = np.bincount(stretch, minlength=4) / 2000
        np.testing.assert_allclose(found, shares, atol=0.002)


def test_a_rank_without_memory_left_gets_no_striped_row() -> None:
    assert 1 not in period(np.array([1.0, 0.0, 2.0]))
