"""What a rank does for all ranks of its node, against NumPy: slots united, rows found where they
them, gradients merged into messages."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import SLOT_BITS, SLOT_MASK
from tests.support.examples import examples

ops = native.ops()


def drawn_lists(rng: np.random.Generator, lists: int, groups: int, most: int = 30) -> Any:
    """Of each list its groups of ascending slots."""
    return [
        [np.flatnonzero(rng.random(most) < rng.choice([0.0, 0.2, 0.9])) for _ in range(groups)]
        for _ in range(lists)
    ]


def tensors_of(groups: list[np.ndarray], room: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots, with room for more behind them, and how many there are before each group."""
    slots = np.concatenate([*groups, np.full(room, -7)]).astype(np.int64)
    before = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
    return torch.from_numpy(slots), torch.from_numpy(before.astype(np.int64))


numbers = st.integers(0, 10_000)


@examples(50)
@given(numbers, st.integers(1, 4), st.integers(1, 6))
def test_slots_are_united(seed, lists, groups):
    rng = np.random.default_rng(seed)
    given_lists = drawn_lists(rng, lists, groups)
    chosen = rng.permutation(groups)[: rng.integers(0, groups + 1)].tolist()
    tensors = [tensors_of(of, room=3) for of in given_lists]
    slots, before = ops.unite_slots([s for s, _ in tensors], [b for _, b in tensors], chosen)
    expected = [np.unique(np.concatenate([of[g] for of in given_lists])) for g in chosen]
    wanted, wanted_before = tensors_of(expected)
    assert torch.equal(slots, wanted)
    assert torch.equal(before, wanted_before)


@examples(50)
@given(numbers, st.integers(1, 4))
def test_united_rows_are_found_at_their_places(seed, groups):
    rng = np.random.default_rng(seed)
    mine, theirs = drawn_lists(rng, 2, groups)
    chosen = rng.permutation(groups)[: rng.integers(1, groups + 1)].tolist()
    united = [np.union1d(mine[g], theirs[g]) for g in chosen]
    slots, before = tensors_of(mine)
    fields, firsts = rng.integers(0, 9, len(chosen)), rng.integers(0, 50, len(chosen))
    targets = torch.full((len(slots),), -1)
    cut = int(rng.integers(0, len(chosen) + 1))  # what one rank united, and another
    lists = [tensors_of(of, room=2) for of in (united[:cut], united[cut:])]
    ops.find_united(
        targets,
        slots,
        before,
        chosen,
        [of for of, _ in lists],
        [of for _, of in lists],
        fields.tolist(),
        firsts.tolist(),
    )
    expected = np.full(len(slots), -1)
    for n, g in enumerate(chosen):
        for row in range(int(before[g]), int(before[g + 1])):
            place = firsts[n] + np.searchsorted(united[n], int(slots[row]))
            expected[row] = fields[n] << SLOT_BITS | place
    assert targets.tolist() == expected.tolist()
    assert (targets[targets >= 0] & SLOT_MASK < 100).all()


def test_rows_that_nobody_fetched_are_an_error():
    before = torch.tensor([0, 2])
    given = (torch.zeros(2, dtype=torch.int64), torch.tensor([3, 5]), before, [0])
    ops.find_united(*given, [torch.tensor([3, 4, 5])], [torch.tensor([0, 3])], [1], [0])
    for united in ([3, 4], [4, 5], [3]):
        ends = torch.tensor([0, len(united)])
        with pytest.raises(ValueError, match=r"united: slot [35] of group 0 is not there"):
            ops.find_united(*given, [torch.tensor(united)], [ends], [1], [0])
    there = ([torch.tensor([3, 5])], [before])
    with pytest.raises(ValueError, match="groups: 2, and 1 are united"):
        ops.find_united(*given[:3], [0, 0], *there, [1, 1], [0, 0])
    with pytest.raises(ValueError, match="groups: 1, and more are united"):
        ops.find_united(*given, there[0] * 2, there[1] * 2, [1], [0])
    with pytest.raises(ValueError, match="targets"):
        ops.find_united(given[0][:1], *given[1:], *there, [1], [0])


@examples(50)
@given(numbers, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_messages_have_the_sums_of_the_lists_in_their_order(seed, lists, owners, buckets):
    rng = np.random.default_rng(seed)
    dims, groups = rng.integers(1, 7, buckets), owners * buckets + 2
    chosen = rng.permutation(groups)[: owners * buckets].tolist()
    of_bucket = np.zeros(groups, dtype=np.int64)
    of_bucket[chosen] = np.tile(np.arange(buckets), owners)
    given_lists = drawn_lists(rng, lists, groups)
    values = [
        [
            rng.standard_normal((len(slots), dims[bucket])).astype(np.float32)
            for slots, bucket in zip(of, of_bucket, strict=True)
        ]
        for of in given_lists
    ]
    slot_tensors, value_tensors, group_tensors = [], [], []
    for of, of_values in zip(given_lists, values, strict=True):
        slots, before = tensors_of(of, room=1)
        sizes = np.concatenate([[0], np.cumsum([v.size for v in of_values])])
        slot_tensors.append(slots)
        value_tensors.append(torch.from_numpy(np.concatenate([v.ravel() for v in of_values])))
        group_tensors.append(torch.stack([before, torch.from_numpy(sizes)]))
    rows, messages = ops.relay_gradients(
        slot_tensors, value_tensors, group_tensors, chosen, dims.tolist()
    )
    content, counts, at = messages.numpy().tobytes(), [], 0
    for owner in range(owners):
        slots_of, sums = b"", b""
        for group in chosen[owner * buckets :][:buckets]:
            found: dict[int, np.ndarray] = {}
            for of, of_values in zip(given_lists, values, strict=True):
                for slot, value in zip(of[group].tolist(), of_values[group], strict=True):
                    found[slot] = found[slot] + value if slot in found else value
            counts.append(len(found))
            slots_of += np.array(sorted(found), dtype=np.int64).tobytes()
            sums += b"".join(found[slot].tobytes() for slot in sorted(found))
        message = slots_of + sums
        assert content[at:].startswith(message)
        at += -(-len(message) // 8) * 8
    assert at == len(content)
    assert rows.tolist() == counts


def test_operators_that_get_what_does_not_fit():
    slots, before = torch.tensor([1, 2]), torch.tensor([0, 2])
    with pytest.raises(IndexError, match="before: 1 is none of 1 groups"):
        ops.unite_slots([slots], [before], [1])
    with pytest.raises(ValueError, match="before: group 0 is slots 0 to 3 of 2"):
        ops.unite_slots([slots], [before + torch.tensor([0, 1])], [0])
    groups = torch.tensor([[0, 2], [0, 8]])
    with pytest.raises(ValueError, match="dims: 2 buckets, and 1 groups"):
        ops.relay_gradients([slots], [torch.zeros(8)], [groups], [0], [4, 4])
    with pytest.raises(ValueError, match="groups: 10 values from 0 on, of 8"):
        ops.relay_gradients([slots], [torch.zeros(8)], [groups], [0], [5])
