"""Gradients summed by row on devices, emulated: the bits of the processor's sums, in any order of
threads."""

import ctypes
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts import build_cuda
from tests.support.cuda import emulator
from tests.support.cuda.devices import Device
from tests.support.cuda.gradient_batches import FILLED, Batch
from tests.support.examples import examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PIECES = build_cuda.CSRC / "include/oper/step/pieces.h"
SHORT_PIECE = 7


def assert_equal_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


# Gradients of one piece of 16 bytes and of many, of no whole number of pieces, longer than what the
# threads of a warp hold at once; at multiples of 16 bytes and elsewhere.
@pytest.mark.parametrize("dim", [1, 4, 5, 8, 12, 16, 33, 64, 128, 130, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_of_gradients(device: Device, dtype: torch.dtype, dim: int) -> None:
    for seed, (gap, offset_type, weighted, means, by_bag) in enumerate(
        [
            (0, None, False, False, False),
            (8, None, True, False, False),
            (8, np.int64, True, True, False),
            (1, np.int32, False, True, True),
            (0, np.int32, False, True, False),
            (0, np.int64, False, False, True),
        ]
    ):
        batch = Batch(
            seed,
            [60, 0, 30],
            [dim],
            gap=gap,
            offset_type=offset_type,
            weighted=weighted,
            means=means,
            by_bag=by_bag,
            dtype=dtype,
        )
        assert_equal_bits(batch.on(device, seed), batch.on_the_processor())


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dims=st.lists(st.sampled_from([2, 5, 8, 16, 24, 33, 64]), min_size=1, max_size=3),
    slots=st.sampled_from([1, 50, 5000]),
    gap=st.sampled_from([0, 3, 8]),
    offset_type=st.sampled_from([None, np.int32, np.int64]),
    weighted=st.booleans(),
    means=st.booleans(),
    frozen=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@examples(30)
def test_batches(
    device: Device,
    seed: int,
    ranks: int,
    sizes: list[int],
    dims: list[int],
    slots: int,
    gap: int,
    offset_type: type | None,
    weighted: bool,
    means: bool,
    frozen: bool,
    dtype: torch.dtype,
) -> None:
    by_bag = offset_type is not None and not weighted and bool(seed % 2)
    batch = Batch(
        seed,
        sizes,
        dims,
        ranks=ranks,
        slots=slots,
        gap=gap,
        offset_type=offset_type,
        weighted=weighted,
        means=means,
        by_bag=by_bag,
        frozen=frozen,
        dtype=dtype,
    )
    expected = batch.on_the_processor()
    for order in (*device.orders, seed):
        assert_equal_bits(batch.on(device, order), expected)


@pytest.mark.parametrize("dim", [5, 16, 128])
@pytest.mark.parametrize("bagged", [False, True])
def test_runs_of_many_pieces_beside_short_ones(device: Device, dim: int, bagged: bool) -> None:
    offset_type = np.int64 if bagged else None
    batch = Batch(
        1, [9000, 9000], [dim], slots=10**9, hot=5000, offset_type=offset_type, means=True
    )
    assert batch.run_start.diff().max() >= 5000
    assert len(batch.run_start) > 3000  # of which threads take several
    expected = batch.on_the_processor()
    for order in device.orders:
        assert_equal_bits(batch.on(device, order), expected)


@pytest.mark.parametrize("by_bag", [False, True])
def test_runs_that_the_device_sorted(device: Device, by_bag: bool) -> None:
    batch = Batch(4, [4000, 0, 900], [8, 5], hot=2000, offset_type=np.int32, by_bag=by_bag)
    assert batch.run_start.diff().max() >= 2000
    for order in device.orders:
        assert_equal_bits(batch.on(device, order, sort=True), batch.on_the_processor())


def test_a_batch_without_accesses(device: Device) -> None:
    batch = Batch(0, [0, 0], [8])
    assert (batch.on(device) == FILLED).all()


def test_what_does_not_fit_is_refused(device: Device) -> None:
    batch = Batch(0, [6], [8])
    batch.by_bag = True
    with pytest.raises(ValueError, match="with offsets and without weights alone"):
        batch.on(device)
    batch.by_bag, batch.codes = False, 100
    with pytest.raises(IndexError, match="groups: 1 to 100 of 3"):
        batch.on(device)
    batch = Batch(0, [6], [8])
    batch.grad = batch.grad.double()
    with pytest.raises(
        TypeError, match="grad: expected dtype float32, float16 or bfloat16, got Double"
    ):
        batch.on(device)


class SumArguments(ctypes.Structure):
    """The launcher's, as oper/cuda/launchers.h declares them."""

    _fields_ = [
        ("grad", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("run_start", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("all_groups", ctypes.c_int64),
        ("first_group", ctypes.c_int64),
        ("last_group", ctypes.c_int64),
        ("offsets32", ctypes.c_void_p),
        ("offsets64", ctypes.c_void_p),
        ("bags", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("features", ctypes.c_void_p),
        ("feature_count", ctypes.c_int64),
        ("segment_offset", ctypes.c_void_p),
        ("accesses", ctypes.c_int64),
        ("by_bag", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("values", ctypes.c_void_p),
        ("bag_of", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
    ]


@pytest.fixture(scope="module")
def short_pieces(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The emulated kernels with pieces of SHORT_PIECE accesses."""
    folder = tmp_path_factory.mktemp("short_pieces")
    constant, short = r"(kAccessesPerPiece) = \d+;", rf"\1 = {SHORT_PIECE};"
    text, changes = re.subn(constant, short, PIECES.read_text())
    assert changes == 1
    header = folder / "oper/step/pieces.h"
    header.parent.mkdir(parents=True)
    header.write_text(text)
    library = folder / "libshort.so"
    emulator.build(library, [build_cuda.CSRC / "cuda/sum_gradients.cu"], f"-I{folder}")
    return ctypes.CDLL(str(library))


def sums_of_pieces(library: ctypes.CDLL, batch: Batch, order: int) -> torch.Tensor:
    """What the launcher makes of a batch without offsets and weights."""
    values = batch.values()
    place = torch.empty(batch.accesses, dtype=torch.int32)
    partial = torch.full((2 * (batch.accesses // SHORT_PIECE + 1), max(batch.dims)), FILLED)
    library.emulate_order(ctypes.c_uint64(order))
    for bucket, first, last in batch.calls():
        arguments = SumArguments(
            grad=batch.grad.data_ptr(),
            positions=batch.positions.data_ptr(),
            run_start=batch.run_start.data_ptr(),
            groups=batch.groups.data_ptr(),
            all_groups=batch.groups.shape[1] - 1,
            first_group=first,
            last_group=last,
            features=batch.features.data_ptr(),
            feature_count=len(batch.features),
            segment_offset=batch.segment_offset.data_ptr(),
            accesses=batch.accesses,
            dim=batch.dims[bucket],
            scale=batch.scale,
            values=values.data_ptr(),
            place=place.data_ptr(),
            partial=partial.data_ptr(),
        )
        fp32 = ctypes.c_int64(0)
        assert library.oper_cuda_sum_gradients(ctypes.byref(arguments), fp32, None) == 0
    return values


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    many=st.booleans(),
    dims=st.lists(st.sampled_from([5, 8, 128]), min_size=1, max_size=2),
    slots=st.sampled_from([1, 4, 30, 10**9]),
    hot=st.integers(0, 40),
    order=st.sampled_from([0, 1, 2]),
)
@examples(40)
def test_pieces_of_any_length(
    short_pieces: ctypes.CDLL,
    seed: int,
    sizes: list[int],
    many: bool,
    dims: list[int],
    slots: int,
    hot: int,
    order: int,
) -> None:
    """Runs of a few pieces, that begin and end wherever windows of so many accesses do."""
    sizes = [10 * size for size in sizes] if many else sizes
    batch = Batch(seed, sizes, dims, ranks=1, slots=slots, hot=min(hot, sizes[0]))
    expected = batch.by_definition(SHORT_PIECE)
    assert_equal_bits(sums_of_pieces(short_pieces, batch, order), expected)


def test_pieces_of_another_length_are_told_apart(short_pieces: ctypes.CDLL) -> None:
    batch = Batch(2, [200], [8], slots=4)
    expected = batch.on_the_processor()
    assert_equal_bits(batch.by_definition(kernel_piece()), expected)
    assert not torch.equal(sums_of_pieces(short_pieces, batch, 0), expected)


def kernel_piece() -> int:
    found = re.search(r"kAccessesPerPiece = (\d+);", PIECES.read_text())
    assert found is not None
    return int(found[1])
