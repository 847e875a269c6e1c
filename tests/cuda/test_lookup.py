"""The lookup of devices, emulated: the bits of the processor's kernels, in any order of threads."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.runtime.tables.kernel_structs import DTYPE_CODE, FEATURE, as_words
from tests.support.cuda.devices import Device
from tests.support.cuda.emulator import Emulator
from tests.support.examples import examples

REPLICA = LOCAL - 1
ROWS, RANK = 40, 1
TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OUT_DTYPES = tuple(TORCH_DTYPE.values())


def arena(dtype: str, dim: int, random: torch.Generator) -> torch.Tensor:
    """Rows as bytes, [ROWS, row_bytes]."""
    if dtype == "int8":
        levels = torch.randint(0, 256, (ROWS, dim), generator=random, dtype=torch.uint8)
        scale_and_bias = torch.randn(ROWS, 2, generator=random).view(torch.uint8)
        return torch.cat([levels, scale_and_bias], 1).contiguous()
    values = torch.randn(ROWS, dim, generator=random).to(TORCH_DTYPE[dtype])
    return values.view(torch.uint8).reshape(ROWS, -1)


class Batch:
    """Arguments of `pooled_rows`: features of two shapes of rows, on three ranks."""

    def __init__(
        self,
        seed: int,
        shapes: list[tuple[str, int]],
        samples: int,
        longest: int,
        *,
        weighted: bool = False,
        mean: bool = False,
        wide_offsets: bool = True,
        out_dtype: torch.dtype = torch.float32,
        ranks: int = 3,
        short: bool = False,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        features = np.zeros(len(shapes), FEATURE)
        dims = [dim for _, dim in shapes]
        arenas = [[arena(*shape, random) for _ in range(ranks)] for shape in shapes]
        for f, (dtype, dim) in enumerate(shapes):
            features[f]["width"], features[f]["dtype"] = f, DTYPE_CODE[dtype]
            features[f]["dim"], features[f]["row_bytes"] = dim, arenas[f][0].shape[1]
            features[f]["first_bag"], features[f]["bags"] = f * samples, samples
            features[f]["out_base"], features[f]["out_stride"] = sum(dims[:f]), sum(dims)
            features[f]["mean"] = mean
        bags = samples * len(shapes)
        if longest == 1:
            lengths, self.offsets = torch.ones(bags, dtype=torch.int64), None
        else:
            lengths = torch.randint(0, longest + 1, (bags,), generator=random)
            if short:  # most have one access or none, and a few more
                lengths = torch.where(torch.arange(bags) % 5 == 1, lengths, lengths.clamp(max=1))
                while lengths.sum() > bags:
                    lengths[lengths.argmax()] = 0
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            self.offsets = ends if wide_offsets else ends.int()
        accesses = int(lengths.sum())
        owner = torch.randint(0, ranks, (accesses,), generator=random)
        own = torch.where(torch.rand(accesses, generator=random) < 0.5, LOCAL, REPLICA)
        slot = torch.randint(0, ROWS, (accesses,), generator=random)
        self.addresses = torch.where(owner == RANK, own, owner) << SLOT_BITS | slot
        self.weights = torch.rand(accesses, generator=random) if weighted else None
        self.features, self._arenas = as_words(features), arenas
        self.out = bags // len(shapes) * sum(dims), out_dtype

    def arguments(self, put: Callable[[torch.Tensor | None], torch.Tensor | None]) -> list[Any]:
        """In the memory that `put` brings tensors to."""
        self._kept = [[put(a) for a in of_shape] for of_shape in self._arenas]
        bases = [[a.data_ptr() for a in kept if a is not None] + [0] for kept in self._kept]
        given = [put(self.addresses), put(self.offsets), put(self.weights), self.features]
        return [*given, put(torch.tensor(bases)), RANK, *self.out]

    def on(self, device: Device, order: int = 0) -> torch.Tensor:
        return device.run("pooled_rows", *self.arguments(device.put), order=order)

    def on_the_processor(self) -> torch.Tensor:
        found: torch.Tensor = native.ops().pooled_rows(*self.arguments(lambda tensor: tensor))
        return found


def assert_equal_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


# Rows of one piece of 16 bytes and of many, of no whole number of pieces, and longer than what the
# threads of a warp hold at once.
@pytest.mark.parametrize("dim", [1, 3, 4, 8, 20, 24, 64, 128, 130, 600])
@pytest.mark.parametrize("dtype", [*TORCH_DTYPE, "int8"])
def test_every_shape_of_rows(device: Device, dtype: str, dim: int) -> None:
    for seed, (longest, weighted, mean) in enumerate(
        [(1, False, False), (1, True, False), (5, False, True), (5, True, True), (40, False, False)]
    ):
        batch = Batch(
            seed,
            [(dtype, dim), (dtype, dim)],
            samples=7 if longest == 40 else 21,
            longest=longest,
            weighted=weighted,
            mean=mean,
            wide_offsets=seed % 2 == 0,
            out_dtype=OUT_DTYPES[(dim + seed) % 3],
        )
        found = batch.on(device, seed)
        assert_equal_bits(found, batch.on_the_processor())


@pytest.mark.parametrize("dim", [1, 4, 24, 64, 130, 600])
@pytest.mark.parametrize("dtype", [*TORCH_DTYPE, "int8"])
@pytest.mark.parametrize("wide", [False, True])
def test_bags_of_which_most_have_one_row(device: Device, dtype: str, dim: int, wide: bool) -> None:
    for seed, mean in enumerate([False, True]):
        shapes = [(dtype, dim)] * 2
        batch = Batch(seed, shapes, 300, 4, mean=mean, wide_offsets=wide, short=True)
        assert len(batch.addresses) <= 600
        for order in device.orders:
            assert_equal_bits(batch.on(device, order), batch.on_the_processor())


@given(
    seed=st.integers(0, 2**32 - 1),
    shapes=st.lists(
        st.tuples(st.sampled_from([*TORCH_DTYPE, "int8"]), st.sampled_from([2, 4, 16, 36, 64])),
        min_size=1,
        max_size=4,
    ),
    samples=st.integers(1, 40),
    longest=st.sampled_from([1, 2, 9]),
    weighted=st.booleans(),
    mean=st.booleans(),
    out_dtype=st.sampled_from(OUT_DTYPES),
)
@examples(30)
def test_batches_of_unlike_tables(
    device: Device,
    seed: int,
    shapes: list[tuple[str, int]],
    samples: int,
    longest: int,
    weighted: bool,
    mean: bool,
    out_dtype: torch.dtype,
) -> None:
    batch = Batch(
        seed,
        shapes,
        samples,
        longest,
        weighted=weighted,
        mean=mean,
        wide_offsets=bool(seed % 2),
        out_dtype=out_dtype,
    )
    expected = batch.on_the_processor()
    for order in (*device.orders, seed):
        found = batch.on(device, order)
        assert_equal_bits(found, expected)


def test_more_features_than_a_launch_takes(device: Device) -> None:
    batch = Batch(3, [("fp32", 4)] * 150, samples=3, longest=4, ranks=2)
    # All in one arena, as tables of one width are.
    features = batch.features.numpy().view(FEATURE)
    features["width"] = 0
    found = batch.on(device)
    assert_equal_bits(found, batch.on_the_processor())


def waves_of(emulated: Path, sms: int, of_each: int, start: Callable[[], object]) -> float:
    """How often a launch's blocks fill the device."""
    with Emulator(emulated).device(sms, of_each) as blocks:
        start()
        return blocks() / (sms * of_each)


def features_of(bags: list[int], dim: int) -> tuple[torch.Tensor, int]:
    """Features of one shape of rows with so many bags each, and the elements of their output."""
    features = np.zeros(len(bags), FEATURE)
    features["dtype"], features["dim"], features["row_bytes"] = DTYPE_CODE["fp32"], dim, 4 * dim
    features["bags"], features["out_stride"] = bags, dim
    features["first_bag"] = np.cumsum([0, *bags[:-1]])
    features["out_base"] = features["first_bag"] * dim
    return as_words(features), sum(bags) * dim


@given(
    bags=st.one_of(
        st.builds(
            lambda features, bags: [bags] * features, st.integers(1, 64), st.integers(0, 3000)
        ),
        st.lists(st.integers(0, 9000), min_size=1, max_size=64),
    ),
    dim=st.sampled_from([4, 16, 64, 130]),
    kind=st.sampled_from(["short", "long", "weighted", "weight gradients"]),
    sms=st.integers(1, 148),
    of_each=st.integers(1, 8),
)
@example([65_536] * 26, 64, "short", 132, 4)  # started 546 blocks, of which 528 fit
@examples(60)
def test_no_blocks_of_a_launch_wait_for_others(
    emulated: Path, bags: list[int], dim: int, kind: str, sms: int, of_each: int
) -> None:
    """A second wave of a few blocks takes as long as the first one."""
    native.ops().load_device_library(str(emulated))
    features, elements = features_of(bags, dim)
    count = sum(bags) * (1 if kind == "short" else 2)
    addresses = torch.empty(count, dtype=torch.int64)  # nothing is run
    offsets = torch.empty(sum(bags) + 1, dtype=torch.int32)
    weights = None if kind in ("short", "long") else torch.empty(count)
    bases = torch.zeros(1, 2, dtype=torch.int64)
    if kind == "weight gradients":
        grad = torch.empty(elements)
        given: tuple[Any, ...] = (grad, addresses, offsets, weights, features, bases, 0)
        start = partial(torch.ops.oper_emulated.weight_gradients, *given, 0, None)
    else:
        given = (addresses, offsets, weights, features, bases, 0, elements, torch.float32)
        start = partial(torch.ops.oper_emulated.pooled_rows, *given, 0, None)
    waves = waves_of(emulated, sms, of_each, start)
    if sum(bags):
        assert 0 < waves <= 1


def test_features_of_unlike_numbers_of_bags(device: Device) -> None:
    """Blocks go on from one feature to the next, past some without bags."""
    for seed, longest in enumerate((1, 4, 4)):
        batch = Batch(seed, [("fp32", 8)] * 9, samples=120, longest=longest, short=seed == 1)
        features = batch.features.numpy().view(FEATURE)
        features["bags"] = [[120], [0], [1], [119], [33], [0], [0], [120], [7]]
        for order in device.orders:
            assert_equal_bits(batch.on(device, order), batch.on_the_processor())


def test_an_output_that_bags_do_not_cover_is_zero(device: Device) -> None:
    batch = Batch(1, [("fp32", 4)], samples=2, longest=3)
    batch.out = 100, torch.float32
    found = batch.on(device)
    assert found[8:].tolist() == [0.0] * 92


def test_refused_arguments(device: Device) -> None:
    batch = Batch(1, [("fp32", 4)], samples=2, longest=3, weighted=True)
    given = batch.arguments(device.put)
    for place, wrong, error in (
        (0, given[0].int(), TypeError),
        (1, given[1].float(), TypeError),
        (2, given[2][1:], ValueError),
        (3, given[3][:, :5], ValueError),
        (5, 7, ValueError),
        (6, 3, ValueError),
        (7, torch.float64, TypeError),
    ):
        with pytest.raises(error):
            device.run("pooled_rows", *given[:place], wrong, *given[place + 1 :])
