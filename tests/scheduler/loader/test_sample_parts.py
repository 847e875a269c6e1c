"""Samples as bytes and back, against bags as Python's lists."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.scheduler.loader.batch_structure import Jagged, Part, choose, from_bytes, join, to_bytes

TYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.complex128)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Part], int]:
    """Parts of 0 to 6 samples: tensors of any type and shape, bags with weights or not."""
    samples = draw(st.integers(0, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            shape = (samples, *draw(st.sampled_from([(), (1,), (3,), (2, 0), (2, 3)])))
            parts.append(values(random, shape, draw(st.sampled_from(TYPES))))
            continue
        most = draw(st.integers(1, 4))
        lengths = random.integers(0, most, (draw(st.integers(0, 3)), samples))
        kind = draw(st.sampled_from([torch.int32, torch.int64]))
        weights = values(random, (lengths.sum(),), torch.float32) if draw(st.booleans()) else None
        ids = values(random, (lengths.sum(),), draw(st.sampled_from([torch.int32, torch.int64])))
        parts.append(Jagged(torch.from_numpy(lengths).to(kind), ids, weights))
    return parts, samples


def values(random: np.random.Generator, shape: Any, kind: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(random.integers(0, 100, shape)).to(kind)


def samples_of(part: Part) -> list[Any]:
    """What each sample has in a part, bag after bag."""
    if isinstance(part, torch.Tensor):
        return [row.tolist() for row in part]
    bags, position = [], 0
    for of_feature in part.lengths.tolist():
        for length in of_feature:
            end = position + length
            weights = None if part.weights is None else part.weights[position:end].tolist()
            bags.append((part.values[position:end].tolist(), weights))
            position = end
    assert position == len(part.values)
    samples = part.lengths.shape[1]
    return [bags[s::samples] for s in range(samples)]


@given(batches(), st.randoms(use_true_random=False))
def test_chosen_samples_arrive_and_join(batch: tuple[list[Part], int], random: Any) -> None:
    parts, samples = batch
    chosen: list[list[int]] = [[], [], []]
    for sample in range(samples):
        chosen[random.randrange(3)].append(sample)
    arrived = []
    for numbers in chosen:
        sent = to_bytes([choose(part, torch.tensor(numbers, dtype=torch.int64)) for part in parts])
        assert sent.dtype == torch.uint8
        arrived.append(from_bytes(sent, parts, len(numbers)))
    order = [sample for numbers in chosen for sample in numbers]
    for given_part, *pieces in zip(parts, *arrived, strict=True):
        joined = join(pieces)
        expected = samples_of(given_part)
        assert samples_of(joined) == [expected[sample] for sample in order]
        if isinstance(given_part, torch.Tensor):
            assert isinstance(joined, torch.Tensor)
            assert (joined.dtype, joined.shape) == (given_part.dtype, given_part.shape)
