"""Partitions against the walk row by row that §4.1 describes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.workload import Workload
from oper.planner.class_placement.partitions import partitions
from tests.support.planner.instances import make_classes

WORKLOAD = Workload("inference", "raw", 64)


def walk(rows: list[tuple[int, int]], threshold: float) -> list[tuple[int, int, int, bool]]:
    """(rows, bytes, accesses, access-bounded) of each partition, a row at a time."""
    limit_bytes = max(int(threshold * sum(m for m, _ in rows)), 1)
    limit_accesses = max(int(threshold * sum(f for _, f in rows)), 1)
    found, n, held, accesses = [], 0, 0, 0
    for m, f in rows:
        by_bytes = (limit_bytes - held) // m
        by_accesses = (limit_accesses - accesses) // f if f else 1
        if n and (by_bytes < 1 or by_accesses < 1):
            found.append((n, held, accesses, by_accesses < by_bytes))
            n = held = accesses = 0
        if not n and (m > limit_bytes or f > limit_accesses):
            found.append((1, m, f, f > limit_accesses))
            continue
        n, held, accesses = n + 1, held + m, accesses + f
    if n:
        found.append((n, held, accesses, False))
    return found


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30), st.integers(0, 1)), min_size=1),
    st.sampled_from([0.5, 0.1, 0.03, 0.001]),
)
def test_partitions_are_those_of_the_walk(
    drawn: list[tuple[int, int, int]], threshold: float
) -> None:
    classes = make_classes(
        [f for f, _, _ in drawn],
        [n for _, n, _ in drawn],
        WORKLOAD,
        2,
        widths=((16, 16), (64, 64)),
        width=[w for _, _, w in drawn],
    )
    found = partitions(classes, threshold)
    order = np.repeat(np.arange(len(classes)), classes.rows)
    rows = [(int(classes.m[c]), int(classes.accesses[c])) for c in order]
    expected = walk(rows, threshold)
    counted = np.bincount(found.run_partition, weights=found.run_rows, minlength=len(found))
    assert [int(n) for n in counted] == [n for n, _, _, _ in expected]
    assert found.bytes.tolist() == [m for _, m, _, _ in expected]
    assert found.accesses.tolist() == [f for _, _, f, _ in expected]
    for mine, theirs in zip(found.access_bounded, expected, strict=True):
        assert mine == theirs[3]
    total = np.bincount(found.run_class, weights=found.run_rows, minlength=len(classes))
    assert total.tolist() == classes.rows.tolist()


def test_hot_rows_are_access_bounded_and_a_small_part_of_memory() -> None:
    """The paper's figure: over 90 % of accesses in under 5 % of bytes, for a skewed table."""
    counts, rows = np.unique((1e7 / np.arange(1, 200_001) ** 1.2).astype(int), return_counts=True)
    classes = make_classes(counts.tolist(), rows.tolist(), WORKLOAD, 8, samples=10**8)
    found = partitions(classes, 0.001)
    listed = found.listed
    assert found.accesses[listed].sum() > 0.9 * found.accesses.sum()
    assert found.bytes[listed].sum() < 0.05 * found.bytes.sum()
