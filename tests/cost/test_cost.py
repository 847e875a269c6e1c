"""The cost model against sums written out row by row, and expected values against enumeration."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.allreduce import Method, allreduce_cost
from oper.cost.expected_reads import expected_reads
from oper.cost.holder_sets import (
    Sums,
    cheapest_holder_sets,
    everywhere_set,
)
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.topology.latency import Latency
from oper.topology.links import SHARED
from oper.topology.topology import Topology


@pytest.mark.parametrize(
    ("method", "memory_bytes"),
    # Two ranks, two replicas of 64 bytes, of which 1.5 are touched by a rank and 1.75 by any.
    [
        ("none", 0.0),
        ("dense", 128 + 128 / 2),
        ("bitmap", 112 + 112 / 2 + 2 / 8),
        ("allgather", 1.5 * 68),
    ],
)
def test_memory_of_the_allreduce(method: Method, memory_bytes: float) -> None:
    owned, replicas = np.array([1e6]), np.array([128.0])
    both = np.r_[owned, replicas]
    sums = Sums(
        rows=np.r_[owned, 2.0],
        memory_bytes=both,
        row_bytes=both,
        accesses=both,
        read_rows=both,
        read_bytes=both,
        gradient_bytes=np.r_[owned, 1.5 * 64],
        union_bytes=np.r_[owned, 1.75 * 64],
        gather_bytes=np.r_[owned, 1.5 * 68],
        node_rows=np.zeros((2, 0)),
        node_bytes=np.zeros((2, 0)),
        pooled_read_rows=np.zeros(2),
        pooled_read_bytes=np.zeros(2),
        pooled_gradient_bytes=np.zeros(2),
    )
    cost = allreduce_cost(Topology.load("cpu:2"), method)
    assert cost.memory_bytes(sums.total(np.array([False, True])), 2) == memory_bytes


def test_without_a_fetch_it_is_the_usual_one_of_the_nodes() -> None:
    asked = Workload("training", batch_size=64)
    assert asked.on(1) == Workload("training", "raw", 64)
    assert asked.on(2) == Workload("training", "distinct", 64)
    assert Workload("training", "raw", 64).on(2) == Workload("training", "raw", 64)
    assert asked.fetch is None  # what `on` left as it was
    with pytest.raises(OperError, match="without fetch"):
        expected_reads(np.array([1]), np.array([1]), 7, asked, 2)
    with pytest.raises(OperError, match="fetch='every'"):
        Workload("training", "every", 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples_with_row", [0, 1, 3, 7])
def test_touched_is_the_share_of_batches_that_contain_the_row(samples_with_row: int) -> None:
    samples, batch, ranks = 7, 6, 2
    workload = Workload("training", "distinct", batch)
    reads, touched, union = expected_reads(
        np.array([samples_with_row]), np.array([samples_with_row]), samples, workload, ranks
    )

    def share(drawn: int) -> float:
        draws = list(combinations(range(samples), drawn))
        return sum(any(i < samples_with_row for i in draw) for draw in draws) / len(draws)

    assert touched[0] == pytest.approx(share(batch // ranks), abs=1e-9)
    assert union[0] == pytest.approx(share(batch), abs=1e-9)
    assert reads[0] == touched[0]


def test_measured_ratios_keep_the_union_between_one_rank_and_all_of_them() -> None:
    workload, counts = Workload("training", "distinct", 40), np.array([1, 20, 900])

    def found(rank_ratio: float, union_ratio: float) -> tuple[np.ndarray, np.ndarray]:
        return expected_reads(counts, counts, 1000, workload, 4, rank_ratio, union_ratio)[1:]

    touched, union = found(0.9, 0.01)
    np.testing.assert_array_equal(union, touched)
    touched, union = found(0.9, 50.0)
    np.testing.assert_array_equal(union, np.minimum(4 * touched, 1.0))
    touched, union = found(0.9, 0.8)
    assert ((touched < union) & (union < 4 * touched)).sum() == 2  # the ratios themselves decide


def test_touched_is_binomial_where_the_batch_is_not_below_the_log() -> None:
    workload = Workload("inference", "raw", 1000)
    reads, touched, union = expected_reads(np.array([30]), np.array([20]), 100, workload, 4)
    assert reads[0] == pytest.approx(30 / 100 * 250)
    assert touched[0] == pytest.approx(1 - 0.8**250)
    assert union[0] == pytest.approx(1 - 0.8**1000)


@given(st.integers(1, 10**9), st.floats(0, 1), st.floats(0, 1))
def test_touched_grows_with_the_batch_and_stays_a_chance(
    samples: int, share: float, part: float
) -> None:
    samples_with_row = np.array([int(share * samples)])
    batch = max(int(part * samples), 2)
    workload = Workload("training", "raw", batch)
    _, touched, union = expected_reads(samples_with_row, samples_with_row, samples, workload, 2)
    assert 0 <= touched[0] <= union[0] <= min(1, 2 * touched[0]) + 1e-12
    assert touched[0] <= batch / 2 * samples_with_row[0] / samples * (1 + 1e-4) + 1e-12


def test_readers_take_their_own_copy_then_the_nearest() -> None:
    topology = Topology.load("2x4-a100")
    holds = np.zeros((1, 8), dtype=bool)
    holds[0, [1, 6]] = True
    sets = cheapest_holder_sets(holds, Charges.of(topology).read_seconds)
    assert sets.source.tolist() == [[1, 1, 1, 1, 6, 6, 6, 6]]
    both = sets + everywhere_set(8)
    assert both.readers.tolist() == [[0, 4, 0, 0, 0, 0, 4, 0], [1] * 8]


def test_holders_read_a_cheaper_copy_than_their_own() -> None:
    """Rank 1's own rows take it 9 a byte. Those of rank 0 take it 2 and rank 0 one more; where both
    share memory rank 0 has no part in it. Rank 2 has a link as dear as its own memory."""
    cost = np.array([[1, 2, 2], [2, 9, 9], [7, 7, 7]], dtype=float)
    holds = np.array([[1, 1, 1], [0, 1, 1]], dtype=bool)
    linked = Topology("linked", (0, 0, 0), cost, 1.0, Latency.of_hops(0.0))
    prices = Charges.of(linked).read_seconds
    assert prices.tolist() == [[1, 11, 9], [3, 9, 16], [8, 16, 7]]
    assert cheapest_holder_sets(holds, prices).source.tolist() == [[0, 0, 2], [2, 1, 2]]
    assert np.argwhere(Charges.of(linked).cheaper_than_own).tolist() == [[1, 0]]
    shared = replace(linked, memory=(SHARED,))
    prices = Charges.of(shared).read_seconds
    assert prices.tolist() == cost.tolist()
    assert cheapest_holder_sets(holds, prices).source.tolist() == [[0, 0, 2], [1, 1, 2]]


def test_allreduce_bytes_follow_the_published_formulas() -> None:
    """Ring 2(P-1)/P·R·row; bitmap P·R/8 + ring of the union; allgather (P-1)·u·(row + 4)."""
    topology = Topology.load("dgx-a100")
    P, bandwidth = 8, topology.allreduce_bandwidth
    assert allreduce_cost(topology, "dense").row * bandwidth == pytest.approx(2 * 7 / 8)
    assert allreduce_cost(topology, "bitmap").count * bandwidth == pytest.approx(P / 8)
    assert allreduce_cost(topology, "bitmap").union * bandwidth == pytest.approx(2 * 7 / 8)
    assert allreduce_cost(topology, "allgather").gather * bandwidth == pytest.approx(7)
