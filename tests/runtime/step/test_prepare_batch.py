"""How a batch is divided, on the CPU and on devices: the same, for any lengths."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from oper.base.errors import OperError
from oper.runtime.step.prepare_batch import bags_on_device, bags_on_host


def kjt(features: int, values: int, **parts) -> KeyedJaggedTensor:
    keys = [f"f{n}" for n in range(features)]
    return KeyedJaggedTensor(keys, torch.arange(values), **parts)


@pytest.mark.parametrize(
    ("parts", "one_each"),
    [
        ({"lengths": torch.ones(8, dtype=torch.int64)}, True),
        ({"offsets": torch.arange(9)}, True),
        ({"offsets": torch.arange(9, dtype=torch.int32)}, True),
        ({"lengths": torch.tensor([1, 1, 0, 2, 1, 1, 1, 1])}, False),
        ({"offsets": torch.tensor([0, 1, 2, 2, 4, 5, 6, 7, 8])}, False),
    ],
)
def test_one_id_for_each_feature_and_sample_is_known(parts, one_each):
    _, found, begins = bags_on_host(kjt(4, 8, **parts), None)
    assert found == one_each
    assert begins.tolist() == kjt(4, 8, **parts).offsets()[::2].tolist()


def test_too_many_lengths():
    for bags in (bags_on_host, partial(bags_on_device, pooled=True)):
        with pytest.raises(OperError, match="9 lengths, and 4 features of 2 samples need 8"):
            bags(kjt(4, 8, offsets=torch.arange(10), stride=2), None)


@pytest.mark.parametrize("known", [True, False])
def test_lengths_that_contradict_the_values_of_what_is_not_pooled(known):
    batch = kjt(4, 9, lengths=torch.ones(8, dtype=torch.int64), stride=2)
    if known:
        batch.length_per_key()
    with pytest.raises(OperError, match="the lengths must sum to that"):
        bags_on_device(batch, None, pooled=False)


@given(
    seed=st.integers(0, 2**32 - 1),
    features=st.integers(1, 5),
    samples=st.integers(0, 6),
    longest=st.integers(0, 3),
    reordered=st.booleans(),
    pooled=st.booleans(),
    known=st.booleans(),
)
def test_both_divide_alike(seed, features, samples, longest, reordered, pooled, known):
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, longest + 1, features * samples))
    order = rng.integers(0, features, rng.integers(1, 5)).tolist() if reordered else None
    made = [kjt(features, int(lengths.sum()), lengths=lengths, stride=samples) for _ in range(2)]
    if known:
        made[1].length_per_key()
    on_host, _, begins_on_host = bags_on_host(made[0], order)
    on_device, begins_on_device, _ = bags_on_device(made[1], order, pooled)
    assert on_host.keys() == on_device.keys()
    assert torch.equal(on_host.values(), on_device.values())
    assert torch.equal(begins_on_host, begins_on_device)
    per_key = [int(part.sum()) for part in on_host.lengths().view(-1, samples)] if samples else []
    assert begins_on_host.diff().tolist() == (per_key or [0] * len(on_host.keys()))
