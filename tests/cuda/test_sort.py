"""The sort of accesses by row on devices, emulated: the runs of the processor's."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS
from tests.support.cuda.devices import Device
from tests.support.examples import examples
from tests.support.runtime.accesses import Accesses, random_accesses


def random_offsets(random: np.random.Generator, values: int, wide: bool) -> torch.Tensor:
    """Bags of so many values, some of them empty."""
    inner = np.sort(random.integers(0, values + 1, random.integers(0, 2 * values + 2)))
    offsets = np.concatenate([[0], inner, [values]])
    return torch.from_numpy(offsets.astype(np.int64 if wide else np.int32))


def sort(
    device: Device,
    accesses: Accesses,
    offsets: torch.Tensor | None = None,
    order: int = 0,
    report: list[int] | None = None,
) -> list[torch.Tensor]:
    """What the device makes of them: tensors as large as the batch may need."""
    addresses, segment_offset, *others = accesses.tensors()
    found = device.start(
        "sort_accesses", device.put(addresses), device.put(segment_offset), *others,
        device.put(offsets), device.stream,
        None if report is None else device.put(torch.tensor(report)), order=order,
    )  # fmt: skip
    number, groups = len(addresses), accesses.buckets * (1 + accesses.ranks)
    assert [t.dtype for t in found] == [torch.int32, torch.int32, torch.int64, torch.int64]
    assert [len(t) for t in found] == [number, number + 1, number, groups + 1]
    return [tensor.cpu() for tensor in found]


def check(found: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> None:
    """As far as there are runs, they are those expected."""
    positions, start, slot, before = expected
    parts = (len(positions), len(start), len(slot), len(before))
    for n, (made, wanted, part) in enumerate(zip(found, expected, parts, strict=True)):
        assert torch.equal(made[:part], wanted), n


def check_without_runs(found: list[torch.Tensor]) -> None:
    """No group has any, and the first would begin at the first access."""
    _, start, _, before = found
    assert not before.any()
    assert int(start[0]) == 0


def check_against_the_processor(
    device: Device, accesses: Accesses, offsets: torch.Tensor | None = None, order: int = 0
) -> None:
    expected = native.ops().sort_accesses(*accesses.tensors(), offsets)
    check(sort(device, accesses, offsets, order), expected)


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 8),
    sizes=st.lists(st.integers(0, 300), max_size=8),
    buckets=st.integers(1, 3),
    slots=st.sampled_from([1, 2, 50, 64, 5000, 2**20, 2**40]),
    replicas=st.sampled_from([0, 1, 10, 10**6]),
    frozen=st.booleans(),
    bags=st.sampled_from(["none", "int32", "int64"]),
)
@examples(100)
def test_runs_are_the_processors(
    device: Device,
    seed: int,
    ranks: int,
    sizes: list[int],
    buckets: int,
    slots: int,
    replicas: int,
    frozen: bool,
    bags: str,
) -> None:
    random = np.random.default_rng(seed)
    accesses = random_accesses(random, ranks, sizes, buckets, slots, replicas, frozen)
    accesses.bucket_slots = [min(slots * int(n), 2**40) for n in random.integers(1, 4, buckets)]
    offsets = None
    if bags != "none":
        offsets = random_offsets(random, len(accesses.addresses), wide=bags == "int64")
    for order in (*device.orders, seed):
        check_against_the_processor(device, accesses, offsets, order)


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("slots", [3, 2**26])
def test_many_accesses(device: Device, slots: int, bags: bool) -> None:
    random = np.random.default_rng(0)
    sizes = [device.many // 4, 0, 1, device.many // 2, device.many // 4]
    accesses = random_accesses(random, 3, sizes, 2, slots, 10, frozen=False)
    accesses.features["has_gradient"][4] = 0
    offsets = random_offsets(random, len(accesses.addresses), wide=False) if bags else None
    check_against_the_processor(device, accesses, offsets)


@pytest.mark.parametrize("features", [856, 960, 961, 2500])
def test_many_features(device: Device, features: int) -> None:
    """One launch takes up to 960 of them."""
    random = np.random.default_rng(features)
    sizes = random.integers(0, 4, features).tolist()
    accesses = random_accesses(random, 2, sizes, 3, 30, 5, frozen=True)
    check_against_the_processor(device, accesses)
    check_against_the_processor(device, accesses, random_offsets(random, sum(sizes), wide=True))


@pytest.mark.parametrize("bags", [False, True])
def test_more_rows_and_accesses_than_64_bits_tell_apart(device: Device, bags: bool) -> None:
    random = np.random.default_rng(1)
    accesses = random_accesses(random, 5, [2000, 0, 1000], 1, 10, 0, frozen=False)
    accesses.ranks, accesses.bucket_slots = 2**16, [2**40]
    slot = random.choice([2**40 - 1, 2**39, 7], 3000)
    accesses.addresses = random.choice([LOCAL - 1, LOCAL, 2**16 - 1, 5], 3000) << SLOT_BITS | slot
    offsets = random_offsets(random, 3000, wide=True) if bags else None
    check_against_the_processor(device, accesses, offsets)
    accesses.features["has_gradient"][0] = 0
    check_against_the_processor(device, accesses, offsets)


@pytest.mark.parametrize("sizes", [[], [0, 0, 0]])
@pytest.mark.parametrize("bags", [False, True])
def test_no_accesses(device: Device, sizes: list[int], bags: bool) -> None:
    accesses = random_accesses(np.random.default_rng(0), 2, sizes, 2, 10, 3, frozen=False)
    check_against_the_processor(device, accesses, torch.zeros(4).int() if bags else None)


def test_frozen_tables_alone(device: Device) -> None:
    accesses = random_accesses(np.random.default_rng(0), 2, [5, 600], 2, 10, 3, frozen=False)
    accesses.features["has_gradient"] = 0
    check_without_runs(sort(device, accesses))
    accesses.bucket_slots = []
    check_without_runs(sort(device, accesses))


def test_addresses_of_no_row_are_of_no_group(device: Device) -> None:
    """The processor's operator refuses them, which a device could do after a wait alone."""
    random = np.random.default_rng(0)
    accesses = random_accesses(random, 2, [500, 300], 2, 10, 3, frozen=False)
    fields, slots = [2, LOCAL - 2, -1, -(2**22)], [16, 2**30, 2**40 - 1]
    wrong = [field << SLOT_BITS | 3 for field in fields] + [LOCAL << SLOT_BITS | n for n in slots]
    bad = random.random(800) < 0.1
    accesses.addresses[bad] = random.choice(wrong, bad.sum())
    found = sort(device, accesses)
    kept = np.flatnonzero(~bad)
    left = Accesses(
        accesses.rank, accesses.ranks, accesses.bucket_slots, accesses.features,
        np.searchsorted(kept, accesses.segment_offset), accesses.addresses[kept],
    )  # fmt: skip
    positions, *runs = native.ops().sort_accesses(*left.tensors())
    check(found, (torch.from_numpy(kept).int()[positions.long()], *runs))


@pytest.mark.parametrize("bags", [False, True])
def test_a_batch_with_a_bad_bag_has_no_runs(device: Device, bags: bool) -> None:
    """Its segments and offsets may be anything, and nothing is read by them."""
    random = np.random.default_rng(0)
    accesses = random_accesses(random, 2, [400, 300], 2, 10, 3, frozen=False)
    expected = native.ops().sort_accesses(*accesses.tensors())
    check(sort(device, accesses, report=[3, -1]), expected)
    offsets = torch.full((900,), 2**40) if bags else None
    for wild in ([2**40, -(2**40), 2**41], [0, 0, 0], [5, 2**50, 3]):
        accesses.segment_offset = np.array(wild)
        for order in device.orders:
            check_without_runs(sort(device, accesses, offsets, order, report=[-1, 7]))


def test_refused_arguments(device: Device) -> None:
    accesses = random_accesses(np.random.default_rng(0), 2, [5, 6], 2, 10, 3, frozen=False)
    accesses.features["bucket"] = [0, 1]
    addresses, segments, features, *_ = accesses.tensors()
    placed = [device.put(addresses), device.put(segments)]
    good: list[Any] = [*placed, features, 0, 2, [10, 10], device.put(torch.arange(12))]
    device.start("sort_accesses", *good, device.stream, None)
    for place, wrong, error, said in (
        (0, device.put(addresses.int()), TypeError, "addresses: expected dtype"),
        (
            1,
            device.put(segments[:2]),
            ValueError,
            "segment_offset: expected 3 contiguous elements, got 2",
        ),
        (2, features[:, :5], ValueError, "features: expected"),
        (3, 2, ValueError, "rank: expected 0 to 1, got 2"),
        (4, 0, ValueError, "ranks: expected .*, got 0"),
        (5, [10], IndexError, "features: 1 is none of 1 buckets"),
        (5, [10, -1], ValueError, "bucket_slots: expected .*, got -1"),
        (5, [10, 2**40 + 1], ValueError, "bucket_slots"),
        (6, device.put(torch.arange(12).float()), TypeError, "offsets: expected dtype"),
        (6, device.put(torch.arange(1)), ValueError, "offsets: bags: expected .*, got 0"),
    ):
        given = [*good[:place], wrong, *good[place + 1 :]]
        with pytest.raises(error, match=said):
            device.start("sort_accesses", *given, device.stream, None)
    accesses.features["bucket"] = 0
    most = [2**24, [2**40]]
    with pytest.raises(ValueError, match="more rows than 64 bits tell apart"):
        device.start("sort_accesses", *placed, accesses.words, 0, *most, None, device.stream, None)
