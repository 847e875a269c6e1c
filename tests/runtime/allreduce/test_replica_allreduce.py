"""The replicas' AllReduce against sums in NumPy: kernels, methods on ranks that are processes,
their bytes against the formulas, and the check of equal replicas."""

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
from tests.support.runtime.replica_cases import COUNTERS, Case, reduce_case, rows_and_sums
from tests.support.runtime.worlds import Worlds

METHODS = ("bitmap", "dense", "allgather")
# Ranks that share memory have equal numbers.
ONE_NODE = {n: [0] * n for n in range(1, 5)}
OWN_NODES = {n: list(range(n)) for n in range(1, 5)}


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


def assert_sums(ranks: Worlds, case: Case, method: str, nodes: list[int]) -> np.ndarray:
    """Run it, compare everything; returns the bytes, [ranks, steps, (all, network)]."""
    found = ranks.run(case.ranks, reduce_case, case, method, nodes)
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


@pytest.mark.parametrize("method", ["bitmap", "dense"])
@pytest.mark.parametrize(
    "nodes", [[0, 0, 1, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 0, 1, 2], list(range(5))]
)
def test_sums_over_nodes_in_rounds(ranks, method, nodes):
    """Whole numbers, whose sums are exact in every order; and as many bytes as at once."""
    case = Case(5, len(nodes), ((6400, 16), (0, 8), (130, 5)), (0.1, 0.9, 0.3), whole=True)
    given = (len(nodes), reduce_case, case, method, nodes, None)
    at_once, in_rounds = (ranks.run(*given, node_sum) for node_sum in ("at_once", "in_rounds"))
    for step in range(len(case.touched)):
        for b, (slots, sums) in enumerate(expected(case, step, nodes)):
            for results, _ in in_rounds:
                np.testing.assert_array_equal(results[step][b][0], slots)
                np.testing.assert_array_equal(results[step][b][1], sums)
        network = np.array(
            [[counted[step] for _, counted in found] for found in (at_once, in_rounds)]
        )
        np.testing.assert_allclose(network[1], network[0], rtol=0, atol=64 * len(nodes) ** 2)
        assert network[0].sum() == network[1].sum()


@examples(30)
@given(cases)
def test_sums_in_rounds_are_the_same_bits_on_all_ranks(ranks, case):
    found = ranks.run(
        case.ranks, reduce_case, case, "bitmap", OWN_NODES[case.ranks], None, "in_rounds"
    )
    for step in range(len(case.touched)):
        for b, (slots, sums) in enumerate(expected(case, step, OWN_NODES[case.ranks])):
            for results, _ in found:
                np.testing.assert_array_equal(results[step][b][0], slots)
                np.testing.assert_allclose(results[step][b][1], sums, rtol=0, atol=1e-5)
                assert results[step][b][1].tobytes() == found[0][0][step][b][1].tobytes()


def test_methods_agree_bit_by_bit(ranks):
    case = Case(11, 4, ((300, 7), (90, 32)), (0.3, 0.6))
    sums = [ranks.run(4, reduce_case, case, method, ONE_NODE[4])[0][0] for method in METHODS]
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
    rows, sums = rows_and_sums([(np.arange(100), np.ones((100, 32)))], 2, [32])
    reduce.begin(1, rows)
    reduce.contribute(1, sums)
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
    rows, sums = rows_and_sums([(np.arange(3), np.ones((3, 4)))], 2, [4])
    reduce.begin(1, rows)
    try:
        reduce.contribute(1, sums)
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


def mark(given: list[np.ndarray], replicas: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """The bitmap of a rank; what was there before is overwritten."""
    bitmap = torch.full((sum(-(-n // 64) for n in counts),), -1)
    rows, _ = rows_and_sums(
        [(slots, np.zeros((len(slots), 1))) for slots in given], 2, [1] * len(given), 3
    )
    groups = [3 * b for b in range(len(given))]
    native.ops().mark_replicas(rows.slots, rows.before, groups, replicas, counts, bitmap)
    return bitmap


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([0, 1, 63, 64, 65, 129, 1000]), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.booleans(),
)
def test_union_of_bitmaps(seed, counts, ranks, share, spread):
    rng = np.random.default_rng(seed)
    slots = [
        np.sort(rng.choice(3 * n, n, replace=False)) if spread else np.arange(n) for n in counts
    ]
    replicas = [torch.from_numpy(of if spread else of[:0]) for of in slots]
    masks = [[rng.random(n) < share for n in counts] for _ in range(ranks)]
    bitmaps = []
    for mask in masks:
        given = [of[m] for of, m in zip(slots, mask, strict=True)]
        bitmap = mark(given, replicas, counts)
        assert np.bitwise_count(bitmap.numpy().view(np.uint64)).sum() == sum(m.sum() for m in mask)
        bitmaps.append(bitmap)
    dims = [1 + b for b in range(len(counts))]
    found, groups = native.ops().unite_replicas(bitmaps, replicas, counts, dims, sum(counts))
    union = [of[np.any([m[b] for m in masks], axis=0)] for b, of in enumerate(slots)]
    assert found.tolist() == np.concatenate(union).tolist()
    sizes = [[0, *map(len, union)], [0, *(d * len(u) for d, u in zip(dims, union, strict=True))]]
    assert groups.tolist() == np.cumsum(sizes, axis=1).tolist()


def of_one_bucket(slots: torch.Tensor, grads: torch.Tensor) -> list[torch.Tensor]:
    """Rows as the operators take them: slots, groups, values."""
    groups = torch.tensor([[0, len(slots)], [0, grads.numel()]])
    return [slots, groups, grads.reshape(-1)]


def test_large_union_is_the_same_on_any_number_of_threads(two_threads):
    rng, count = np.random.default_rng(0), 1_000_003
    slots = torch.from_numpy(np.flatnonzero(rng.random(count) < 0.3))
    bitmap = mark([slots.numpy()], [slots[:0]], [count])
    found, _ = native.ops().unite_replicas([bitmap, bitmap], [slots[:0]], [count], [3], count)
    assert torch.equal(found, slots)
    grads = torch.from_numpy(rng.standard_normal((len(slots), 3)).astype(np.float32))
    out = torch.full((3 * count,), torch.nan)
    everything = of_one_bucket(torch.arange(count), out)
    native.ops().aggregate_rows(
        *of_one_bucket(slots, grads), [0], [count], *everything[:2], [3], out
    )
    dense = out.view(-1, 3)
    touched = native.ops().touched_rows(everything[1], out, [3])
    assert torch.equal(touched, slots)
    assert torch.equal(dense[slots], grads)
    assert torch.equal(dense.sum(dim=0, dtype=torch.float64), grads.sum(dim=0, dtype=torch.float64))
    taken = native.ops().take_rows(*everything, touched, [3])
    for part, expected in zip(taken, of_one_bucket(slots, grads), strict=True):
        assert torch.equal(part, expected)
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
    united = of_one_bucket(torch.arange(6), out)[:2]
    native.ops().aggregate_rows(*of_one_bucket(slots, grads), [0], [6], *united, [2], out)
    assert native.ops().touched_rows(united[1], out, [2]).tolist() == [1, 3, 4]
    total = torch.empty(12)
    native.ops().sum_buffers([out, torch.full((12,), -0.0), out], total)
    assert native.ops().touched_rows(united[1], total, [2]).tolist() == [1, 3, 4]


def test_rows_are_taken_from_each_bucket():
    slots = torch.tensor([3, 5, 9, 1, 2])
    groups, values = torch.tensor([[0, 3, 3, 5], [0, 6, 16, 22]]), torch.arange(22.0)
    taken = native.ops().take_rows(slots, groups, values, torch.tensor([0, 2, 4]), [2, 7, 3])
    assert [part.tolist() for part in taken] == [
        [3, 9, 2],
        [[0, 2, 2, 3], [0, 4, 4, 7]],
        [0, 1, 4, 5, 19, 20, 21],
    ]


def test_bad_slots_are_refused():
    out, rows = torch.zeros(100), torch.ones(2, 4)
    spread = torch.arange(1, 71)
    for replicas, bad in ((spread[:0], (-1, 70)), (spread, (0, 71, -1))):
        for slot in bad:
            with pytest.raises(IndexError, match=f"slot {slot} of bucket 0: none of its 70 replic"):
                mark([np.array([slot])], [replicas], [70])
    for slots in ([3, 1], [2, 2], [1, 5]):
        wrong = of_one_bucket(torch.tensor(slots), rows)
        united = of_one_bucket(torch.tensor([1, 2, 3]), out[:12])
        with pytest.raises(ValueError, match="do not ascend or are not in the union"):
            native.ops().aggregate_rows(*wrong, [0], [70], *united[:2], [4], out)
    given = of_one_bucket(torch.tensor([1, 2]), rows)
    united = of_one_bucket(torch.arange(70), torch.zeros(280))
    with pytest.raises(ValueError, match="280 values from 0 on, of 100"):
        native.ops().aggregate_rows(*given, [0], [70], *united[:2], [4], out)
    with pytest.raises(
        ValueError, match="int32 can number: expected 0 to 2147483648, got 2147483649"
    ):
        native.ops().pack_rows(*given, [0], [given[0][:0]], [(1 << 31) + 1], [4], out)


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
