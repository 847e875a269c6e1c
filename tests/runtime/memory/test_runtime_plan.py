"""Addresses as the runtime reads them: which slots replicas take, against the map of every row."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.plan.layout import SLOT_BITS, SLOT_MASK
from oper.runtime.memory.runtime_plan import REPLICA, replica_slots, runtime_map
from oper.tables.table import Table
from tests.support.runtime.runtime_plans import random_plan


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(1, 900), st.sampled_from([4, 8])), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_slots_of_replicas_are_those_of_their_addresses(seed, sizes, ranks, replicated):
    tables = tuple(Table(f"t{n}", rows, dim) for n, (rows, dim) in enumerate(sizes))
    plan = random_plan(seed, tables, ranks, replicated=replicated)
    addresses = runtime_map(plan, ranks - 1)
    chosen = np.random.default_rng(seed).random(len(tables)) < 0.5
    for width in range(len(plan.layout.slots)):
        mine = np.flatnonzero(chosen & (plan.layout.width_of_table == width)).tolist()
        expected = []
        for t in mine:
            at = addresses.translate(t, torch.arange(tables[t].rows)).numpy()
            expected.append(at[at >> SLOT_BITS == REPLICA] & SLOT_MASK)
        expected_slots = np.sort(np.concatenate([np.zeros(0, np.int64), *expected]))
        np.testing.assert_array_equal(replica_slots(plan.layout, mine), expected_slots)
