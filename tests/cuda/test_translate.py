"""The translation of devices, emulated: the addresses of the processor's kernels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oper.plan.address_map import AddressMap
from oper.plan.layout import rank_map
from tests.support.cuda.emulator import Emulator
from tests.support.planner.layouts import random_layout, tables_of


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 5),
    period=st.integers(1, 7),
    wide=st.booleans(),
    moved=st.booleans(),
    flat=st.booleans(),
    narrow_ids=st.booleans(),
)
@settings(max_examples=40)
def test_addresses_are_the_processors(
    emulator: Emulator,
    seed: int,
    ranks: int,
    period: int,
    wide: bool,
    moved: bool,
    flat: bool,
    narrow_ids: bool,
) -> None:
    random = np.random.default_rng(seed)
    rows = random.integers(1, 2000, 4).tolist()
    layout = random_layout(random, rows, ranks, 5, period, wide, moved)
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
    emulator.order(seed)
    found = torch.ops.oper_emulated.translate(
        values, offsets, tables, made._maps, *made._arguments, made._flat
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_the_first_bad_id_is_named(emulator: Emulator, bad: int) -> None:
    layout = random_layout(np.random.default_rng(1), [50, 60], 2)
    made = AddressMap(tables_of(layout), layout, rank_map(layout, 0))
    values = torch.arange(40).repeat(10)
    values[[123, 300]] = bad
    arguments = (values, torch.tensor([0, 400]), torch.tensor([0]), made._maps, *made._arguments)
    for order in range(3):
        emulator.order(order)
        with pytest.raises(IndexError, match="id number 123 is out of"):
            torch.ops.oper_emulated.translate(*arguments, made._flat)


def test_no_ids(emulator: Emulator) -> None:
    layout = random_layout(np.random.default_rng(1), [50], 2)
    made = AddressMap(tables_of(layout), layout, rank_map(layout, 0))
    none = torch.empty(0, dtype=torch.int64)
    found = torch.ops.oper_emulated.translate(
        none, torch.tensor([0, 0]), torch.tensor([0]), made._maps, *made._arguments, made._flat
    )
    assert found.shape == (0,)
