"""Greedy placement against its rule, partition by partition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.workload import Workload
from oper.planner.class_placement.greedy import place_greedily
from oper.planner.class_placement.partitions import partitions
from tests.support.planner.instances import make_classes

WORKLOAD = Workload("inference", "raw", 64)


@given(
    accesses=st.lists(st.integers(0, 200), min_size=1, max_size=8),
    rows=st.integers(1, 40),
    ranks=st.integers(1, 5),
    without=st.integers(0, 1),
)
def test_partitions_go_to_the_rank_with_the_least_work_for_its_share(
    accesses: list[int], rows: int, ranks: int, without: int
) -> None:
    classes = make_classes(accesses, [rows] * len(accesses), WORKLOAD, ranks)
    shares = np.arange(1.0, ranks + 1)
    shares[: min(without, ranks - 1)] = 0
    found = place_greedily(classes, classes.rows, np.zeros(ranks), shares, 0.05, 1e-9)
    parts = partitions(classes, found.partitions.threshold)
    listed = int(parts.listed.sum())
    load = np.zeros(ranks)
    read = classes.S * classes.R
    work = np.bincount(parts.run_partition, parts.run_rows * read[parts.run_class])
    for partition in range(listed):
        rank = min((r for r in range(ranks) if shares[r]), key=lambda r: (load[r], r))
        where = parts.run_partition[: len(found.run_rank)] == partition
        assert set(found.run_rank[where]) == {rank}
        load[rank] += work[partition] * (1 / shares[rank])
