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
    with pytest.raises(ValueError, match="dims: -1"):
        lay_out(torch.tensor([0, 1]), [-1])
    with pytest.raises(TypeError, match="before: dtype Int"):
        lay_out(torch.tensor([0, 1], dtype=torch.int32), [4])
