"""The translation of devices, emulated: the addresses of the processor's kernels."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.plan.address_map import AddressMap
from oper.plan.layout import rank_map
from tests.support.cuda.devices import Device
from tests.support.examples import examples
from tests.support.planner.layouts import random_layout, tables_of


def arguments(
    made: AddressMap,
    device: Device,
    values: torch.Tensor,
    offsets: torch.Tensor,
    tables: torch.Tensor,
) -> list[Any]:
    """The operator's arguments: map and ids in the device's memory, segments in the host's."""
    of_map = (made._maps, *made._arguments, made._flat)
    placed = [device.put(a) if isinstance(a, torch.Tensor) else a for a in of_map]
    return [device.put(values), offsets, tables, *placed]


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 5),
    period=st.integers(1, 7),
    wide=st.booleans(),
    moved=st.booleans(),
    everywhere=st.booleans(),
    flat=st.booleans(),
    narrow_ids=st.booleans(),
)
@examples(40)
def test_addresses_are_the_processors(
    device: Device,
    seed: int,
    ranks: int,
    period: int,
    wide: bool,
    moved: bool,
    everywhere: bool,
    flat: bool,
    narrow_ids: bool,
) -> None:
    random = np.random.default_rng(seed)
    rows = random.integers(1, 2000, 4).tolist()
    layout = random_layout(random, rows, ranks, 5, period, wide, moved, everywhere=everywhere)
    made = AddressMap(tables_of(layout), layout, rank_map(layout, int(random.integers(ranks))))
    if flat:
        made = made.flattened(8 * sorted(rows)[1] + 8 * sorted(rows)[0])
    tables = torch.tensor([2, 0, 3, 1, 0])
    ids = [random.integers(0, rows[t], random.integers(0, 300)) for t in tables.tolist()]
    ids[1] = np.arange(rows[0])
    offsets = torch.tensor(np.cumsum([0] + [len(i) for i in ids]))
    values = torch.from_numpy(np.concatenate(ids))
    values = values.int() if narrow_ids else values
    expected = made.translate_features(values, offsets, tables)
    found = device.run("translate", *arguments(made, device, values, offsets, tables), order=seed)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_the_first_bad_id_is_named(device: Device, bad: int) -> None:
    layout = random_layout(np.random.default_rng(1), [50, 60], 2)
    made = AddressMap(tables_of(layout), layout, rank_map(layout, 0))
    values = torch.arange(40).repeat(10)
    values[[123, 300]] = bad
    given = arguments(made, device, values, torch.tensor([0, 400]), torch.tensor([0]))
    for order in device.orders:
        with pytest.raises(IndexError, match="id number 123 is out of"):
            device.run("translate", *given, order=order)


def test_no_ids(device: Device) -> None:
    layout = random_layout(np.random.default_rng(1), [50], 2)
    made = AddressMap(tables_of(layout), layout, rank_map(layout, 0))
    none = torch.empty(0, dtype=torch.int64)
    given = arguments(made, device, none, torch.tensor([0, 0]), torch.tensor([0]))
    found = device.run("translate", *given)
    assert found.shape == (0,)
