"""Bags between nodes on a device, against the operators of the processor, bit by bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.runtime.tables.kernel_structs import FEATURE, as_words
from tests.runtime.step.test_forward_bags import Batch, batches, clients, code_words
from tests.support.cuda.devices import Device
from tests.support.examples import examples


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
        for head in heads(words, len(self.pooled)).numpy():
            found[self.pooled] += head[len(self.pooled) :]
        return found


def heads(words: list[torch.Tensor], features: int) -> torch.Tensor:
    """What the words of each node begin with, on the host."""
    found = [some[: 2 * features].cpu().long() for some in words]
    return torch.stack(found) if found else torch.empty((0, 2 * features), dtype=torch.int64)


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


def put(device: Device, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [device.put(tensor) for tensor in tensors]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    same = found.cpu().contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    assert same.all(), (found, expected)


@examples(120)
@given(cases())
def test_forwards_as_on_the_processor(device: Device, case: Case) -> None:
    expected = native.ops().forward_bags(*case.read, *case.forward)
    for order in device.orders:
        there = (*put(device, *case.read), *case.forward, device.stream)
        found = device.start("forward_bags", *there, order=order)
        for ours, kernels in zip(found[:3], expected[:3], strict=True):
            assert len(ours) == len(kernels)
            for one, other in zip(ours, kernels, strict=True):
                assert_same(one, other)
        assert_same(found[4], expected[4])
        kept, expected_kept = found[3], expected[3]
        assert len(kept) == len(expected_kept)
        for feature in case.features[case.pooled]:
            of = slice(feature["first_bag"], feature["first_bag"] + feature["bags"])
            assert_same(kept[of], expected_kept[of])


@pytest.mark.parametrize("count", [1, 128, 5_000])
def test_forwards_many_features(device: Device, count: int) -> None:
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
    there = (device.put(addresses), device.put(offsets), None)
    found = device.start("forward_bags", *there, *how, device.stream)
    for one, other in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert_same(one, other)
    assert_same(found[3][:count], expected[3][:count])


@examples(120)
@given(cases(), st.booleans())
def test_joins_as_on_the_processor(device: Device, case: Case, any_kept: bool) -> None:
    """Of features that forward nothing what is kept may be anything."""
    words, _, _, kept, _ = native.ops().forward_bags(*case.read, *case.forward)
    number = len(case.pooled)
    forwards = case.forwards(words)
    for feature in case.features[forwards == 0] if any_kept else []:
        kept[feature["first_bag"] :][: feature["bags"]] = -7
    received = [client.words for client in clients(case.batch, number, case.rng)]
    received = received[: case.rng.integers(0, len(received) + 1)]
    own = (as_words(case.features), forwards.tolist(), *case.batch.nodes)
    others = (number, case.batch.fields, *case.codes)
    expected = native.ops().join_bags(*case.read, *own, kept, received, *others)
    for order in device.orders:
        there = [*put(device, *case.read), *own, device.put(kept), put(device, *received), *others]
        known = (heads(received, number), device.stream)
        found = device.start("join_bags", *there, *known, order=order)
        for ours, kernels in zip(found, expected, strict=True):
            assert (ours is None) == (kernels is None)
            if ours is not None:
                assert_same(ours, kernels)


@examples(100)
@given(cases())
def test_lengths_that_do_not_fit_reach_beyond_nothing(device: Device, case: Case) -> None:
    """What is sent is as long as it says, and sums are of bags that there are."""
    bags = len(case.addresses if case.offsets is None else case.offsets[1:])
    offsets = torch.from_numpy(case.rng.integers(-5, len(case.addresses) + 5, bags + 1))
    addresses, _, weights = put(device, *case.read)
    batch = (addresses, device.put(offsets), weights)
    words, places, _, kept, _ = device.start("forward_bags", *batch, *case.forward, device.stream)
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
    joined = device.start("join_bags", *arguments, heads([], number), device.stream)
    assert len(joined[0]) == len(case.addresses) - forwards.sum()


def test_codes_of_no_rank_are_taken_for_one_of_the_node(device: Device) -> None:
    features = np.zeros(0, FEATURE)
    nothing = device.put(torch.zeros(0, dtype=torch.int64))
    words = device.put(torch.tensor([1, 3, 3, 7, 9 << 5 | 8, -1], dtype=torch.int32))
    addresses, offsets, weights, positions = device.start(
        "join_bags", nothing, device.put(torch.zeros(1).long()), None, as_words(features), [],
        [1, 0], 1, nothing.int(), [words], 1, [LOCAL], 5, 1, torch.tensor([[1, 3]]), device.stream,
    )  # fmt: skip
    assert addresses.tolist() == [LOCAL << SLOT_BITS | slot for slot in (7, 8, 31)]
    assert offsets.tolist() == [0, 3]
    assert weights is None
    assert positions.tolist() == []


@examples(60)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 70]))
def test_adds_and_gathers_as_on_the_processor(device: Device, seed: int, widths: int) -> None:
    """Bags of features of which some have one width, or no bags."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, 5) * rng.integers(0, 2, 5)
    dims = rng.choice(rng.integers(1, 70, widths), 5)
    values = torch.from_numpy(rng.standard_normal(2000).astype(np.float32))
    values[rng.integers(0, 2000, 400)] = 2e-42  # a subnormal number
    places = torch.from_numpy(rng.permutation(2000 // 70)[: counts.sum()] * 70)
    of_bags = (counts.tolist(), dims.tolist())
    expected = torch.zeros(int(counts @ dims))
    native.ops().gather_bags(values, places, *of_bags, expected)
    vectors = torch.from_numpy(rng.standard_normal(len(expected)).astype(np.float32))
    vectors[rng.random(len(vectors)) < 0.2] = -1e-42
    added = values.clone()
    native.ops().add_bags(added, places, *of_bags, vectors)
    for order in device.orders:
        there, at = device.put(values), device.put(places)
        found = device.put(torch.zeros_like(expected))
        device.start("gather_bags", there, at, *of_bags, found, device.stream, order=order)
        assert_same(found, expected)
        brought = device.put(vectors)
        device.start("add_bags", there, at, *of_bags, brought, device.stream, order=order)
        assert_same(there, added)


def test_arguments_that_do_not_fit_are_refused(device: Device) -> None:
    addresses = device.put(torch.tensor([1 << SLOT_BITS, LOCAL << SLOT_BITS]))
    features = np.zeros(1, FEATURE)
    features["bags"] = 2
    batch, nodes = (addresses, None, None), ([1, 0], 1)
    kept = device.put(torch.zeros(2, dtype=torch.int32))

    def forward(features: np.ndarray, codes: tuple[int, ...] = (5, 1)) -> Any:
        how = (as_words(features), *nodes, [0, 0], *codes, device.stream)
        return device.start("forward_bags", *batch, *how)

    def join(words: list[int], head: list[int], forwards: int = 0) -> Any:
        given = [device.put(torch.tensor(words, dtype=torch.int32))]
        how = (as_words(features), [forwards], *nodes, kept, given, 1, [LOCAL], 5, 1)
        return device.start("join_bags", *batch, *how, torch.tensor([head]), device.stream)

    assert [len(of) for of in forward(features)[0]] == [4]
    assert len(join([1, 1, 1, 7], [1, 1])[0]) == 3
    features["first_bag"] = 1
    with pytest.raises(ValueError, match="features: number 0 has bags beyond the 2 there are"):
        forward(features)
    features["first_bag"] = 0
    with pytest.raises(ValueError, match=r"code_words: expected .*, got 3"):
        forward(features, (5, 3))
    with pytest.raises(ValueError, match="received: 4 words, and 5 follow"):
        join([1, 1, 1, 7], [1, 2])
    with pytest.raises(ValueError, match="received: bags: expected 0 to 1, got 2"):
        join([1, 1, 1, 7], [2, 1])
    with pytest.raises(ValueError, match="forwards: expected 0 to 2, got 3"):
        join([1, 1, 1, 7], [1, 1], forwards=3)
    places, values = device.put(torch.zeros(1, dtype=torch.int64)), device.put(torch.zeros(9))
    vectors = device.put(torch.zeros(3))
    with pytest.raises(ValueError, match="counts: 1 bags of 2 values, and there are 1 of 3"):
        device.start("add_bags", values, places, [1], [2], vectors, device.stream)
