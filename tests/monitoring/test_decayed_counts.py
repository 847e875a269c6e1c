"""Counts of periods: nothing is lost but by halving, and halving is right in the mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.logs.batches.batch import Batch, Jagged, Location
from oper.monitoring.decayed_counts import DecayedCounts, halved
from oper.profiling.profile import Profile
from oper.profiling.row_counters import RowCounters
from oper.tables.table import Table

TABLES = (Table("bags", 40, 8), Table("ones", 30, 8))


def counted(seed: int, samples: int = 50) -> Profile:
    """The counts of random samples: bags of 0 to 3 ids, and one id."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, samples).astype(np.int32)
    ids = {
        "bags": Jagged((random.zipf(1.5, int(lengths.sum())) - 1) % 40, lengths),
        "ones": Jagged((random.zipf(1.5, samples) - 1) % 30),
    }
    counters = RowCounters(TABLES)
    counters.add(Batch(samples, ids, Location("made up", 0, "sample")), {"bags": 0, "ones": 1})
    return counters.profile({})


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_half_of_each_count_rounded(seed: int, choice: int) -> None:
    whole = counted(seed)
    half = halved(whole, np.random.default_rng(choice))
    doubled = 2 * half.accesses.astype(np.int64) - whole.accesses
    assert np.abs(doubled).max() <= 1
    assert not doubled[whole.accesses % 2 == 0].any()
    assert half.samples == whole.samples // 2
    for table in range(2):
        accesses = half.table_accesses(table)
        samples_with_row = half.table_samples_with_row(table)
        assert (samples_with_row <= accesses).all()
        assert ((samples_with_row > 0) == (accesses > 0)).all()
    bags = half.bag_lengths
    assert bags is not None
    assert (bags.distinct >= bags.filled_bags).all()
    assert (bags.distinct <= bags.ids_of_tables).all()


def test_rounding_is_right_in_the_mean() -> None:
    whole = counted(0, 500)
    many = [halved(whole, np.random.default_rng(n)).accesses for n in range(2000)]
    odd = whole.accesses % 2 == 1
    assert odd.sum() > 10
    means = np.mean(many, axis=0)[odd]
    np.testing.assert_allclose(means, whole.accesses[odd] / 2, atol=5 * 0.5 / np.sqrt(2000))


def test_a_period_weighs_half_as_much_with_each_later_one() -> None:
    counts, periods = DecayedCounts(), [counted(seed, 20_000) for seed in range(4)]
    for number, period in enumerate(periods):
        counts.add([period])
        window = counts.end_period()
        assert window is not None
        np.testing.assert_array_equal(window.accesses, period.accesses)
        assert (window.preceding is None) == (number == 0)
    total = counts.total()
    assert total is not None
    weighed = sum(p.accesses / 2.0 ** (3 - number) for number, p in enumerate(periods))
    # Three times a half of at most 1 is rounded.
    np.testing.assert_allclose(total.accesses, weighed, atol=1.5)
    assert total.samples == 20_000 * (1 + 1 / 2 + 1 / 4 + 1 / 8)


def test_the_running_period_counts_whole_and_stays_open() -> None:
    counts = DecayedCounts()
    assert counts.total() is None
    assert counts.end_period() is None
    first, second = counted(1), counted(2)
    counts.add([first])
    counts.end_period()
    counts.add([second])
    total, again = counts.total(), counts.total()
    assert total is not None
    assert again is not None
    np.testing.assert_array_equal(total.accesses, again.accesses)
    assert (total.accesses >= second.accesses).all()
    counts.add([second])  # of another rank, or a later merge
    window = counts.end_period()
    assert window is not None
    np.testing.assert_array_equal(window.accesses, 2 * second.accesses)
    assert window.preceding is not None
    np.testing.assert_array_equal(window.preceding.accesses, first.accesses)


def test_a_period_without_counts_only_halves() -> None:
    counts = DecayedCounts()
    counts.add([counted(3, 1000)])
    counts.end_period()
    assert counts.end_period() is None
    total = counts.total()
    assert total is not None
    assert total.samples == pytest.approx(1000)
    counts.add([counted(4, 10)])
    later = counts.total()
    assert later is not None
    assert later.samples == 510
