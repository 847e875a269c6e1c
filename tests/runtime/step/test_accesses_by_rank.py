"""How many accesses read from each rank, against NumPy."""

import numpy as np
import pytest
import torch

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.runtime.memory.runtime_plan import REPLICA
from oper.runtime.tables.kernel_structs import FEATURE, as_words


@pytest.mark.parametrize("ranks", [1, 3, 20])  # a pass for each rank, and a histogram
def test_counted_sources(ranks):
    rng = np.random.default_rng(ranks)
    rank = ranks // 2
    lengths = np.array([3000, 0, 700, 1])
    others = [field for field in range(ranks) if field != rank]
    field = rng.choice([LOCAL, REPLICA, *others], lengths.sum())
    addresses = field.astype(np.int64) << SLOT_BITS | rng.integers(0, 1 << SLOT_BITS, len(field))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    features = np.zeros(4, dtype=FEATURE)
    features["bucket"] = [1, 0, 0, 1]
    expected = np.zeros((2, ranks + 1), dtype=np.int64)
    column = np.where(field == REPLICA, 0, 1 + np.where(field == LOCAL, rank, field))
    np.add.at(expected, (np.repeat(features["bucket"], lengths), column), 1)
    given = map(torch.from_numpy, (addresses, offsets))
    found = native.ops().accesses_by_rank(*given, as_words(features), 2, rank, ranks)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("ranks", [3, 20])
@pytest.mark.parametrize("field", [-1, 20, 1 << 20])
def test_addresses_of_no_rank_are_refused(ranks, field):
    addresses = torch.tensor([LOCAL << SLOT_BITS, field << SLOT_BITS])
    features = as_words(np.zeros(1, dtype=FEATURE))
    with pytest.raises(IndexError, match=f"one of feature 0 names none of {ranks} ranks"):
        native.ops().accesses_by_rank(addresses, torch.tensor([0, 2]), features, 1, 0, ranks)
