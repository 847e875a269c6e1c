"""Gradients of rows by group: where they lie, and what two batches' become together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.runtime.memory.device import Cpu
from oper.runtime.tables.row_gradients import RowGradients, laid_out, merged

LINE_VALUES = 16  # of a line of the caches


def expected_places(before: np.ndarray, dims: list[int]) -> list[int]:
    """Where each group's values begin, one after another, and where all end."""
    counts = np.diff(before).reshape(len(dims), -1)
    places, end = [], 0
    for dim, of_bucket in zip(dims, counts, strict=True):
        end = -(-end // LINE_VALUES) * LINE_VALUES
        for count in of_bucket:
            places.append(end)
            end += int(count) * dim
    return [*places, end]


def drawn(rng: np.random.Generator, dims: list[int], codes: int, share: float) -> RowGradients:
    """Rows below 12 of each group, and their gradients; more room than they take."""
    slots = [np.flatnonzero(rng.random(12) < share) for _ in range(codes * len(dims))]
    before = torch.tensor([0, *map(len, slots)]).cumsum(0)
    groups = laid_out(before, dims, Cpu())
    values = torch.from_numpy(rng.normal(size=int(groups[1, -1]) + 5).astype(np.float32))
    return RowGradients(torch.from_numpy(np.concatenate([*slots, [-1]])), groups, values)


def by_row(part: RowGradients, dims: list[int]) -> dict[tuple[int, int], np.ndarray]:
    """The gradient of each group and slot."""
    codes = (part.groups.shape[1] - 1) // len(dims)
    before = part.groups[0].tolist()
    found: dict[tuple[int, int], np.ndarray] = {}
    for g in range(codes * len(dims)):
        gradients = part.gradients_of(range(g, g + 1), dims[g // codes]).numpy()
        slots = part.slots[before[g] : before[g + 1]].tolist()
        found |= {(g, slot): row for slot, row in zip(slots, gradients, strict=True)}
    return found


cases = st.tuples(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([0, 1, 5, 16, 33]), min_size=1, max_size=3),
    st.integers(2, 4),
    st.sampled_from([0.0, 0.3, 1.0]),
)


@given(cases)
def test_each_bucket_begins_at_a_line(case):
    seed, dims, codes, share = case
    part = drawn(np.random.default_rng(seed), dims, codes, share)
    before = part.groups[0].numpy()
    assert part.groups[1].tolist() == expected_places(before, dims)


@given(cases, st.integers(1, 3))
def test_merged_gradients_are_added_in_their_order(case, number):
    seed, dims, codes, share = case
    rng = np.random.default_rng(seed)
    parts = [drawn(rng, dims, codes, share) for _ in range(number)]
    expected: dict[tuple[int, int], np.ndarray] = {}
    for part in parts:
        for row, gradient in by_row(part, dims).items():
            expected[row] = expected[row] + gradient if row in expected else gradient
    whole = merged(parts, dims, Cpu())
    found = by_row(whole, dims)
    assert list(found) == sorted(expected)
    for row, gradient in found.items():
        assert gradient.tobytes() == expected[row].tobytes()
    assert whole.groups[1].tolist() == expected_places(whole.groups[0].numpy(), dims)


def test_no_buckets():
    assert laid_out(torch.tensor([0]), [], Cpu()).tolist() == [[0], [0]]


def test_bad_input():
    with pytest.raises(ValueError, match="dims: 2 buckets, and 3 groups"):
        laid_out(torch.tensor([0, 1, 2, 3]), [4, 4], Cpu())
    with pytest.raises(ValueError, match="before: must ascend"):
        laid_out(torch.tensor([0, 2, 1]), [4], Cpu())
    part = RowGradients.of_rows(torch.arange(2), torch.zeros(2, 4))
    of_two = torch.tensor([[0, 2, 4], [0, 8, 16]])
    other = RowGradients(torch.arange(2).repeat(2), of_two, torch.zeros(16))
    with pytest.raises(ValueError, match="groups: of unlike shapes"):
        merged([part, other], [4], Cpu())
    with pytest.raises(ValueError, match="groups: 10 values from 0 on, of 8"):
        merged([part], [5], Cpu())
