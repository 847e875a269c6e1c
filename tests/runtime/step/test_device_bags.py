"""Bags between nodes on any device, against the kernels of the processor, bit by bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.runtime.step import device_bags
from oper.runtime.tables.kernel_structs import FEATURE, as_words
from tests.runtime.step.test_forward_bags import Batch, batches, clients, code_words
from tests.support.examples import examples

ON_DEVICES = pytest.mark.parametrize(
    "device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
)


@dataclass(frozen=True)
class Case:
    """A batch whose features have any numbers of bags, or none, and which of them are pooled, in
    any order. `offsets` is None where each bag has one access."""

    batch: Batch
    addresses: np.ndarray
    offsets: np.ndarray | None
    features: np.ndarray
    pooled: np.ndarray
    rng: np.random.Generator

    @property
    def read(self) -> tuple[Any, ...]:
        given = (self.addresses, self.offsets, self.batch.weights)
        return tuple(None if a is None else torch.from_numpy(a) for a in given)

    @property
    def pooled_features(self) -> torch.Tensor:
        return as_words(self.features[self.pooled])

    @property
    def codes(self) -> tuple[int, int]:
        return code_words(self.batch)

    @property
    def forward(self) -> tuple[Any, ...]:
        """What follows a batch in the arguments of `forward_bags`."""
        return (self.pooled_features, *self.batch.nodes, self.batch.places, *self.codes)

    def forwards(self, words: list[torch.Tensor]) -> np.ndarray:
        """How many accesses each feature forwards in those words."""
        found = np.zeros(len(self.features), dtype=np.int64)
        for head in device_bags.head_words(words, len(self.pooled)):
            found[self.pooled] += np.array(head[len(self.pooled) :], dtype=np.int64)
        return found


@st.composite
def cases(draw: Any) -> Case:
    batch, rng = draw(batches()), np.random.default_rng(draw(st.integers(0, 10**6)))
    addresses, offsets = batch.addresses.copy(), batch.offsets.numpy()
    if draw(st.booleans()):  # of no rank, which this node's are taken for
        odd = rng.random(len(addresses)) < 0.2
        fields = rng.choice([len(batch.node_of), LOCAL - 2, -1, -(2**23)], len(addresses))
        addresses[odd] = (fields << SLOT_BITS | addresses & SLOT_MASK)[odd]
    kind = draw(st.sampled_from(["int32", "int64", "one each"]))
    given_offsets = None if kind == "one each" else offsets.astype(kind)
    bags = len(addresses if given_offsets is None else offsets[1:])
    features = batch.features.copy()
    cuts = np.sort(rng.integers(0, bags + 1, len(features) - 1))
    ends = np.array([0, *cuts, bags])
    features["first_bag"], features["bags"] = ends[:-1], np.diff(ends)
    pooled = rng.permutation(len(features))[: rng.integers(0, len(features) + 1)]
    return Case(batch, addresses, given_offsets, features, pooled, rng)


def put(device: str, *tensors: torch.Tensor | None) -> Any:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def assert_same(found: torch.Tensor, expected: torch.Tensor, device: str) -> None:
    assert found.device.type == device
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    same = found.cpu().contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    assert same.all(), (found, expected)


@ON_DEVICES
@examples(200)
@given(cases())
def test_forwards_as_on_the_processor(device, case):
    expected = native.ops().forward_bags(*case.read, *case.forward)
    found = device_bags.forward_bags(*put(device, *case.read), *case.forward)
    for ours, kernels in zip(found[:3], expected[:3], strict=True):
        assert len(ours) == len(kernels)
        for one, other in zip(ours, kernels, strict=True):
            assert_same(one, other, device)
    kept, expected_kept = found[3], expected[3]
    assert len(kept) == len(expected_kept)
    for feature in case.features[case.pooled]:
        of = slice(feature["first_bag"], feature["first_bag"] + feature["bags"])
        assert_same(kept[of], expected_kept[of], device)


@ON_DEVICES
@pytest.mark.parametrize("count", [127, 128, 20_000])
def test_forwards_many_features(device, count):
    """Of two nodes they are as many as the numbers of a byte, or more; or more than of two."""
    rng = np.random.default_rng(count)
    features = np.zeros(count, FEATURE)
    features["first_bag"], features["bags"] = np.arange(count), 1
    features["out_base"] = features["first_bag"]
    bags = count + 3  # of which some are of no pooled feature
    offsets = torch.from_numpy(np.append(0, np.cumsum(rng.integers(1, 4, bags))))
    fields = rng.choice([1, 2, LOCAL], int(offsets[-1]))
    addresses = torch.from_numpy(fields << SLOT_BITS | rng.integers(0, 9, len(fields)))
    how = (as_words(features[::-1].copy()), [2, 0, 1], 2, [0, 0, 0], 4, 1)
    expected = native.ops().forward_bags(addresses, offsets, None, *how)
    found = device_bags.forward_bags(addresses.to(device), offsets.to(device), None, *how)
    for one, other in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert_same(one, other, device)
    assert_same(found[3][:count], expected[3][:count], device)


@ON_DEVICES
@examples(200)
@given(cases(), st.booleans())
def test_joins_as_on_the_processor(device, case, any_kept):
    """Of features that forward nothing what is kept may be anything."""
    words, _, _, kept = native.ops().forward_bags(*case.read, *case.forward)
    number = len(case.pooled)
    forwards = case.forwards(words)
    for feature in case.features[forwards == 0] if any_kept else []:
        kept[feature["first_bag"] :][: feature["bags"]] = -7
    received = [client.words for client in clients(case.batch, number, case.rng)]
    received = received[: case.rng.integers(0, len(received) + 1)]
    own = (as_words(case.features), forwards.tolist(), *case.batch.nodes)
    others = (number, case.batch.fields, *case.codes)
    expected = native.ops().join_bags(*case.read, *own, kept, received, *others)
    there = [*put(device, *case.read), *own, kept.to(device), put(device, *received), *others]
    found = device_bags.join_bags(*there)
    for ours, kernels in zip(found, expected, strict=True):
        assert (ours is None) == (kernels is None)
        if ours is not None:
            assert_same(ours, kernels, device)


@ON_DEVICES
@examples(100)
@given(cases())
def test_lengths_that_do_not_fit_reach_beyond_nothing(device, case):
    """What is sent is as long as it says, and sums are of bags that there are."""
    bags = len(case.addresses if case.offsets is None else case.offsets[1:])
    offsets = torch.from_numpy(case.rng.integers(-5, len(case.addresses) + 5, bags + 1))
    addresses, _, weights = put(device, *case.read)
    batch = (addresses, offsets.to(device), weights)
    words, places, _, kept = device_bags.forward_bags(*batch, *case.forward)
    fields, number = list(range(len(case.batch.node_of))), len(case.pooled)
    nothing = torch.zeros(0, dtype=torch.int64)
    none_kept = nothing.int()
    no_weights = None if weights is None else nothing.float()
    no_features = as_words(case.features[:0])
    for some in words:  # which are checked there
        native.ops().join_bags(
            nothing, nothing.new_zeros(1), no_weights, no_features, [], [0], 1, none_kept,
            [some.cpu()], number, fields, *case.codes,
        )  # fmt: skip
    pooled = case.features[case.pooled]
    sums = {
        int(feature["out_base"] + sample * feature["out_stride"])
        for feature in pooled
        for sample in range(feature["bags"])
    }
    assert {place for some in places for place in some.tolist()} <= sums
    forwards = case.forwards(words)
    own = (as_words(case.features), forwards.tolist(), *case.batch.nodes)
    arguments = [*batch, *own, kept, [], number, fields, *case.codes]
    assert len(device_bags.join_bags(*arguments)[0]) == len(case.addresses) - forwards.sum()


def test_codes_of_no_rank_are_taken_for_one_of_the_node():
    features = np.zeros(0, FEATURE)
    nothing = torch.zeros(0, dtype=torch.int64)
    words = torch.tensor([1, 3, 3, 7, 9 << 5 | 8, -1], dtype=torch.int32)
    addresses, offsets, weights, positions = device_bags.join_bags(
        nothing, torch.zeros(1).long(), None, as_words(features), [], [1, 0], 1, nothing.int(),
        [words], 1, [LOCAL], 5, 1,
    )  # fmt: skip
    assert addresses.tolist() == [LOCAL << SLOT_BITS | slot for slot in (7, 8, 31)]
    assert offsets.tolist() == [0, 3]
    assert weights is None
    assert positions.tolist() == []


@ON_DEVICES
@examples(100)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 70]))
def test_adds_and_gathers_as_on_the_processor(device, seed, widths):
    """Bags of features of which some follow each other with one width, or have none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, 5) * rng.integers(0, 2, 5)
    dims = rng.choice(rng.integers(1, 70, widths), 5)
    values = torch.from_numpy(rng.standard_normal(2000).astype(np.float32))
    values[rng.integers(0, 2000, 400)] = 2e-42  # a subnormal number
    places = torch.from_numpy(rng.permutation(2000 // 70)[: counts.sum()] * 70)
    arguments = (counts.tolist(), dims.tolist())
    expected = torch.zeros(int(counts @ dims))
    native.ops().gather_bags(values, places, *arguments, expected)
    found = torch.zeros_like(expected, device=device)
    device_bags.gather_bags(values.to(device), places.to(device), *arguments, found)
    assert_same(found, expected, device)

    vectors = torch.from_numpy(rng.standard_normal(len(found)).astype(np.float32))
    vectors[rng.random(len(found)) < 0.2] = -1e-42
    added, there = values.clone(), values.to(device).clone()
    native.ops().add_bags(added, places, *arguments, vectors)
    device_bags.add_bags(there, places.to(device), *arguments, vectors.to(device))
    assert_same(there, added, device)
