"""What devices find wrong in the offsets of a batch, emulated, and that nothing is read by them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cuda.test_lookup import Batch
from tests.support.cuda.devices import Cuda, Device
from tests.support.examples import examples


def reported(device: Device, offsets: torch.Tensor, values: int, order: int = 0) -> list[int]:
    """The report of these offsets: the first bad id, the first bad bag."""
    report = device.put(torch.full((2,), -1))
    assert report is not None
    device.start("check_bags", device.put(offsets), values, report, device.stream, order=order)
    found: list[int] = report.tolist()
    return found


@given(
    seed=st.integers(0, 2**32 - 1),
    bags=st.integers(1, 700),
    changed=st.integers(0, 3),
    more=st.integers(-1, 1),
    wide=st.booleans(),
    order=st.sampled_from([0, 1, 2]),
)
@examples(60)
def test_the_first_bag_that_does_not_fit(
    device: Device, seed: int, bags: int, changed: int, more: int, wide: bool, order: int
) -> None:
    random = np.random.default_rng(seed)
    offsets = np.r_[0, np.cumsum(random.integers(0, 3, bags))]
    values = max(int(offsets[-1]) + more, 0)
    for place in random.integers(0, bags + 1, changed):
        offsets[place] += random.integers(-4, 5)
    begin, end = offsets[:-1], offsets[1:]
    wrong = begin > end
    wrong[0] |= begin[0] != 0
    wrong[-1] |= end[-1] != values
    given = torch.from_numpy(offsets if wide else offsets.astype(np.int32))
    expected = [-1, int(wrong.argmax()) if wrong.any() else -1]
    assert reported(device, given, values, order) == expected


def test_reports_are_left_in_turns(device: Device) -> None:
    posted = device.put(torch.zeros(1, dtype=torch.int64))
    slots = torch.zeros(3, 2, dtype=torch.int64, pin_memory=isinstance(device, Cuda))
    expected = slots.tolist()
    for number in range(7):
        report = device.put(torch.tensor([-1, number]))
        device.start("post_report", report, slots, posted, device.stream)
        if isinstance(device, Cuda):
            torch.cuda.synchronize()
        expected[number % 3] = [-1, number]
        assert slots.tolist() == expected
    assert posted.tolist() == [7]
    with pytest.raises(ValueError, match=r"slots: expected \[slots, 2\], at least one, got \[6\]"):
        device.start("post_report", report, slots.view(-1), posted, device.stream)


@pytest.mark.parametrize("longest", [2, 40])
def test_nothing_is_read_by_offsets_that_do_not_fit(device: Device, longest: int) -> None:
    batch = Batch(5, [("fp32", 16)], samples=50, longest=longest)
    assert batch.offsets is not None
    batch.offsets[7:] += 1 << 40  # far beyond all addresses
    report = device.put(torch.tensor([-1, 7]))
    device.run("pooled_rows", *batch.arguments(device.put), report=report)
