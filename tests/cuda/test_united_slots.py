"""Slots that are united on a device, and rows that are found among them: as by the processor's
operators, which tests/runtime/step/test_relay_operators.py has against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from tests.runtime.step.test_relay_operators import drawn_lists, tensors_of
from tests.support.cuda.devices import Device
from tests.support.examples import examples

ops = native.ops()
numbers = st.integers(0, 10_000)


@examples(40)
@given(numbers, st.integers(1, 9), st.integers(1, 6))
def test_slots_are_united(device: Device, seed: int, lists: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    given_lists = drawn_lists(rng, lists, groups, most=int(rng.choice([1, 30, 600])))
    chosen = rng.permutation(groups)[: rng.integers(0, groups + 1)].tolist()
    tensors = [tensors_of(of, room=3) for of in given_lists]
    slots, before = [of for of, _ in tensors], [of for _, of in tensors]
    wanted, wanted_before = ops.unite_slots(slots, before, chosen)
    for order in device.orders:
        there = [device.put(of) for of in slots]
        found = device.start("unite_slots", there, before, chosen, device.stream, order=order)
        assert torch.equal(found[1].cpu(), wanted_before)
        assert torch.equal(found[0].cpu()[: len(wanted)], wanted)


def test_slots_as_large_as_addresses_have_them_are_united(device: Device) -> None:
    most = (1 << 40) - 1
    lists = [torch.tensor([0, most - 1, 0]), torch.tensor([most - 1, most, most])]
    before = [torch.tensor([0, 2, 3]), torch.tensor([0, 2, 3])]
    there = [device.put(of) for of in lists]
    slots, ends = device.start("unite_slots", there, before, [1, 0], device.stream)
    assert ends.tolist() == [0, 2, 5]
    assert slots.tolist()[:5] == [0, most, 0, most - 1, most]


@examples(40)
@given(numbers, st.integers(1, 4), st.integers(1, 5))
def test_united_rows_are_found(device: Device, seed: int, groups: int, relays: int) -> None:
    """Each in the list of the one that united its group."""
    rng = np.random.default_rng(seed)
    mine, theirs = drawn_lists(rng, 2, groups * relays)
    chosen = rng.permutation(groups * relays)
    united = [
        [np.union1d(mine[g], theirs[g]) for g in of]
        for of in np.split(chosen, np.sort(rng.integers(0, len(chosen) + 1, relays - 1)))
    ]
    slots, before = tensors_of(mine)
    lists = [tensors_of(of, room=2) for of in united]
    called = [rng.integers(0, 9, len(chosen)).tolist(), rng.integers(0, 50, len(chosen)).tolist()]
    wanted = torch.full((len(slots),), -1)
    of_lists = ([of for of, _ in lists], [of for _, of in lists])
    ops.find_united(wanted, slots, before, chosen.tolist(), *of_lists, *called)
    for order in device.orders:
        targets = device.put(torch.full((len(slots),), -1))
        there = ([device.put(of) for of in of_lists[0]], of_lists[1])
        rows = (device.put(slots), before, chosen.tolist())
        device.start("find_united", targets, *rows, *there, *called, device.stream, order=order)
        assert torch.equal(targets.cpu(), wanted)


def test_lists_that_do_not_fit_are_refused(device: Device) -> None:
    slots, before = device.put(torch.tensor([1, 2])), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="got 1 and 2"):
        device.start("unite_slots", [slots], [before, before], [], device.stream)
    with pytest.raises(IndexError, match="before: 1 is none of 1 groups"):
        device.start("unite_slots", [slots], [before], [1], device.stream)
    with pytest.raises(ValueError, match="before: group 0 is slots 0 to 3 of 2"):
        device.start("unite_slots", [slots], [torch.tensor([0, 3])], [0], device.stream)
    targets = device.put(torch.zeros(2, dtype=torch.int64))
    rows = (targets, slots, before, [0])
    none = ([device.put(slots[:0])], [torch.tensor([0, 0])])
    with pytest.raises(ValueError, match="united: group 0 has no slots"):
        device.start("find_united", *rows, *none, [0], [0], device.stream)
    united = ([slots], [before])
    with pytest.raises(ValueError, match="targets: 1 for rows to 2"):
        device.start("find_united", targets[:1], *rows[1:], *united, [0], [0], device.stream)
