"""The kernels that forward bags between nodes, against NumPy."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.runtime.memory.runtime_plan import REPLICA
from oper.runtime.tables.kernel_structs import FEATURE, as_words
from tests.support.examples import examples


class Batch(NamedTuple):
    """Bags of features that read rows of ranks of nodes, as one rank sees them."""

    addresses: np.ndarray
    lengths: np.ndarray  # [F, samples]
    weights: np.ndarray | None
    features: np.ndarray
    node_of: list[int]  # of each rank
    rank: int

    @property
    def offsets(self) -> torch.Tensor:
        return torch.from_numpy(np.append(0, np.cumsum(self.lengths)))

    @property
    def read(self) -> tuple[Any, ...]:
        weights = None if self.weights is None else torch.from_numpy(self.weights)
        return torch.from_numpy(self.addresses), self.offsets, weights

    @property
    def nodes(self) -> tuple[list[int], int]:
        """Of each rank its node's number among the others, and how many those are."""
        own = self.node_of[self.rank]
        others = sorted({*self.node_of} - {own})
        found = [others.index(n) if n != own else len(others) for n in self.node_of]
        return found, len(others)

    @property
    def places(self) -> list[int]:
        """Of each rank its place in its node."""
        return [self.node_of[:r].count(n) for r, n in enumerate(self.node_of)]

    @property
    def fields(self) -> list[int]:
        """Of each rank of this node its field in addresses here."""
        own = self.node_of[self.rank]
        return [LOCAL if r == self.rank else r for r, n in enumerate(self.node_of) if n == own]

    def destination(self, address: int) -> int:
        field = int(address) >> SLOT_BITS
        destinations, others = self.nodes
        return others if field >= REPLICA else destinations[field]


@st.composite
def batches(draw: Any) -> Batch:
    node_of = draw(st.sampled_from([[0, 1], [0, 0, 1], [0, 1, 0], [0, 1, 2], [0, 1, 2, 2, 1]]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    features, samples = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    rank = draw(st.integers(0, len(node_of) - 1))
    lengths = rng.integers(0, 5, (features, samples))
    size = int(lengths.sum())
    fields = rng.choice([r for r in range(len(node_of)) if r != rank] + [LOCAL, REPLICA], size)
    slots = rng.integers(0, draw(st.sampled_from([1, 1000, 2**39])), size)
    described = np.zeros(features, FEATURE)
    described["dim"] = rng.integers(1, 9, features)
    described["bags"] = samples
    described["first_bag"] = np.arange(features) * samples
    described["out_base"] = np.cumsum(described["dim"]) - described["dim"]
    described["out_stride"] = described["dim"].sum()
    weights = rng.random(size, dtype=np.float32) if draw(st.booleans()) else None
    return Batch(fields << SLOT_BITS | slots, lengths, weights, described, node_of, rank)


def forwarded(batch: Batch, to: int, bits: int, words: int) -> tuple[np.ndarray, ...]:
    """What goes to a node, the places of the bags' sums, and the positions of the accesses."""
    ends = np.append(0, np.cumsum(batch.lengths))
    samples = batch.lengths.shape[1]
    bags = np.zeros(len(batch.features), np.int32)
    accesses, lengths, places, positions = bags.copy(), [], [], []
    for f, feature in enumerate(batch.features):
        for sample in range(samples):
            bag = f * samples + sample
            of_bag = range(ends[bag], ends[bag + 1])
            there = [n for n in of_bag if batch.destination(batch.addresses[n]) == to]
            if there:
                bags[f] += 1
                accesses[f] += len(there)
                lengths.append(len(there))
                places.append(feature["out_base"] + sample * feature["out_stride"])
                positions += there
    found = batch.addresses[positions] if positions else np.zeros(0, np.int64)
    place = np.array(batch.places)[found >> SLOT_BITS]
    codes = place.astype(np.int64) << bits | found & SLOT_MASK
    parts = [bags, accesses, np.array(lengths, np.int32)]
    parts.append(codes.astype(np.int32) if words == 1 else codes.view(np.int32))
    if batch.weights is not None:
        parts.append(batch.weights[positions].view(np.int32))
    return np.concatenate(parts), np.array(places, np.int64), np.array(positions, np.int32)


def code_words(batch: Batch) -> tuple[int, int]:
    slots = batch.addresses & SLOT_MASK
    bits = int(slots.max(initial=0)).bit_length()
    return bits, 1 if bits + 3 <= 31 else 2


@examples(100)
@given(batches(), st.sampled_from([torch.int32, torch.int64]))
def test_bags_are_forwarded_by_node(batch, dtype):
    addresses, offsets, weights = batch.read
    bits, words = code_words(batch)
    parcels, places, positions, kept, counts = native.ops().forward_bags(
        addresses, offsets.to(dtype), weights, as_words(batch.features), *batch.nodes,
        batch.places, bits, words,
    )  # fmt: skip
    left = batch.lengths.ravel().copy()
    for to in range(batch.nodes[1]):
        content, at, of = forwarded(batch, to, bits, words)
        assert parcels[to].tolist() == content.tolist()
        assert counts[to].tolist() == content[: 2 * len(batch.features)].tolist()
        assert places[to].tolist() == at.tolist()
        if weights is not None:
            assert positions[to].tolist() == of.tolist()
        np.subtract.at(left, np.searchsorted(offsets.numpy(), of, side="right") - 1, 1)
    assert kept.tolist() == left.tolist()


class Client(NamedTuple):
    """What a client forwards to this rank: the words, and what is in them."""

    words: torch.Tensor
    lengths: np.ndarray
    addresses: np.ndarray
    weights: np.ndarray


def clients(batch: Batch, features: int, rng: np.random.Generator) -> list[Client]:
    """One in each of the other nodes; their first features may have no bags."""
    bits, words = code_words(batch)
    without, found = rng.integers(0, 2), []
    for _ in range(batch.nodes[1]):
        lengths = [rng.integers(1, 4, rng.integers(0, 4) * (f >= without)) for f in range(features)]
        size = sum(int(of.sum()) for of in lengths)
        owner = rng.integers(0, len(batch.fields), size)
        slots = rng.integers(0, 1 << bits, size)
        codes = owner.astype(np.int64) << bits | slots
        weights = rng.random(size, dtype=np.float32)
        parts = [
            np.array([len(of) for of in lengths], np.int32),
            np.array([of.sum() for of in lengths], np.int32),
            *(of.astype(np.int32) for of in lengths),
            codes.astype(np.int32) if words == 1 else codes.view(np.int32),
        ]
        if batch.weights is not None:
            parts.append(weights.view(np.int32))
        addresses = np.array(batch.fields)[owner] << SLOT_BITS | slots
        all_lengths = np.concatenate([np.zeros(0, int), *lengths])
        found.append(
            Client(torch.from_numpy(np.concatenate(parts)), all_lengths, addresses, weights)
        )
    return found


@examples(100)
@given(batches(), st.integers(0, 10**6))
def test_batches_are_joined_with_those_of_clients(batch, seed):
    """No bags of a feature are forwarded that stays as it is."""
    rng = np.random.default_rng(seed)
    addresses, offsets, weights = batch.read
    bits, words = code_words(batch)
    features, samples = batch.lengths.shape
    pooled = np.flatnonzero(rng.random(features) < 0.7)
    _, _, _, kept, _ = native.ops().forward_bags(
        addresses, offsets, weights, as_words(batch.features[pooled]), *batch.nodes, batch.places,
        bits, words,
    )  # fmt: skip
    theirs = clients(batch, len(pooled), rng)

    number = np.repeat(np.arange(features), batch.lengths.sum(axis=1))
    there = [batch.destination(a) == batch.nodes[1] for a in batch.addresses]
    stays = np.array(there, bool) | ~np.isin(number, pooled)
    forwards = np.bincount(number[~stays], minlength=features)
    found = native.ops().join_bags(
        addresses, offsets, weights, as_words(batch.features), forwards.tolist(), *batch.nodes,
        kept, [client.words for client in theirs], len(pooled), batch.fields, bits, words,
    )  # fmt: skip
    joined, ends, joined_weights, positions = found
    came = [client.addresses for client in theirs]
    assert joined.tolist() == np.concatenate([batch.addresses[stays], *came]).tolist()
    bag_of = np.repeat(np.arange(features * samples), batch.lengths.ravel())
    lengths = [
        np.bincount(bag_of[stays], minlength=features * samples),
        *(t.lengths for t in theirs),
    ]
    assert ends.tolist() == np.append(0, np.cumsum(np.concatenate(lengths))).tolist()
    if weights is not None:
        expected = np.concatenate([batch.weights[stays], *(t.weights for t in theirs)])
        assert joined_weights.tolist() == expected.tolist()
        assert positions.tolist() == np.flatnonzero(stays).tolist()


@examples(50)
@given(st.integers(0, 10**6))
def test_vectors_of_bags_are_gathered_and_added(seed):
    rng = np.random.default_rng(seed)
    counts, dims = rng.integers(0, 5, 3), rng.integers(1, 70, 3)
    out = rng.standard_normal(2000).astype(np.float32)
    starts = rng.permutation(2000 // 70)[: counts.sum()] * 70
    vectors = torch.zeros(int(counts @ dims))
    arguments = (torch.from_numpy(starts), counts.tolist(), dims.tolist())
    native.ops().gather_bags(torch.from_numpy(out), *arguments, vectors)
    widths = np.repeat(dims, counts)
    each = [np.arange(s, s + w) for s, w in zip(starts, widths, strict=True)]
    places = np.concatenate([np.zeros(0, dtype=np.int64), *each])
    assert np.array_equal(vectors.numpy(), out[places])
    added = torch.from_numpy(rng.standard_normal(len(places)).astype(np.float32))
    result = torch.from_numpy(out.copy())
    native.ops().add_bags(result, *arguments, added)
    out[places] += added.numpy()
    assert np.array_equal(result.numpy(), out)


def test_words_that_no_rank_sends_are_refused():
    features = np.zeros(1, FEATURE)
    features["bags"] = 1
    given = (torch.tensor([LOCAL << SLOT_BITS]), None, None, as_words(features), [0], [1, 0], 1)
    kept = torch.ones(1, dtype=torch.int32)
    for words, text in (
        ([2, 1, 1], "fewer accesses than bags"),
        ([1, 2, 1, 7, 7], "the bags of feature 0 have 1 accesses, and 2 came"),
        ([1, 1, 1], "3 words, and 4 follow"),
        ([1, 1, 0, 7], "a bag of 0 accesses"),
        ([1, 1, 1, 9 << 5], "a code of none of the 1 ranks here"),
    ):
        with pytest.raises((ValueError, IndexError), match=text):
            native.ops().join_bags(*given, kept, [torch.tensor(words).int()], 1, [LOCAL], 5, 1)
