"""The sort of a batch's accesses by row against NumPy's lexsort."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.runtime.memory.device import Cpu
from oper.runtime.memory.prepared_batch import NumberedRows, Runs, rows_of_tensors
from oper.runtime.step.sort import Sorter
from tests.support.runtime.accesses import Accesses, random_accesses, sorted_runs


def check(accesses: Accesses) -> None:
    found = native.ops().sort_accesses(*accesses.tensors())
    assert [t.dtype for t in found] == [torch.int32, torch.int32, torch.int64, torch.int64]
    for tensor, expected in zip(found, sorted_runs(accesses), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), expected)


def check_by_bag(accesses: Accesses, rng: np.random.Generator) -> None:
    """Sorted by bag, the runs are those by position, with the bags that the positions are in; some
    bags are empty."""
    number = len(accesses.addresses)
    inner = np.sort(rng.integers(0, number + 1, rng.integers(0, 2 * number + 2)))
    offsets = np.concatenate([[0], inner, [number]])
    positions, *expected = native.ops().sort_accesses(*accesses.tensors())
    bags = np.searchsorted(offsets, positions.numpy(), side="right") - 1
    for dtype in (np.int32, np.int64):
        given = torch.from_numpy(offsets.astype(dtype))
        found, *runs = native.ops().sort_accesses(*accesses.tensors(), given)
        np.testing.assert_array_equal(found.numpy(), bags)
        assert all(map(torch.equal, runs, expected))


def check_numbers(accesses: Accesses) -> None:
    """Numbered, the rows are those of the sort in its order, with the row of each access; accesses
    of frozen tables have none."""
    positions, start, slot, count = sorted_runs(accesses)
    row_of = np.full(len(accesses.addresses), -1)
    row_of[positions] = np.repeat(np.arange(len(slot)), np.diff(start))
    found = native.ops().number_rows(*accesses.tensors())
    assert [t.dtype for t in found] == [torch.int32, torch.int64, torch.int64]
    for tensor, expected in zip(found, (row_of, slot, [count, start[count]]), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.fixture
def threads():
    """Sets the number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 8),  # vectors hold the fields of up to 6
    sizes=st.lists(st.integers(0, 400), max_size=8),
    buckets=st.integers(1, 4),
    slots=st.sampled_from([1, 2, 50, 5000, 2**20, 2**40]),
    replicas=st.sampled_from([0, 1, 10, 10**6]),
    frozen=st.booleans(),
)
def test_equals_lexsort(seed, ranks, sizes, buckets, slots, replicas, frozen):
    rng = np.random.default_rng(seed)
    accesses = random_accesses(rng, ranks, sizes, buckets, slots, replicas, frozen)
    check(accesses)
    check_by_bag(accesses, rng)
    if slots <= 5000:
        check_numbers(accesses)


@pytest.mark.parametrize("slots", [3, 10**5, 2**40])
def test_any_number_of_threads(threads, slots):
    accesses = random_accesses(
        np.random.default_rng(0), 3, [70_000, 0, 1, 90_000, 50_000], 2, slots, 10, frozen=False
    )
    for number in (1, 2, 3):
        threads(number)
        check(accesses)
        check_by_bag(accesses, np.random.default_rng(1))


def test_one_row():
    accesses = random_accesses(np.random.default_rng(0), 1, [300], 1, 1, 0, frozen=False)
    _, start, slot, count = native.ops().sort_accesses(*accesses.tensors())
    assert (start.tolist(), slot.tolist(), count.tolist()) == ([0, 300], [0], [0, 0, 1])


def test_the_largest_addresses():
    """Keys and positions beyond 64 bits."""
    accesses = random_accesses(np.random.default_rng(0), 5, [3000], 1, 10, 0, frozen=False)
    rng = np.random.default_rng(1)
    accesses.ranks, accesses.bucket_slots = 2**16, [2**40]
    slot = rng.choice([2**40 - 1, 2**39, 7], 3000)
    accesses.addresses = rng.choice([LOCAL, 2**16 - 1, 5], 3000) << SLOT_BITS | slot
    check(accesses)


def test_all_frozen():
    accesses = random_accesses(np.random.default_rng(0), 2, [5, 6], 2, 10, 3, frozen=False)
    accesses.features["has_gradient"] = 0
    check(accesses)
    check_numbers(accesses)


def test_bad_input():
    accesses = random_accesses(np.random.default_rng(0), 2, [5, 6], 2, 10, 3, frozen=False)
    arguments = accesses.tensors()
    sort = native.ops().sort_accesses
    for bad in (2 << SLOT_BITS, (LOCAL - 2) << SLOT_BITS, -1):
        wrong = arguments[0].clone()
        wrong[7] = bad
        with pytest.raises(IndexError, match="names none of 2 ranks"):
            sort(wrong, *arguments[1:])
    with pytest.raises(ValueError, match="ends at 11, and there are 10 addresses"):
        sort(arguments[0][:10], *arguments[1:])
    with pytest.raises(IndexError, match="bucket"):
        sort(*arguments[:3], 0, 2, [])
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        sort(*arguments[:3], 2, 2, [10, 10])
    for offsets in ([0, 10], [1, 11], [0, 12], [0, 9, 3, 11]):
        with pytest.raises(ValueError, match="offsets"):
            sort(*arguments, torch.tensor(offsets))


def test_bad_input_of_numbers():
    accesses = random_accesses(np.random.default_rng(0), 2, [5, 6], 2, 10, 3, frozen=False)
    *arguments, _ = accesses.tensors()
    number = native.ops().number_rows
    for bad in (2 << SLOT_BITS, (LOCAL - 2) << SLOT_BITS, -1, LOCAL << SLOT_BITS | 10, 10):
        wrong = arguments[0].clone()
        wrong[7] = bad
        with pytest.raises(IndexError, match="names none of 2 ranks, or none of 10 slots"):
            number(wrong, *arguments[1:], [10, 10])
    with pytest.raises(IndexError, match="none of 0 slots"):
        number(*arguments, [0, 0])
    with pytest.raises(IndexError, match="bucket"):
        number(*arguments, [])
    for slots in ([-1, 10], [2**40, 10], [2**30, 10]):
        with pytest.raises(ValueError, match="bucket_slots"):
            number(*arguments, slots)


@pytest.mark.parametrize(
    ("slots", "dim", "bags", "number", "always", "numbered"),
    [
        (100, 32, None, 1, False, True),
        (101, 32, None, 1, False, False),  # more rows than four an access
        (100, 33, None, 1, False, False),  # wide rows, and bags of one
        (100, 33, 6, 1, False, False),  # or fewer than ten
        (100, 64, 5, 1, False, True),
        (100, 65, 5, 1, False, False),
        (100, 16, None, 2, False, False),
        (100, 16, None, 1, True, False),
    ],
)
def test_when_rows_are_numbered(threads, slots, dim, bags, number, always, numbered):
    accesses = random_accesses(np.random.default_rng(0), 1, [30, 20], 1, 20, 3, frozen=False)
    threads(number)
    node: Any = SimpleNamespace(rank=0, ranks=1, peers=range(99))
    sorter = Sorter(node, Cpu(), [slots], [dim], by_position=True, always=always)
    offsets = None if bags is None else torch.linspace(0, 50, bags + 1).long()
    addresses, segments, features, *_ = accesses.tensors()
    rows = sorter.sort(addresses, segments, offsets, None, features, at_once=True)
    _, start, slot, count = sorted_runs(accesses)
    assert isinstance(rows, NumberedRows if numbered else Runs)
    assert (rows.accesses, rows.slots.tolist()) == (50, slot.tolist())
    assert rows.access_counts().tolist() == [np.diff(start[count]).tolist()]
    again = rows_of_tensors(rows.tensors(), 1, by_bag=False)
    assert type(again) is type(rows)
    assert all(map(torch.equal, again.tensors(), rows.tensors()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_per_bag(dtype):
    one_per_bag = native.ops().one_per_bag
    offsets = torch.arange(5000, dtype=dtype)
    assert one_per_bag(offsets)
    assert one_per_bag(offsets[:1])
    for place in (0, 1, 2500, 4999):
        wrong = offsets.clone()
        wrong[place] += 1
        assert not one_per_bag(wrong)


def test_operators_are_as_torch_wants_them():
    ops = native.ops()
    accesses = random_accesses(np.random.default_rng(0), 2, [50, 60], 2, 10, 3, frozen=False)
    torch.library.opcheck(ops.sort_accesses.default, accesses.tensors())
    torch.library.opcheck(ops.sort_accesses.default, (*accesses.tensors(), torch.arange(111)))
    torch.library.opcheck(ops.number_rows.default, accesses.tensors())
    torch.library.opcheck(ops.one_per_bag.default, (torch.arange(5),), test_utils="test_schema")
