"""Lengths of bags: added, joined, selected and summarised as counters of pairs are."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.tables.bag_lengths import BagLengths, BagLengthSums, BagSummary

TABLES = 4
Pairs = list[tuple[int, int, int]]
drawn_pairs = st.lists(
    st.tuples(
        st.integers(0, TABLES - 1), st.sampled_from([0, 1, 2, 9, 700, 2**31 - 1]), st.integers(0, 9)
    ),
    max_size=20,
)


def array(pairs: Pairs) -> np.ndarray:
    return np.array(pairs, dtype=np.int64).reshape(len(pairs), 3)


def ids_of(pairs: Pairs) -> np.ndarray:
    """The ids of the bags of each table, as many as distinct rows where none repeats."""
    ids = np.zeros(TABLES, np.int64)
    for table, length, bags in pairs:
        ids[table] += length * bags
    return ids


def lengths_of(pairs: Pairs) -> BagLengths:
    return BagLengths.of_pairs(array(pairs), ids_of(pairs))


def counter(pairs: Pairs) -> Counter[tuple[int, int]]:
    counted: Counter[tuple[int, int]] = Counter()
    for table, length, bags in pairs:
        counted[table, length] += bags
    return +counted


def as_counter(lengths: BagLengths) -> Counter[tuple[int, int]]:
    keys = [(table, length) for table, length, _ in lengths.pairs.tolist()]
    assert keys == sorted(set(keys))
    return Counter({(t, n): bags for t, n, bags in lengths.pairs.tolist()})


@given(parts=st.lists(drawn_pairs, min_size=1, max_size=4))
def test_sums_are_those_of_counters(parts: list[Pairs]) -> None:
    each = [lengths_of(pairs) for pairs in parts]
    together = counter([pair for pairs in parts for pair in pairs])
    summed = BagLengths.sum(each)
    assert as_counter(summed) == together
    np.testing.assert_array_equal(summed.distinct, summed.ids_of_tables)
    sums = BagLengthSums()
    sums._limit = 10  # so that sums are taken in between
    for pairs in parts:
        sums.add(array(pairs))
    assert as_counter(BagLengths.of_pairs(sums.pairs, summed.distinct)) == together
    joined = BagLengths.joined(each)
    assert joined.tables == TABLES * len(parts)
    np.testing.assert_array_equal(joined.distinct, joined.ids_of_tables)
    assert as_counter(joined) == counter(
        [(t + TABLES * n, length, bags) for n, p in enumerate(parts) for t, length, bags in p]
    )
    chosen = sorted({*range(TABLES, joined.tables, TABLES), joined.tables - 1})
    selected = joined.select(chosen)
    np.testing.assert_array_equal(selected.distinct, selected.ids_of_tables)
    assert [selected.of_table(n)[1].tolist() for n in range(selected.tables)] == [
        joined.of_table(n)[1].tolist() for n in chosen
    ]


@given(pairs=drawn_pairs, repeat=st.floats(0, 1))
def test_summaries_are_those_of_the_bags(pairs: Pairs, repeat: float) -> None:
    filled, ids = lengths_of(pairs).filled_bags, ids_of(pairs)
    distinct = ids - ((ids - filled) * repeat).astype(np.int64)
    lengths = BagLengths.of_pairs(array(pairs), distinct)
    assert as_counter(BagLengths.checked(lengths.pairs, distinct)) == as_counter(lengths)
    for table in range(TABLES):
        bags = sorted(n for t, n, number in pairs if t == table for _ in range(number))
        assert lengths.bags_of_tables[table] == len(bags)
        assert lengths.ids_of_tables[table] == sum(bags)
        found = lengths.summary(table)
        if not bags:
            assert found == BagSummary(0, 0.0, 0.0, 0, 0, 1.0)
            continue
        assert found.bags == len(bags)
        assert found.empty_share == bags.count(0) / len(bags)
        assert found.mean == lengths.mean_lengths[table] == pytest.approx(sum(bags) / len(bags))
        assert found.percentile_99 == bags[-(-99 * len(bags) // 100) - 1]
        assert found.longest == bags[-1]
        new, later = distinct[table] - filled[table], ids[table] - filled[table]
        assert found.new_share == (new / later if later else 1)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (np.zeros((2, 2), np.int64), "int64 \\[pairs, 3\\]"),
        (np.zeros((2, 3), np.int32), "int64 \\[pairs, 3\\]"),
        (array([(4, 1, 1)]), "one of 4"),
        (array([(-1, 1, 1)]), "one of 4"),
        (array([(0, -1, 1)]), "out of range"),
        (array([(0, 1 << 31, 1)]), "out of range"),
        (array([(0, 1, 0)]), "out of range"),
        (array([(0, 1, 5), (0, 1, 5)]), "not ascending"),
        (array([(1, 1, 5), (0, 1, 5)]), "not ascending"),
        (array([(0, 1 << 30, 1 << 33)]), "ids"),
    ],
)
def test_other_pairs_are_refused(pairs: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BagLengths.checked(pairs, np.zeros(TABLES, np.int64))


@pytest.mark.parametrize("distinct", [-1, 4, 11])
def test_distinct_rows_are_from_bags_to_ids(distinct: int) -> None:
    pairs = array([(0, 2, 5), (0, 0, 3)])
    assert BagLengths.checked(pairs[::-1], np.array([5])).new_shares.tolist() == [0]
    assert BagLengths.checked(pairs[::-1], np.array([10])).new_shares.tolist() == [1]
    with pytest.raises(ValueError, match="fewer than bags, or more than ids"):
        BagLengths.checked(pairs[::-1], np.array([distinct]))
