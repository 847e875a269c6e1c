"""The AllGather of replicas' gradients on emulated devices has the bits of the CPU's kernels, for
ranks whose messages are tensors of one process, in any order of threads."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.runtime.tables.row_gradients import RowGradients
from tests.cuda.test_replica_sums import LINE, Case, assert_equal_bits, cases, words
from tests.support.cuda.devices import Device
from tests.support.examples import examples


def merged_on_the_processor(case: Case) -> RowGradients:
    ops, counts, dims, replicas = native.ops(), case.counts, case.dims, case.replicas()
    groups, messages, of_ranks = torch.tensor(case.groups), [], []
    for rank in range(case.ranks):
        rows = case.rows(rank)
        of_rank = rows.groups[0].diff()[groups] * (torch.tensor(counts) > 0)
        message = torch.empty(int(of_rank @ (torch.tensor(dims) + 1)))
        given = (rows.slots, rows.groups, rows.values, case.groups, replicas, counts, dims)
        assert ops.pack_rows(*given, message) == len(message)
        messages.append(message)
        of_ranks.append(of_rank)
    merged = ops.merge_messages(messages, torch.stack(of_ranks), replicas, counts, dims)
    return RowGradients(*merged)


def merged_on(device: Device, case: Case, order: int, held: int = 1) -> tuple[RowGradients, int]:
    """Return the sums, and the bytes that rank 0 reads of others; a holder has `held` messages."""

    def start(operator: str, *arguments: Any) -> Any:
        return device.start(operator, *arguments, device.stream, order=order)

    counts, dims, buckets = case.counts, case.dims, len(case.counts)
    replicas = [device.put(slots) for slots in case.replicas()]
    there = [g if n else -1 for g, n in zip(case.groups, counts, strict=True)]
    groups, dims_there = device.put(torch.tensor(there)), device.put(torch.tensor(dims))
    header_words, holders = 2 * (buckets + 1), -(-case.ranks // held)
    message_word = -(-2 * held * header_words // LINE) * LINE
    most = sum(n * (1 + dim) for n, dim in zip(counts, dims, strict=True))
    room = message_word + held * most
    segments = [device.put(torch.full((room // 2 + 1,), -1)) for _ in range(holders)]
    ends = [message_word] * holders
    for rank in range(case.ranks):
        rows, holder = case.rows(rank), rank // held
        given = [device.put(part) for part in (rows.slots, rows.groups, rows.values)]
        header = device.put(torch.full((2, buckets + 1), -1))
        message = device.put(torch.full((most,), torch.nan))
        start(
            "write_message", *given, groups, case.groups, replicas, counts, dims_there, dims,
            header, message,
        )  # fmt: skip
        size, place = int(header[:, -1].sum()), rank % held * header_words
        segments[holder][place : place + header_words] = header.view(-1)
        segments[holder].view(torch.float32)[ends[holder] : ends[holder] + size] = message[:size]
        ends[holder] += size
    of_rank = torch.arange(case.ranks)
    held_by, held_as = device.put(of_rank // held), device.put(of_rank % held)
    first_words = [0, *accumulate(-(-n // 64) for n in counts)][:-1]
    bitmap, read = device.put(torch.full((words(counts),), -1)), device.put(torch.tensor([3]))
    headers, begins, numbers = start(
        "take_numbers", segments, message_word, held_by, held_as, 0,
        device.put(torch.tensor(first_words)), case.ranks * sum(counts), bitmap, read,
    )  # fmt: skip
    united = start("unite_replicas", [bitmap], replicas, counts, dims, case.most_rows)
    size = case.most_rows * max(dims) + LINE * buckets
    total = device.put(torch.full((size,), torch.nan))
    start(
        "add_messages", segments, message_word, held_by, headers, begins, numbers, replicas,
        counts, dims, *united, total,
    )  # fmt: skip
    own = 4 * (ends[0] - message_word)
    assert int(read) - 3 == 4 * (sum(ends) - holders * message_word) - own
    return RowGradients(united[0].cpu(), united[1].cpu(), total.cpu()), int(read) - 3


def check(device: Device, case: Case, orders: tuple[int, ...] = (), held: int = 1) -> None:
    expected = merged_on_the_processor(case)
    for order in orders or device.orders:
        found, _ = merged_on(device, case, order, held)
        assert_equal_bits(found, expected, case)


@pytest.mark.parametrize("dim", [1, 3, 4, 5, 16, 33, 64, 132, 300])
@pytest.mark.parametrize("held", [1, 2])
def test_every_dim(device: Device, dim: int, held: int) -> None:
    """The second of two messages that one rank holds begins at any place."""
    check(device, Case(dim, 3, ((100, dim), (70, dim)), 0.3), held=held)


@given(cases, st.sampled_from([0, 1, 2]), st.integers(1, 4))
@examples(40)
def test_any_ranks_and_buckets(device: Device, case: Case, order: int, held: int) -> None:
    check(device, case, orders=(order,), held=held)


@pytest.mark.parametrize("spread", [False, True])
def test_more_buckets_than_a_launch_takes(device: Device, spread: bool) -> None:
    buckets = tuple((n % 5 * 13, 1 + n % 7) for n in range(101))
    check(device, Case(1, 2, buckets, 0.5, spread), orders=(0, 1))


def test_more_ranks_than_a_node_has(device: Device) -> None:
    check(device, Case(3, 150, ((90, 4),), 0.1), orders=(1,), held=3)


def test_sums_go_in_the_order_of_the_ranks(device: Device) -> None:
    """((1 + 1e8) - 1e8) + 1 + 2 in float32, whose values about 1e8 are 8 apart."""

    class Given(Case):
        def rows(self, rank: int) -> RowGradients:
            value = (1.0, 1e8, -1e8, 1.0, 2.0)[rank]
            groups = torch.tensor([[0, 1, *[1] * 5], [0, 4, *[4] * 5]])
            return RowGradients(torch.tensor([7]), groups, torch.full((4,), value))

    found, read = merged_on(device, Given(0, 5, ((9, 4),), 1.0), order=1)
    assert found.slots[0] == 7
    assert found.values[:4].tolist() == [3.0] * 4
    assert read == 4 * 4 * (4 + 1)


@pytest.mark.parametrize("spread", [False, True])
def test_slots_that_are_no_replicas_stay_within_the_replicas(device: Device, spread: bool) -> None:
    """The processor refuses them; a device cannot tell the host, and writes nowhere else."""
    replicas = 10 + 3 * torch.arange(70) if spread else torch.empty(0, dtype=torch.int64)
    slots = torch.tensor([-(2**62), 12, 2**40])
    groups = torch.tensor([[0, 3], [0, 12]])
    header, message = device.put(torch.zeros(2, 2).long()), device.put(torch.zeros(15))
    one, dim = device.put(torch.tensor([0])), device.put(torch.tensor([4]))
    values = torch.arange(12.0)
    given = [device.put(part) for part in (slots, groups, values)]
    device.start(
        "write_message", *given, one, [0], [device.put(replicas)], [70], dim, [4], header, message,
        device.stream,
    )  # fmt: skip
    assert header.tolist() == [[0, 3], [0, 12]]
    assert message[:12].tolist() == values.tolist()
    numbers = message[12:].view(torch.int32).tolist()
    assert numbers == ([0, 0, 69] if spread else [0, 12, 69])


def test_refused_arguments(device: Device) -> None:
    case = Case(6, 2, ((100, 4),), 0.5)
    rows = case.rows(0)
    slots, groups, values = (device.put(part) for part in (rows.slots, rows.groups, rows.values))
    none, stream = device.put(torch.empty(0, dtype=torch.int64)), device.stream
    zero, four = device.put(torch.tensor([0])), device.put(torch.tensor([4]))
    header, out = device.put(torch.zeros(2, 2).long()), device.put(torch.zeros(512))
    written = [slots, groups, values, zero, [0], [none], [100], four, [4], header, out, stream]
    segment, two = device.put(torch.zeros(300).long()), device.put(torch.tensor([0, 1]))
    bitmap, read = device.put(torch.zeros(2).long()), device.put(torch.tensor([0]))
    taken = [[segment] * 2, 16, two, two, 0, zero, 200, bitmap, read, stream]
    headers, begins = device.put(torch.zeros(2, 2, 2).long()), device.put(torch.zeros(2, 2).long())
    numbers, united = device.put(torch.zeros(200).int()), device.put(torch.zeros(2, 2).long())
    added = [
        [segment] * 2, 16, two, headers, begins, numbers, [none], [100], [4], slots, united, out,
        stream,
    ]  # fmt: skip
    wrong: list[tuple[str, list[Any], int, Any, type[Exception], str]] = [
        ("write_message", written, 1, groups[0], ValueError, "groups: expected"),
        ("write_message", written, 3, two, ValueError, "group: expected 1 contiguous"),
        ("write_message", written, 4, [9], IndexError, "group: 9 is none of 3"),
        ("write_message", written, 6, [(1 << 31) + 1], ValueError, "count that int32 can number"),
        ("write_message", written, 8, [0], ValueError, "dims: expected .*, got 0"),
        ("write_message", written, 9, headers, ValueError, "header: expected"),
        ("take_numbers", taken, 0, [], ValueError, "segments: expected 1 to 72, got 0"),
        ("take_numbers", taken, 0, [segment] * 73, ValueError, "expected 1 to 72, got 73"),
        ("take_numbers", taken, 3, zero, ValueError, "held_as: expected 2 contiguous"),
        ("take_numbers", taken, 4, 2, IndexError, "own: 2 is none of 2 segments"),
        ("take_numbers", taken, 6, -1, ValueError, "most_rows: expected .*, got -1"),
        ("take_numbers", taken, 7, out, TypeError, "bitmap: expected dtype int64"),
        ("add_messages", added, 0, [], ValueError, "segments: expected 1 to 72, got 0"),
        ("add_messages", added, 3, headers[0], ValueError, "headers: expected 8 contiguous"),
        ("add_messages", added, 4, begins[0], ValueError, "begins: expected 4 contiguous"),
        ("add_messages", added, 5, slots, TypeError, "numbers: expected dtype int32"),
        ("add_messages", added, 10, groups, ValueError, "united_groups: expected 1 groups"),
        ("add_messages", added, 11, slots, TypeError, "out: expected dtype float32"),
    ]
    for operator, arguments, place, value, error, match in wrong:
        changed = [value if n == place else argument for n, argument in enumerate(arguments)]
        with pytest.raises(error, match=match):
            device.start(operator, *changed)
