"""The address map against counting rows one by one, and against its definition in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from oper.base.errors import OperError
from oper.plan.address_map import AddressMap, unpack
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK, rank_map
from tests.support.planner.layouts import counted_addresses, random_layout, tables_of

ROWS = st.lists(st.sampled_from([1, 2, 63, 447, 448, 449, 1000]), min_size=1, max_size=3)


def map_of(layout, rank):
    return AddressMap(tables_of(layout), layout, rank_map(layout, rank))


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=ROWS,
    ranks=st.integers(1, 5),
    groups=st.integers(1, 9),
    period=st.integers(1, 9),
    wide=st.booleans(),
    moved=st.booleans(),
    everywhere=st.booleans(),
)
def test_every_row_is_where_counting_finds_it(
    seed, rows, ranks, groups, period, wide, moved, everywhere
):
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, rows, ranks, groups, period, wide, moved, everywhere=everywhere)
    for rank in range(ranks):
        address_map = map_of(layout, rank)
        for t, expected in enumerate(counted_addresses(layout, rank)):
            ids = torch.arange(rows[t])
            assert layout.addresses(t, ids.numpy(), rank).tolist() == expected
            assert address_map.translate(t, ids).tolist() == expected
            assert address_map.translate(t, ids.int()).tolist() == expected


def test_most_ranks_and_slots():
    # 65,536 ranks, slots just below 2^40, a period of 65,536: nothing may overflow.
    rng = np.random.default_rng(0)
    layout = random_layout(rng, [200_000, 3], 4, period=65_536, wide=True)
    ranks = 1 << 16
    layout.base[layout.holds] = SLOT_MASK - 2**37 - np.arange(layout.holds.sum())
    many = type(layout)(
        **{
            **vars(layout),
            "slots": np.full((1, ranks), 2**40),
            "source": np.full((5, ranks), 3, np.uint16),
            "holds": np.eye(1, ranks, 3, dtype=bool).repeat(5, axis=0),
            "base": np.full((5, ranks), SLOT_MASK - 2**37),
            "orders": (rng.permutation(ranks).astype(np.uint16), np.array([65_535], np.uint16)),
            "rotation": np.where(layout.pattern_of == 0, 65_535, 0),
            "stripe_base": np.full((2, ranks), SLOT_MASK - 200_000),
        }
    )
    for rank in (0, 3, 65_535):
        address_map = map_of(many, rank)
        for t in range(2):
            ids = np.arange(many.rows[t])
            found = address_map.translate(t, torch.from_numpy(ids))
            assert (found.numpy() == many.addresses(t, ids, rank)).all()
            field, slot = unpack(found)
            assert int(found.min()) >= 0
            assert int(slot.min()) >= SLOT_MASK - 2**37 - 200_000
            assert ((field == LOCAL) | (field < ranks)).all()


def test_addresses_lead_back_to_rows():
    """The inverse: among the rows of a table, an address belongs to one row."""
    layout = random_layout(np.random.default_rng(4), [5000], 3, groups=1, period=3)
    n = len(layout.codes)
    distinct = type(layout)(
        **{
            **vars(layout),
            "codes": np.arange(n, dtype=np.uint32),
            "stripe_base": np.full((1, 3), n + 1000),
        }
    )
    addresses = map_of(distinct, 0).translate(0, torch.arange(5000)).numpy()
    order = np.argsort(addresses)
    back = order[np.searchsorted(addresses[order], addresses)]
    assert (back == np.arange(5000)).all()


def test_features_of_a_batch():
    rng = np.random.default_rng(1)
    layout = random_layout(rng, [500, 3000, 1], 4, everywhere=True)
    address_map = map_of(layout, 2)
    flat, partly = address_map.flattened(), address_map.flattened(8 * 501)
    tables = [1, 0, 2, 1]  # two features of table 1
    lengths = [700, 0, 3, 1500]
    ids = [rng.integers(0, layout.rows[t], n) for t, n in zip(tables, lengths, strict=True)]
    values = torch.from_numpy(np.concatenate(ids))
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    expected = np.concatenate([layout.addresses(t, i, 2) for t, i in zip(tables, ids, strict=True)])
    for kind in (address_map, flat, partly, flat.flattened(8 * 501)):
        found = kind.translate_features(values, offsets, torch.tensor(tables))
        assert (found.numpy() == expected).all()
    assert flat.nbytes - address_map.nbytes == 8 * layout.rows.sum()
    assert partly.nbytes - address_map.nbytes == 8 * 501
    assert address_map.flattened(0).nbytes == address_map.nbytes


def test_many_ids_on_many_threads():
    layout = random_layout(np.random.default_rng(2), [100_000, 77], 3)
    address_map = map_of(layout, 0)
    ids = torch.randint(0, 100_000, (200_000,))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = address_map.translate(0, ids)
    finally:
        torch.set_num_threads(threads)
    assert (found.numpy() == layout.addresses(0, ids.numpy(), 0)).all()


@pytest.mark.parametrize("bad", [-1, 1000, 2**40, -(2**63)])
@pytest.mark.parametrize("kind", [lambda m: m, AddressMap.flattened])
def test_ids_out_of_range_are_named(bad, kind):
    translator = kind(map_of(random_layout(np.random.default_rng(3), [5, 1000], 2), 1))
    ids = torch.zeros(300, dtype=torch.int64)
    ids[270] = bad
    with pytest.raises(OperError, match=f"table 't1': id {bad} .number 270.* 0 to 999"):
        translator.translate(1, ids)
    ids[270] = 0
    assert len(translator.translate(1, ids)) == 300


def test_ids_out_of_range_are_named_by_their_place_in_the_whole_batch():
    address_map = map_of(random_layout(np.random.default_rng(3), [5, 1000], 2), 1)
    values = torch.tensor([4, 999, 0, 0, 1000])  # one id of table 0, four of table 1
    with pytest.raises(OperError, match=r"'t1': id 1000 \(number 4 of the batch"):
        address_map.translate_features(values, torch.tensor([0, 1, 5]), torch.tensor([0, 1]))


def test_unknown_table_and_type():
    address_map = map_of(random_layout(np.random.default_rng(3), [5], 2), 0)
    with pytest.raises(OperError, match="tables 0 to 0"):
        address_map.translate(1, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="int64 or int32"):
        address_map.translate(0, torch.zeros(3))


def test_shapes_under_fake_tensors():
    """torch.compile sees the shape and type of the result without running the kernel."""
    address_map = map_of(random_layout(np.random.default_rng(3), [5], 2), 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = address_map.translate(0, torch.empty(3, 4, dtype=torch.int32))
    assert found.shape == (3, 4)
    assert found.dtype == torch.int64


def test_empty_and_shaped_ids():
    address_map = map_of(random_layout(np.random.default_rng(3), [50], 2), 0)
    assert address_map.translate(0, torch.empty(0, dtype=torch.int64)).shape == (0,)
    ids = torch.arange(50).reshape(5, 10).t()  # not contiguous
    found = address_map.translate(0, ids)
    assert found.shape == (10, 5)
    assert (found.t().flatten() == address_map.translate(0, torch.arange(50))).all()
    assert SLOT_BITS == 40
