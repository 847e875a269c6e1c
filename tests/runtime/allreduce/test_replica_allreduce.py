"""The replicas' AllReduce against sums in NumPy: kernels, methods on ranks that are processes,
their bytes against the formulas, and the check of equal replicas."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.allreduce.replica_allreduce import BucketReplicas, ReplicaAllReduce
from oper.runtime.allreduce.replica_check import UnequalReplica, unequal_replicas
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from tests.support.examples import examples
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.worlds import Worlds

METHODS = ("bitmap", "dense", "allgather")
COUNTERS = ("marked", "published", "reduced", "applied")
# Ranks that share memory have equal numbers.
ONE_NODE = {n: [0] * n for n in range(1, 5)}
OWN_NODES = {n: list(range(n)) for n in range(1, 5)}


@dataclass(frozen=True)
class Case:
    """Gradients of all ranks, each made from the seed. `touched`: the share of its replicas that a
    rank touches in each step."""

    seed: int
    ranks: int
    buckets: tuple[tuple[int, int], ...]  # replicas, dim
    touched: tuple[float, ...]
    spread: bool = False  # the replicas of a bucket lie among others' slots

    def replicas(self) -> list[np.ndarray]:
        """The slots of each bucket's replicas."""
        rng = np.random.default_rng(self.seed)
        return [
            np.sort(rng.choice(3 * n, n, replace=False)) if self.spread else np.arange(n)
            for n, _ in self.buckets
        ]

    def slots_and_grads(self, step: int, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng([self.seed, step, rank])
        given = []
        for replicas, (_, dim) in zip(self.replicas(), self.buckets, strict=True):
            size = rng.binomial(len(replicas), self.touched[step])
            slots = np.sort(rng.choice(replicas, size, replace=False)).astype(np.int64)
            grads = rng.standard_normal((size, dim)).astype(np.float32)
            grads[rng.random(size) < 0.1] = -0.0  # touched, and yet nothing but zeros
            given.append((slots, grads))
        return given


def expected_sums(lists: list[tuple[np.ndarray, np.ndarray]], dim: int):
    """Distinct slots, and sums in the order of the lists."""
    slots = np.unique(np.concatenate([s for s, _ in lists]))
    sums = np.zeros((len(slots), dim), np.float32)
    for s, grads in lists:
        sums[np.searchsorted(slots, s)] += grads
    return slots, sums


def expected(case: Case, step: int, nodes: list[int]):
    """Each node's ranks are summed first, then the nodes."""
    given = [case.slots_and_grads(step, rank) for rank in range(case.ranks)]
    result = []
    for b, (_, dim) in enumerate(case.buckets):
        of_nodes = [
            expected_sums([given[r][b] for r in range(case.ranks) if nodes[r] == n], dim)
            for n in sorted(set(nodes), key=nodes.index)
        ]
        result.append(expected_sums(of_nodes, dim))
    return result


def run_case(rank: int, group, case: Case, method: str, nodes: list[int]):
    """On a rank: the results of all steps, and the bytes counted, all and over the network."""
    node = Node.join(group, 60.0, nodes)
    signals = Signals(node, COUNTERS)
    dims = [dim for _, dim in case.buckets]
    replicas = [torch.from_numpy(slots) for slots in case.replicas()]
    buckets = list(map(BucketReplicas, replicas, dims))
    reduce = ReplicaAllReduce(method, node, signals, buckets)
    results, counted = [], []
    for step in range(1, len(case.touched) + 1):
        given = case.slots_and_grads(step - 1, rank)
        reduce.begin(step, [torch.from_numpy(slots) for slots, _ in given])
        reduce.contribute(step, [torch.from_numpy(grads) for _, grads in given])
        signals.post("published", step)
        signals.wait("published", step, "publish")
        reduce.reduce(step)
        sums = zip(reduce.result(step), dims, strict=True)
        results.append(
            [(s.slots.numpy().copy(), s.gradients_of(range(1), d).numpy().copy()) for s, d in sums]
        )
        counted.append((reduce.bytes, reduce.network_bytes))
    return results, counted


def assert_sums(ranks: Worlds, case: Case, method: str, nodes: list[int]) -> np.ndarray:
    """Run it, compare everything; returns the bytes, [ranks, steps, (all, network)]."""
    found = ranks.run(case.ranks, run_case, case, method, nodes)
    order = OWN_NODES[case.ranks] if method == "allgather" else nodes
    for step in range(len(case.touched)):
        for b, (slots, sums) in enumerate(expected(case, step, order)):
            for results, _ in found:
                got_slots, got = results[step][b]
                np.testing.assert_array_equal(got_slots, slots)
                np.testing.assert_array_equal(got, sums)
                assert got.tobytes() == found[0][0][step][b][1].tobytes()
    return np.array([counted for _, counted in found])


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 4),
    buckets=st.lists(
        st.tuples(st.sampled_from([0, 1, 63, 64, 65, 200, 700]), st.sampled_from([1, 4, 20, 64])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    touched=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=4).map(tuple),
    spread=st.booleans(),
)


@examples(40)
@given(cases, st.sampled_from(METHODS))
def test_sums_of_one_node(ranks, case, method):
    assert_sums(ranks, case, method, ONE_NODE[case.ranks])


@examples(60)
@given(cases, st.sampled_from(METHODS), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_sums_of_any_nodes(ranks, case, method, nodes):
    assert_sums(ranks, case, method, nodes[: case.ranks])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "nodes", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]]
)
def test_sums_of_uneven_nodes(ranks, method, nodes):
    case = Case(5, len(nodes), ((500, 16), (0, 8), (130, 5)), (0.1, 0.0, 0.9, 0.3))
    assert_sums(ranks, case, method, nodes)


def test_methods_agree_bit_by_bit(ranks):
    case = Case(11, 4, ((300, 7), (90, 32)), (0.3, 0.6))
    sums = [ranks.run(4, run_case, case, method, ONE_NODE[4])[0][0] for method in METHODS]
    for steps in zip(*sums, strict=True):
        for parts in zip(*steps, strict=True):
            assert len({slots.tobytes() + grads.tobytes() for slots, grads in parts}) == 1


def formula(case: Case, step: int, method: str) -> np.ndarray:
    """The field's formulas (replica_allreduce.py), of each rank [ranks]."""
    given = [case.slots_and_grads(step, rank) for rank in range(case.ranks)]
    P = case.ranks

    def ring(rows: list[int]) -> float:
        return (
            2 * (P - 1) / P * sum(4 * d * n for n, (_, d) in zip(rows, case.buckets, strict=True))
        )

    if method == "dense":
        return np.full(P, ring([replicas for replicas, _ in case.buckets]))
    if method == "bitmap":
        marks = P * sum(replicas / 8 for replicas, _ in case.buckets)
        return np.full(P, marks + ring([len(s) for s, _ in expected(case, step, [0] * P)]))
    sent = [
        sum(len(s) * (4 * dim + 4) for (s, _), (_, dim) in zip(one, case.buckets, strict=True))
        for one in given
    ]
    return sum(sent) - np.array(sent)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("own_nodes", [False, True])
def test_bytes_are_those_of_the_formulas(ranks, method, count, own_nodes):
    # Replicas are multiples of 64, as bitmaps are words; slices are whole cache lines.
    # What lies between a bucket's replicas is not charged.
    case = Case(3, count, ((6400, 16), (640, 48)), (0.05, 1.0, 0.4), spread=True)
    nodes = (OWN_NODES if own_nodes else ONE_NODE)[count]
    counted = assert_sums(ranks, case, method, nodes)
    for step in range(len(case.touched)):
        charged = formula(case, step, method)
        assert counted[:, step, 0].sum() == round(charged.sum())
        # A rank's slice differs from the others' by cache lines.
        tolerance = 0 if method == "allgather" else 64 * count**2
        np.testing.assert_allclose(counted[:, step, 0], charged, rtol=0, atol=tolerance)
        own_bitmap = (6400 + 640) // 8 if method == "bitmap" else 0
        network = counted[:, step, 0] - own_bitmap if own_nodes else 0
        np.testing.assert_array_equal(counted[:, step, 1], network)


@pytest.mark.parametrize("method", METHODS)
def test_what_travels_between_nodes_travels_once_a_node(ranks, method):
    case = Case(3, 4, ((6400, 16), (640, 48)), (0.05, 0.4))
    counted = assert_sums(ranks, case, method, [0, 0, 1, 1])
    for step in range(len(case.touched)):
        rows = [len(slots) for slots, _ in expected(case, step, [0] * 4)]
        if method == "allgather":  # everyone's message, to the other node
            network = formula(case, step, method).sum() / 3
        else:
            rows = [6400, 640] if method == "dense" else rows
            # 2(N - 1)/N of the buffer for each of N = 2 nodes
            network = 2 * sum(4 * n * dim for n, (_, dim) in zip(rows, case.buckets, strict=True))
            network += 4 * (6400 + 640) // 8 * (method == "bitmap")
        assert counted[:, step, 1].sum() == network


def run_shared(rank: int, group, method: str) -> list[int]:
    """The shared memory of a rank before and after a step that touches all of 100 replicas."""
    node = Node.join(group)
    signals = Signals(node, COUNTERS)
    reduce = ReplicaAllReduce(method, node, signals, [BucketReplicas(torch.arange(100), 32)])
    before = reduce.shared_bytes
    reduce.begin(1, [torch.arange(100)])
    reduce.contribute(1, [torch.ones(100, 32)])
    signals.post("published", 1)
    signals.wait("published", 1, "publish")
    reduce.reduce(1)
    reduce.result(1)
    return [before, reduce.shared_bytes]


@pytest.mark.parametrize(
    ("method", "before", "first", "second"),
    # The bitmap of two words fills a line. One rank brings the buffer of the sums for all.
    [
        ("bitmap", 64, 2 * 12_800 + 64, 12_800 + 64),
        ("dense", 0, 2 * 12_800, 12_800),
        ("allgather", 16, 16 + 100 * 132, 16 + 100 * 132),
    ],
)
def test_shared_memory_is_counted(ranks, method, before, first, second):
    assert ranks.run(2, run_shared, method) == [[before, first], [before, second]]


def run_late(rank: int, group):
    node = Node.join(group, 1.0, [0, 1])
    signals = Signals(node, COUNTERS)
    reduce = ReplicaAllReduce("bitmap", node, signals, [BucketReplicas(torch.arange(10), 4)])
    if rank == 1:
        return ""
    reduce.begin(1, [torch.arange(3)])
    try:
        reduce.contribute(1, [torch.ones(3, 4)])
    except OperError as error:
        return str(error)
    return "no error"


def test_a_rank_of_another_node_that_does_not_come():
    with Ranks(2) as two:
        message, _ = two.run(2, run_late)
    assert message.startswith("rank 1 did not come within 1 s, while rank 0 waited for it to unite")


def test_unknown_method():
    class Two:
        ranks, rank, peers = 2, 0, (0,)

    with pytest.raises(OperError, match="method is 'none', and it has replicas"):
        ReplicaAllReduce("none", Two(), None, [BucketReplicas(torch.arange(5), 4)])  # type: ignore[arg-type]


# Kernels.


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([0, 1, 63, 64, 65, 129, 1000]), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_union_of_bitmaps(seed, rows, ranks, share):
    rng = np.random.default_rng(seed)
    masks = [[rng.random(n) < share for n in rows] for _ in range(ranks)]
    bitmaps = []
    for mask in masks:
        # What was there before is overwritten.
        bitmap = torch.full((sum(-(-n // 64) for n in rows),), -1)
        native.ops().mark_slots([torch.from_numpy(np.flatnonzero(m)) for m in mask], rows, bitmap)
        assert np.bitwise_count(bitmap.numpy().view(np.uint64)).sum() == sum(m.sum() for m in mask)
        bitmaps.append(bitmap)
    for b, slots in enumerate(native.ops().unite_slots(bitmaps, rows)):
        union = np.any([mask[b] for mask in masks], axis=0)
        assert slots.tolist() == np.flatnonzero(union).tolist()


def test_large_union_is_the_same_on_any_number_of_threads(two_threads):
    rng = np.random.default_rng(0)
    slots = torch.from_numpy(np.flatnonzero(rng.random(1_000_003) < 0.3))
    bitmap = torch.zeros(-(-1_000_003 // 64), dtype=torch.int64)
    native.ops().mark_slots([slots], [1_000_003], bitmap)
    assert torch.equal(native.ops().unite_slots([bitmap, bitmap], [1_000_003])[0], slots)
    grads = torch.from_numpy(rng.standard_normal((len(slots), 3)).astype(np.float32))
    out = torch.full((3 * 1_000_003,), torch.nan)
    native.ops().aggregate_rows([slots], [grads], [], [1_000_003], out)
    dense = out.view(-1, 3)
    assert torch.equal(native.ops().touched_rows(dense), slots)
    assert torch.equal(dense[slots], grads)
    assert torch.equal(dense.sum(dim=0, dtype=torch.float64), grads.sum(dim=0, dtype=torch.float64))
    total = torch.empty_like(out)
    native.ops().sum_buffers([out, out, out], total)
    assert torch.equal(total, out + out + out)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_padding_is_told_from_gradients_of_zero():
    slots, grads = torch.tensor([1, 3, 4]), torch.tensor([[-0.0, -0.0], [0.0, -0.0], [-0.0, 2.0]])
    out = torch.empty(12)
    native.ops().aggregate_rows([slots], [grads], [], [6], out)
    assert native.ops().touched_rows(out.view(6, 2)).tolist() == [1, 3, 4]
    total = torch.empty(12)
    native.ops().sum_buffers([out, torch.full((12,), -0.0), out], total)
    assert native.ops().touched_rows(total.view(6, 2)).tolist() == [1, 3, 4]


def test_bad_slots_are_refused():
    bitmap, out = torch.zeros(2, dtype=torch.int64), torch.zeros(100)
    for bad in (-1, 70):
        with pytest.raises(IndexError, match=f"slot {bad} of bucket 0: it has 70 replicas"):
            native.ops().mark_slots([torch.tensor([bad])], [70], bitmap)
    rows = torch.ones(2, 4)
    for slots in ([3, 1], [2, 2], [1, 5]):
        with pytest.raises(ValueError, match="do not ascend or are not in the union"):
            native.ops().aggregate_rows(
                [torch.tensor(slots)], [rows], [torch.tensor([1, 2, 3])], [70], out
            )
    with pytest.raises(ValueError, match=r"out: 100 contiguous elements, and 280 were needed"):
        native.ops().aggregate_rows([torch.tensor([1, 2])], [rows], [], [70], out)
    with pytest.raises(IndexError, match="slot 2147483648: 2\\^31 is the most"):
        native.ops().pack_rows([torch.tensor([0, 1 << 31])], [rows], out)


# Equal replicas.


def run_check(rank: int, group, changes: dict[int, list[tuple[int, int, int]]]):
    """The check on equal copies, but for bytes (part, row, column) changed on some ranks."""
    rng = np.random.default_rng(4)
    parts = [
        torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8))
        for shape in [(3000, 64), (0, 16), (1025, 13)]
    ]
    for part, row, column in changes.get(rank, []):
        parts[part][row, column] += 1
    return unequal_replicas(parts, Node.join(group).group)


def test_the_check_names_ranks_and_rows(ranks):
    assert ranks.run(3, run_check, {}) == [[]] * 3
    changes = {1: [(0, 2999, 63), (2, 1024, 12)], 2: [(0, 5, 0), (0, 2999, 0)]}
    found = [
        UnequalReplica(0, 5, (2,)),
        UnequalReplica(0, 2999, (1, 2)),
        UnequalReplica(2, 1024, (1,)),
    ]
    assert ranks.run(3, run_check, changes) == [found] * 3
    assert ranks.run(1, run_check, changes) == [[]]
