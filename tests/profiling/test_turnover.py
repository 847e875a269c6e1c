"""Rows that come and go from one window to the next, counted row by row."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.expected_counts import SELDOM, Turnover
from oper.profiling.profile import Profile, in_order, merge, write_windows
from oper.profiling.turnover import turnover_between
from oper.tables.table import Table
from tests.support.examples import examples

counts = st.lists(st.integers(0, 9), min_size=3, max_size=30)


def window(tables: list[list[int]], samples: int = 100) -> Profile:
    """Return a window of tables without bags."""
    made = tuple(Table(f"t{t}", len(rows), dim=4) for t, rows in enumerate(tables))
    accesses = np.concatenate([np.array(rows, np.uint32) for rows in tables])
    return Profile(made, samples, accesses, np.zeros(0, np.uint32), (False,) * len(made))


@given(st.lists(st.tuples(counts, st.integers(0, 1 << 30)), min_size=1, max_size=3))
@examples(100)
def test_turnover_counts_reads_before_and_after(given: list[tuple[list[int], int]]) -> None:
    before = [rows for rows, _ in given]
    after = [np.random.default_rng(seed).permutation(rows).tolist() for rows, seed in given]
    found = turnover_between(window(before), window(after, samples=50))
    for t, (rows, later) in enumerate(zip(before, after, strict=True)):
        for n in range(SELDOM + 2):
            of_group = [k for k, reads in enumerate(rows) if min(reads, SELDOM + 1) == n]
            assert found.rows[t, n] == len(of_group)
            assert found.alive[t, n] == sum(later[k] > 0 for k in of_group)
            assert found.earlier[t, n] == sum(rows[k] for k in of_group)
            assert found.later[t, n] == 2 * sum(later[k] for k in of_group)


def test_a_window_knows_its_turnover_and_a_sum_that_of_its_last_window(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    windows = [window([random.poisson(1, 40).tolist(), [3, 0]]) for _ in range(3)]
    in_order(windows)
    for number, each in enumerate(windows):
        (tmp_path / f"window-{number:03d}").mkdir()
        each.write(tmp_path / f"window-{number:03d}", sparse=True)
    write_windows(tmp_path, windows)
    assert Profile.load(f"{tmp_path}@0").turnover is None
    same(Profile.load(f"{tmp_path}@2").turnover, turnover_between(windows[1], windows[2]))
    before = merge(windows[:2])
    whole = Profile.load(tmp_path)
    same(whole.turnover, turnover_between(before, windows[2]))
    selected = Profile.load(tmp_path).select([1])
    same(selected.turnover, turnover_between(before, windows[2]).select([1]))
    assert merge(windows).turnover is None  # the parts need not follow each other


@pytest.mark.parametrize(("samples", "known"), [(49, False), (50, True), (200, True), (201, False)])
def test_a_window_of_another_size_measures_nothing(samples: int, known: bool) -> None:
    """How many rows are new depends on how many were seen before."""
    first, second = window([[1, 0, 2]], samples), window([[0, 1, 2]])
    in_order([first, second])
    assert (second.turnover is not None) == known
    assert replace(second, open_preceding=None).turnover is None


def same(found: Turnover | None, expected: Turnover) -> None:
    assert found is not None
    for name, values in vars(expected).items():
        assert np.array_equal(getattr(found, name), values), name
