"""The replicas' AllReduce on devices, emulated: the bits of the processor's kernels, for ranks
whose buffers are tensors of one process, in any order of threads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.runtime.memory.device import Cpu
from oper.runtime.tables.row_gradients import RowGradients, laid_out
from tests.support.cuda.devices import Device
from tests.support.examples import examples

LINE = 16  # values: where buckets' gradients begin on a device


@dataclass(frozen=True)
class Case:
    """Gradients of ranks, all made from the seed. `touched`: the share of its replicas that a rank
    touches."""

    seed: int
    ranks: int
    buckets: tuple[tuple[int, int], ...]  # replicas, dim
    touched: float
    spread: bool = False  # the replicas of a bucket lie among others' slots

    @property
    def counts(self) -> list[int]:
        return [count for count, _ in self.buckets]

    @property
    def dims(self) -> list[int]:
        return [dim for _, dim in self.buckets]

    @property
    def groups(self) -> list[int]:
        """Which of a rank's groups are the replicas."""
        return [b * (1 + self.ranks) for b in range(len(self.buckets))]

    def replicas(self) -> list[torch.Tensor]:
        """Slots of each bucket's replicas, none where they are numbers."""
        rng = np.random.default_rng(self.seed)
        return [
            torch.from_numpy(np.sort(rng.choice(3 * n, n, replace=False)).astype(np.int64))
            if self.spread
            else torch.empty(0, dtype=torch.int64)
            for n in self.counts
        ]

    def rows(self, rank: int) -> RowGradients:
        """A rank's rows, those of owners and of buckets without replicas among them. What lies
        between and behind them is anything."""
        rng = np.random.default_rng([self.seed, rank])
        slots: list[np.ndarray] = []
        sizes: list[int] = []
        for replicas, count in zip(self.replicas(), self.counts, strict=True):
            numbers = np.flatnonzero(rng.random(count) < self.touched)
            of_bucket = replicas.numpy()[numbers] if self.spread else numbers
            slots.append(of_bucket if count else np.arange(3))
            slots += [np.arange(n) for n in rng.integers(0, 4, self.ranks)]
            sizes += [len(part) for part in slots[len(sizes) :]]
        slots.append(np.full(5, -1))
        groups = laid_out(torch.tensor([0, *np.cumsum(sizes)]), self.dims, Cpu())
        values = torch.full((int(groups[1, -1]) + 7,), torch.nan)
        place = 0
        for group, size in enumerate(sizes):
            dim = self.dims[group // (1 + self.ranks)]
            grads = rng.standard_normal((size, dim)).astype(np.float32)
            grads *= 10.0 ** rng.integers(-6, 7, (size, 1)).astype(np.float32)
            grads[rng.random(size) < 0.1] = -0.0  # touched, and yet nothing but zeros
            place = int(groups[1, group])
            values[place : place + grads.size] = torch.from_numpy(grads.reshape(-1))
        return RowGradients(torch.from_numpy(np.concatenate(slots)), groups, values)

    @property
    def most_rows(self) -> int:
        """Replicas that any rank may have touched, by what the host knows."""
        accesses = sum(len(self.rows(rank).slots) for rank in range(self.ranks))
        return min(sum(self.counts), accesses)


def words(counts: list[int]) -> int:
    return sum(-(-n // 64) for n in counts)


def summed_on_the_processor(case: Case) -> RowGradients:
    ops, counts, replicas = native.ops(), case.counts, case.replicas()
    rows = [case.rows(rank) for rank in range(case.ranks)]
    bitmaps = [torch.empty(words(counts), dtype=torch.int64) for _ in rows]
    for part, bitmap in zip(rows, bitmaps, strict=True):
        ops.mark_replicas(part.slots, part.groups[0], case.groups, replicas, counts, bitmap)
    united = ops.unite_replicas(bitmaps, replicas, counts, case.dims, sum(counts))
    buffers = [torch.empty(int(united[1][1, -1])) for _ in rows]
    for part, buffer in zip(rows, buffers, strict=True):
        given = (part.slots, part.groups, part.values, case.groups, counts)
        ops.aggregate_rows(*given, *united, case.dims, buffer)
    total = torch.empty_like(buffers[0])
    ops.sum_buffers(buffers, total)
    return RowGradients(united[0], united[1], total)


def summed_on(device: Device, case: Case, order: int) -> RowGradients:
    """Bitmaps, buffers and the sum hold anything before."""

    def start(operator: str, *arguments: Any) -> Any:
        return device.start(operator, *arguments, device.stream, order=order)

    counts, replicas = case.counts, [device.put(slots) for slots in case.replicas()]
    rows = [case.rows(rank) for rank in range(case.ranks)]
    on = [[device.put(part) for part in (r.slots, r.groups, r.values)] for r in rows]
    bitmaps = [device.put(torch.full((words(counts),), -1)) for _ in rows]
    for (slots, groups, _), bitmap in zip(on, bitmaps, strict=True):
        start("mark_replicas", slots, groups[0], case.groups, replicas, counts, bitmap)
    most = case.most_rows
    size = -(-(most * max(case.dims) + LINE * len(counts)) // LINE) * LINE
    # Every rank unites for itself, and finds the same.
    united = [start("unite_replicas", bitmaps, replicas, counts, case.dims, most) for _ in rows]
    buffers = [device.put(torch.full((size,), torch.nan)) for _ in rows]
    for own, of_rank, buffer in zip(on, united, buffers, strict=True):
        start("aggregate_rows", *own, case.groups, counts, *of_rank, case.dims, buffer)
    dims, read = device.put(torch.tensor(case.dims)), device.put(torch.tensor([0]))
    for rank, buffer in enumerate(buffers):
        start("sum_slice", buffers, united[rank][1], dims, rank, buffer, read)
    total = device.put(torch.full((size,), torch.nan))
    slots, laid = united[0]
    start("gather_slices", buffers, laid, total)
    return RowGradients(slots.cpu(), laid.cpu(), total.cpu())


def assert_equal_bits(found: RowGradients, expected: RowGradients, case: Case) -> None:
    before = expected.groups[0]
    assert torch.equal(found.groups[0], before)
    assert torch.equal(found.slots[: before[-1]], expected.slots)
    assert not (found.groups[1, :-1] % LINE).any()
    for b, dim in enumerate(case.dims):
        bucket = range(b, b + 1)
        of_device, of_processor = (
            found.gradients_of(bucket, dim),
            expected.gradients_of(bucket, dim),
        )
        assert torch.equal(of_device.view(torch.int32), of_processor.view(torch.int32))


def check(device: Device, case: Case, orders: tuple[int, ...] = ()) -> None:
    expected = summed_on_the_processor(case)
    for order in orders or device.orders:
        assert_equal_bits(summed_on(device, case, order), expected, case)


@pytest.mark.parametrize("dim", [1, 3, 4, 5, 16, 33, 64, 132, 300])
def test_every_dim(device: Device, dim: int) -> None:
    check(device, Case(dim, 3, ((100, dim), (70, dim)), 0.3))


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    buckets=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 63, 64, 65, 200, 1000]), st.sampled_from([1, 4, 5, 8, 20, 33])
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    touched=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    spread=st.booleans(),
)


@given(cases, st.sampled_from([0, 1, 2]))
@examples(40)
def test_any_ranks_and_buckets(device: Device, case: Case, order: int) -> None:
    check(device, case, orders=(order,))


@pytest.mark.parametrize("spread", [False, True])
def test_more_buckets_than_a_launch_takes(device: Device, spread: bool) -> None:
    buckets = tuple((n % 5 * 13, 1 + n % 7) for n in range(101))
    check(device, Case(1, 2, buckets, 0.5, spread), orders=(0, 1))


def test_more_words_than_are_scanned_at_once(device: Device) -> None:
    check(device, Case(2, 2, ((1000, 4), (9_000_000, 1)), 0.0002), orders=(1,))


def test_as_many_ranks_as_a_launch_takes(device: Device) -> None:
    check(device, Case(3, 72, ((90, 4),), 0.1), orders=(1,))


def test_sums_go_in_the_order_of_the_ranks(device: Device) -> None:
    groups = torch.tensor([[0, 1], [0, 4]])
    buffers = [device.put(torch.full((LINE,), value)) for value in (1.0, 1e8, -1e8, 1.0, 2.0)]
    total = device.put(torch.zeros(LINE))
    dims, read = device.put(torch.tensor([4])), device.put(torch.tensor([5]))
    for rank in range(len(buffers)):
        given = (buffers, device.put(groups), dims, rank, total, read)
        device.start("sum_slice", *given, device.stream)
    # All but the first rank read four values, and the first one those of the others.
    assert read.item() == 5 + 4 * (4 * 4 + 4 * 4)
    # ((1 + 1e8) - 1e8) + 1 + 2 in float32, whose values about 1e8 are 8 apart.
    assert total[:4].tolist() == [3.0] * 4


@pytest.mark.parametrize(("parts", "size"), [(1, 1), (3, 0), (5, 1001), (72, 300)])
def test_buffers_at_any_places_are_summed(device: Device, parts: int, size: int) -> None:
    values = torch.randn(parts, size + 3) * 10.0 ** torch.randint(-9, 9, (parts, 1))
    expected = torch.empty(size)
    native.ops().sum_buffers([part[3:] for part in values], expected)
    for order in device.orders:
        there, out = device.put(values), device.put(torch.full((size,), torch.nan))
        given = [part[3:] for part in there]
        device.start("sum_buffers", given, out, device.stream, order=order)
        assert out.cpu().numpy().tobytes() == expected.numpy().tobytes()
    with pytest.raises(ValueError, match="parts: expected 1 to 72, got 73"):
        device.start("sum_buffers", [out] * 73, out, device.stream)


def test_a_rank_writes_no_lines_but_its_own(device: Device) -> None:
    groups = device.put(torch.tensor([[0, 10], [0, 100]]))
    parts, dims = [device.put(torch.ones(112)) for _ in range(3)], device.put(torch.tensor([10]))
    for rank, (begin, end) in enumerate([(0, 48), (48, 96), (96, 112)]):
        total, read = device.put(torch.zeros(112)), device.put(torch.tensor([0]))
        device.start("sum_slice", parts, groups, dims, rank, total, read, device.stream)
        outside = total.tolist()[:begin] + total.tolist()[end:]
        assert total[begin : min(end, 100)].tolist() == [3.0] * (min(end, 100) - begin)
        assert not any(outside)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(
        st.tuples(st.sampled_from([0, 1, 63, 64, 65, 200]), st.sampled_from([1, 4, 5, 33])),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([0, 1, 2]),
)
@examples(20)
def test_touched_rows_are_told_from_padding(
    device: Device, seed: int, buckets: list[tuple[int, int]], order: int
) -> None:
    """A row of zeros that was touched begins with +0.0."""
    rng = np.random.default_rng(seed)
    counts, dims = [count for count, _ in buckets], [dim for _, dim in buckets]
    groups = laid_out(torch.tensor([0, *np.cumsum(counts)]), dims, Cpu())
    values = torch.full((int(groups[1, -1]),), torch.nan)
    expected = torch.zeros(words(counts), dtype=torch.int64)
    word = 0
    for b, (count, dim) in enumerate(buckets):
        touched = rng.random(count) < 0.4
        rows = np.full((count, dim), -0.0, np.float32)
        rows[touched, rng.integers(0, dim)] = rng.standard_normal(int(touched.sum()))
        rows[touched & (rng.random(count) < 0.3)] = -0.0
        rows[touched, 0] += 0.0
        values[int(groups[1, b]) :][: rows.size] = torch.from_numpy(rows.reshape(-1))
        bits = np.zeros(64 * -(-count // 64), bool)
        bits[:count] = touched
        packed = np.packbits(bits, bitorder="little").view(np.int64)
        expected[word : word + len(packed)] = torch.from_numpy(packed)
        word += len(packed)
    bitmap = device.put(torch.full_like(expected, -1))
    given = (device.put(values), device.put(groups), counts, dims, bitmap)
    device.start("mark_touched", *given, device.stream, order=order)
    assert torch.equal(bitmap.cpu(), expected)


@pytest.mark.parametrize("spread", [False, True])
def test_slots_that_are_no_replicas_are_passed_over(device: Device, spread: bool) -> None:
    replicas = 10 + 3 * torch.arange(70) if spread else torch.empty(0, dtype=torch.int64)
    slots = torch.tensor([-(2**62), -1, 0, 69, 70, 2**40])
    if spread:  # before the first, between others, and after the last
        slots = torch.tensor([-(2**62), 9, 10, 14, 217, 2**40])
    before, bitmap = torch.tensor([0, 0, 6]), device.put(torch.full((2,), -1))
    given = [device.put(slots), device.put(before), [1], [device.put(replicas)], [70], bitmap]
    device.start("mark_replicas", *given, device.stream)
    assert bitmap.tolist() == [1, 1 << 5]


def test_nothing_to_do(device: Device) -> None:
    bitmap = device.put(torch.empty(0, dtype=torch.int64))
    slots, groups = device.start("unite_replicas", [bitmap], [], [], [], 0, device.stream)
    assert (slots.tolist(), groups.tolist()) == ([], [[0], [0]])
    check(device, Case(5, 2, ((0, 4), (0, 3)), 1.0))


def test_refused_arguments(device: Device) -> None:
    case = Case(6, 2, ((100, 4),), 0.5)
    rows = case.rows(0)
    slots, groups, values = (device.put(part) for part in (rows.slots, rows.groups, rows.values))
    none, bitmap = device.put(torch.empty(0, dtype=torch.int64)), device.put(torch.zeros(2).long())
    out, stream = device.put(torch.zeros(416)), device.stream
    marked = [slots, groups[0], [0], [none], [100], bitmap, stream]
    united = [[bitmap], [none], [100], [4], 100, stream]
    aggregated = [slots, groups, values, [0], [100], slots, groups[:, :2].contiguous(), [4], out]
    three = device.put(torch.tensor([1, 2, 3]))
    summed = [[out, out], groups, three, 0, out, three[:1], stream]
    gathered = [[out, out], groups, out, stream]
    of_all = device.put(torch.tensor([[0, 100], [0, 400]]))
    touched = [out, of_all, [100], [4], bitmap, stream]
    wrong: list[tuple[str, list[Any], int, Any, type[Exception], str]] = [
        ("mark_replicas", marked, 0, slots.int(), TypeError, "slots"),
        ("mark_replicas", marked, 2, [3], IndexError, "group: 3 is none of 3"),
        (
            "mark_replicas",
            marked,
            2,
            [],
            ValueError,
            "group: expected 1 numbers, one per bucket, got 0",
        ),
        ("mark_replicas", marked, 4, [-1], ValueError, "counts: expected .*, got -1"),
        (
            "mark_replicas",
            marked,
            4,
            [129],
            ValueError,
            "bitmaps: expected 3 contiguous elements, got 2",
        ),
        ("unite_replicas", united, 0, [], ValueError, "bitmaps: expected 1 to 72, got 0"),
        (
            "unite_replicas",
            united,
            0,
            [bitmap] * 73,
            ValueError,
            "bitmaps: expected 1 to 72, got 73",
        ),
        ("unite_replicas", united, 3, [0], ValueError, "dims: expected .*, got 0"),
        ("unite_replicas", united, 4, -1, ValueError, "most_rows: expected .*, got -1"),
        ("aggregate_rows", aggregated, 1, groups[0], ValueError, "groups: expected"),
        ("aggregate_rows", aggregated, 3, [9], IndexError, "group: 9 is none of 3"),
        (
            "aggregate_rows",
            aggregated,
            6,
            groups,
            ValueError,
            "united_groups: expected 1 groups, one per bucket, got 3",
        ),
        ("sum_slice", summed, 0, [out, out[:400]], ValueError, "parts: expected .*, got 400"),
        ("sum_slice", summed, 3, 2, IndexError, "rank: 2 is none of 2"),
        ("sum_slice", summed, 4, out[:410], ValueError, "whole aligned lines"),
        (
            "sum_slice",
            summed,
            2,
            three[:2],
            ValueError,
            "dims: expected 3 contiguous elements, got 2",
        ),
        ("gather_slices", gathered, 0, [out.double()], TypeError, "parts"),
        ("mark_touched", touched, 1, groups, ValueError, "groups: expected 1 groups"),
        ("mark_touched", touched, 2, [129], ValueError, "bitmaps: expected 3 contiguous"),
        ("mark_touched", touched, 3, [0], ValueError, "dims: expected .*, got 0"),
    ]
    for operator, arguments, place, value, error, match in wrong:
        changed = [value if n == place else argument for n, argument in enumerate(arguments)]
        with pytest.raises(error, match=match):
            device.start(operator, *changed)
