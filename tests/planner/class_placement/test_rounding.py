"""Leftover rows go to the same holder sets, whether these are few or many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.planner.class_placement import rounding


@given(st.integers(2, 30), st.integers(1, 12), st.integers(0, 2**32 - 1), st.booleans())
def test_many_sets_get_the_rows_that_few_get(
    sets: int, classes: int, seed: int, equal: bool
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3 * sets, classes)
    traffic = rng.integers(1, 4, classes).astype(float)
    shares = np.full(sets, 1 / sets) if equal else rng.integers(0, 3, (classes, sets)).astype(float)
    shares[..., 0] += 1  # some set of each class is used
    found = []
    for many in (0, sets):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounding, "MANY_SETS", many)
            load = np.zeros(sets)
            found.append((rounding.split_evenly(rows, shares, load, traffic), load))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
