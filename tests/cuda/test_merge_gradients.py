"""Gradients laid out by group and merged on devices, emulated: the processor's groups and bits, in
any order of threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from tests.support.cuda.devices import Device
from tests.support.examples import examples

DIMS = (0, 5, 16, 33)
MOST_BUCKETS = 960
STRIP = 256  # rows that a warp of the kernels counts
ANYTHING = -(2**40)  # what slots beyond the rows are


def rows_before(random: torch.Generator, groups: int, share: float) -> torch.Tensor:
    """Rows before each group and in all: a share of the groups have some."""
    rows = torch.randint(1, 40, (groups,), generator=random)
    rows[torch.rand(groups, generator=random) >= share] = 0
    return torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])


def check_layout(device: Device, before: torch.Tensor, dims: list[int], order: int) -> None:
    given = device.put(before), dims, device.stream
    found = device.start("lay_out_gradients", *given, order=order)
    assert torch.equal(found.cpu(), native.ops().lay_out_gradients(before, dims))


@given(
    seed=st.integers(0, 2**32 - 1),
    dims=st.lists(st.sampled_from(DIMS), max_size=40),
    codes=st.integers(1, 70),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
@examples(30)
def test_groups_are_laid_out(
    device: Device, seed: int, dims: list[int], codes: int, share: float
) -> None:
    before = rows_before(torch.Generator().manual_seed(seed), codes * len(dims), share)
    for order in device.orders:
        check_layout(device, before, dims, order)


@pytest.mark.parametrize(("buckets", "codes"), [(2, 3000), (MOST_BUCKETS, 2), (3, 0)])
def test_many_groups_are_laid_out(device: Device, buckets: int, codes: int) -> None:
    before = rows_before(torch.Generator().manual_seed(1), buckets * codes, 0.7)
    check_layout(device, before, [DIMS[n % 4] for n in range(buckets)], 1)


def test_more_values_than_32_bits_count_are_laid_out(device: Device) -> None:
    before = torch.tensor([0, 2**30 + 1, 2**31, 2**31 + 9])
    check_layout(device, before, [33, 5, 16], 1)


def test_layouts_that_are_refused(device: Device) -> None:
    def lay_out(before: torch.Tensor, dims: list[int]) -> None:
        device.start("lay_out_gradients", device.put(before), dims, device.stream)

    with pytest.raises(ValueError, match="dims: 2 buckets, and 3 groups"):
        lay_out(torch.tensor([0, 1, 2, 3]), [4, 4])
    with pytest.raises(ValueError, match="dims: 961 buckets, and at most 960"):
        lay_out(torch.zeros(MOST_BUCKETS + 2, dtype=torch.int64), [4] * (MOST_BUCKETS + 1))
    with pytest.raises(ValueError, match=r"dims: expected .*, got -1"):
        lay_out(torch.tensor([0, 1]), [-1])
    with pytest.raises(TypeError, match="before: expected dtype int64, got Int"):
        lay_out(torch.tensor([0, 1], dtype=torch.int32), [4])


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # slots, groups and values


def a_part(
    random: torch.Generator, dims: list[int], codes: int, slots: int, share: float, beyond: int
) -> Part:
    """Rows of a share of the slots of each group, some of which have none, with room for more."""
    rows, counts = [], []
    for _ in range(codes * len(dims)):
        of_group = share * (torch.rand(1, generator=random) < 0.8)
        rows.append((torch.rand(slots, generator=random) < of_group).nonzero()[:, 0])
        counts.append(len(rows[-1]))
    before = torch.tensor([0, *counts]).cumsum(0)
    groups = native.ops().lay_out_gradients(before, dims)
    values = torch.randn(int(groups[1, -1]), generator=random)
    return (
        torch.cat([*rows, torch.full((beyond,), ANYTHING)]),
        groups,
        torch.cat([values, torch.full((beyond,), torch.nan)]),
    )


def merge(device: Device, parts: list[Part], dims: list[int], order: int) -> Part:
    slots, groups, values = ([device.put(of) for of in kind] for kind in zip(*parts, strict=True))
    given = slots, values, groups, dims, device.stream
    slot, group, value = device.start("merge_gradients", *given, order=order)
    return slot.cpu(), group.cpu(), value.cpu()


def check_merge(device: Device, parts: list[Part], dims: list[int], order: int) -> None:
    found_slots, found_groups, found = merge(device, parts, dims, order)
    slots, groups, values = (list(of) for of in zip(*parts, strict=True))
    slot, group, expected = native.ops().merge_gradients(slots, values, groups, dims)
    assert torch.equal(found_groups, group)
    assert torch.equal(found_slots[: len(slot)], slot)
    assert len(found_slots) == sum(map(len, slots))
    codes = (group.shape[1] - 1) // len(dims)
    for bucket, dim in enumerate(dims):  # between buckets there is anything
        rows, place = group[:, bucket * codes].tolist()
        end = place + (int(group[0, (bucket + 1) * codes]) - rows) * dim
        bits = [of[place:end].view(torch.int32) for of in (found, expected)]
        assert torch.equal(*bits)


@given(
    seed=st.integers(0, 2**32 - 1),
    dims=st.lists(st.sampled_from(DIMS), min_size=1, max_size=4),
    codes=st.integers(1, 4),
    slots=st.sampled_from([1, 30, 400]),
    shares=st.lists(st.sampled_from([0.0, 0.1, 0.6, 1.0]), min_size=2, max_size=2)
    | st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=5),
    beyond=st.sampled_from([0, 1, 700]),
)
@examples(30)
def test_lists_are_merged(
    device: Device,
    seed: int,
    dims: list[int],
    codes: int,
    slots: int,
    shares: list[float],
    beyond: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    parts = [a_part(random, dims, codes, slots, share, beyond) for share in shares]
    for order in device.orders:
        check_merge(device, parts, dims, order)


@pytest.mark.parametrize("rows", [STRIP - 1, STRIP, STRIP + 1, 40 * STRIP, 33 * 32 * STRIP + 9])
def test_strips_of_rows(device: Device, rows: int) -> None:
    """As many rows as strips have, and more strips than the warps that add them up."""
    random = torch.Generator().manual_seed(rows)
    dims = [1, 4] if rows < 10**5 else [0, 1]
    parts = [a_part(random, dims, 1, rows, share, 0) for share in (0.01, 1.0)]
    check_merge(device, parts, dims, 1)


def test_more_sums_than_threads_at_once(device: Device) -> None:
    random = torch.Generator().manual_seed(7)
    dims = [128, 33]
    check_merge(device, [a_part(random, dims, 2, 400, 0.6, 50) for _ in range(2)], dims, 2)


def test_gradients_that_cannot_be_read_four_at_once(device: Device) -> None:
    """Whose groups lie as they were sent, and of views."""
    random = torch.Generator().manual_seed(3)
    dims = [4, 16]
    parts = []
    for _ in range(2):
        slots, groups, values = a_part(random, dims, 2, 30, 0.6, 8)
        groups = torch.stack([groups[0], groups[1] + 1])
        parts.append((slots, groups, torch.cat([torch.ones(1), values])))
        parts.append((slots, groups, torch.cat([torch.ones(2), values])[1:]))
    check_merge(device, parts, dims, 1)


def test_sums_go_in_the_order_of_the_lists(device: Device) -> None:
    groups = torch.tensor([[0, 1], [0, 4]])
    values = [1.0, 1e8, -1e8, 1.0, 2.0]
    parts = [(torch.tensor([3]), groups, torch.full((4,), value)) for value in values]
    for order in device.orders:
        # ((1 + 1e8) - 1e8) + 1 + 2 in float32, whose values about 1e8 are 8 apart.
        assert merge(device, parts, [4], order)[2][:4].tolist() == [3.0] * 4


def test_zeros_keep_their_signs_and_one_list_is_copied(device: Device) -> None:
    none = torch.tensor([], dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.rand(0)
    for dim in (5, 8):
        groups, values = torch.tensor([[0, 2], [0, 2 * dim]]), torch.full((2 * dim,), -0.0)
        part = torch.tensor([3, 5]), groups, values
        other = torch.tensor([4, 5]), groups, values
        for parts in ([part], [part, none], [none, part], [part, other]):
            check_merge(device, parts, [dim], 1)
    check_merge(device, [none], [5], 1)
    check_merge(device, [none, none], [5], 1)


def test_lists_without_buckets(device: Device) -> None:
    groups = torch.zeros(2, 1, dtype=torch.int64)
    part = torch.tensor([], dtype=torch.int64), groups, torch.rand(0)
    assert [len(of.flatten()) for of in merge(device, [part, part], [], 0)] == [0, 2, 0]


def test_lists_that_are_refused(device: Device) -> None:
    part = torch.arange(2), torch.tensor([[0, 2], [0, 8]]), torch.rand(8)
    longer = torch.arange(2), torch.tensor([[0, 2, 2], [0, 8, 8]]), torch.rand(8)
    with pytest.raises(ValueError, match="expected equal numbers of them, at least one"):
        device.start("merge_gradients", [device.put(part[0])], [], [], [4], device.stream)
    with pytest.raises(ValueError, match="groups: of unlike shapes"):
        merge(device, [part, longer], [4], 0)
    with pytest.raises(ValueError, match="dims: 2 buckets, and 1 groups"):
        merge(device, [part, part], [4, 4], 0)
    with pytest.raises(TypeError, match="values: expected dtype float32, got Double"):
        merge(device, [part, (*part[:2], part[2].double())], [4], 0)
    with pytest.raises(ValueError, match=r"groups: expected \[2, groups \+ 1\], got \[2\]"):
        merge(device, [(part[0], part[1][0], part[2])], [4], 0)
