"""Which iterations are counted: one of each block, spread evenly, in whatever order it is asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.monitoring.sampled_iterations import SampledIterations


@given(st.integers(1, 100), st.integers(0, 1 << 40))
def test_one_of_each_block_is_counted(every: int, block: int) -> None:
    sampled = SampledIterations(every)
    assert sum(block * every + place in sampled for place in range(every)) == 1


@given(st.integers(1, 50), st.lists(st.integers(0, 10_000), max_size=50))
def test_ranks_agree_without_talking(every: int, iterations: list[int]) -> None:
    one, other = SampledIterations(every), SampledIterations(every)
    chosen = [iteration for iteration in range(10_001) if iteration in one]
    assert [i in other for i in iterations] == [i in chosen for i in iterations]


def test_places_in_blocks_are_spread_evenly() -> None:
    """What a script does every eight iterations is counted as often as what it does between."""
    sampled = SampledIterations(8)
    places = np.array([i % 8 for i in range(80_000) if i in sampled])
    counts = np.bincount(places, minlength=8)
    assert np.abs(counts - 1250).max() < 5 * np.sqrt(1250)


@pytest.mark.parametrize("every", [0, -3, 2.5, "x", True])
def test_other_numbers_are_refused(every: object) -> None:
    with pytest.raises(OperError, match="sample_every"):
        SampledIterations(every)  # type: ignore[arg-type]
