"""Gradients summed by row against NumPy in double precision."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from tests.support.runtime.accesses import Accesses, random_accesses, sorted_runs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def describe(rng, accesses: Accesses, dims, bags) -> int:
    """Writes dims, bags and the places of outputs: [samples, columns] of the features of as many
    bags, one after the other. Returns the elements of the output."""
    features = accesses.features
    features["dim"] = np.asarray(dims)[features["bucket"]]
    features["bags"] = bags
    features["first_bag"] = np.cumsum(bags) - bags
    elements = 0
    for samples in np.unique(bags):
        columns = 0
        for n in np.flatnonzero(bags == samples):
            features["out_base"][n] = elements + columns
            columns += features["dim"][n] + rng.integers(0, 3)
        features["out_stride"][bags == samples] = columns
        elements += samples * columns
    features["mean"] = rng.integers(0, 2, len(features))
    return int(elements)


def row_sums(accesses: Accesses, grad, offsets, weights, scale):
    """Summed gradients of every bucket, [runs, dim] each."""
    position, start, _, count = sorted_runs(accesses)
    run_of = np.repeat(np.arange(len(start) - 1), np.diff(start))
    feature = np.searchsorted(accesses.segment_offset, position, side="right") - 1
    f = accesses.features[feature]
    if offsets is None:
        bag, length = position - accesses.segment_offset[feature], np.ones(len(position))
    else:
        bag = np.searchsorted(offsets, position, side="right") - 1
        length = np.where(f["mean"], offsets[bag + 1] - offsets[bag], 1)
        bag = bag - f["first_bag"]
    factor = scale * (1 if weights is None else weights[position]) / length
    place = f["out_base"] + bag * f["out_stride"]
    codes = accesses.ranks + 1
    sums = []
    for bucket in range(accesses.buckets):
        first, last = count[bucket * codes], count[(bucket + 1) * codes]
        mine = f["bucket"] == bucket
        dim = f["dim"][mine].max(initial=1)
        sums.append(np.zeros((last - first, dim)))
        values = grad[place[mine, None] + np.arange(dim)] * factor[mine, None]
        np.add.at(sums[-1], run_of[mine] - first, values)
    return sums


def check(accesses: Accesses, grad, offsets, weights, scale) -> list[torch.Tensor]:
    """The sums of every bucket, the replicas' apart from the others'; the same bits by position,
    by bag, and added to numbered rows."""
    found = sums_of(accesses, grad, offsets, weights, scale, by_bag=False)
    added = added_of(accesses, grad, offsets, weights, scale, [sums.shape for sums in found])
    assert all(map(same_bits, found, added))
    if offsets is not None and weights is None:
        by_bag = sums_of(accesses, grad, offsets, None, scale, by_bag=True)
        assert all(map(torch.equal, found, by_bag))
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def groups_of(before: torch.Tensor, dims) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups of rows, and room for their gradients, which are no numbers yet."""
    groups = native.ops().lay_out_gradients(before, dims)
    return groups, torch.full((int(groups[1, -1]),), torch.nan)


def added_of(accesses: Accesses, grad, offsets, weights, scale, shapes) -> list[torch.Tensor]:
    """What add_gradients makes of each bucket, float32 of the bucket's shape, [rows, dim]."""
    row_of, _, (before, _) = native.ops().number_rows(*accesses.tensors())
    codes = accesses.ranks + 1
    groups, values = groups_of(before, [dim for _, dim in shapes])
    found = []
    for bucket, (rows, dim) in enumerate(shapes):
        native.ops().add_gradients(
            grad,
            row_of,
            groups,
            bucket,
            bucket * codes,
            (bucket + 1) * codes,
            None if offsets is None else torch.from_numpy(offsets),
            None if weights is None else torch.from_numpy(weights),
            accesses.words,
            torch.from_numpy(accesses.segment_offset),
            dim,
            scale,
            values,
        )
        found.append(values[groups[1, bucket * codes] :][: rows * dim].view(rows, dim))
    return found


def sums_of(accesses: Accesses, grad, offsets, weights, scale, by_bag) -> list[torch.Tensor]:
    ops = native.ops()
    bags = torch.from_numpy(offsets) if by_bag else None
    positions, run_start, _, run_count = ops.sort_accesses(*accesses.tensors(), bags)
    expected = row_sums(accesses, grad.double().numpy(), offsets, weights, scale)
    codes = accesses.ranks + 1
    groups, values = groups_of(run_count, [sums.shape[1] for sums in expected])
    found = []
    for bucket, sums in enumerate(expected):
        for first, last in pairwise(bucket * codes + np.array([0, 1, codes])):
            ops.sum_gradients(
                grad,
                positions,
                run_start,
                groups,
                bucket,
                first,
                last,
                None if offsets is None else torch.from_numpy(offsets),
                None if weights is None else torch.from_numpy(weights),
                accesses.words,
                torch.from_numpy(accesses.segment_offset),
                sums.shape[1],
                scale,
                values,
                by_bag,
            )
        out = values[groups[1, bucket * codes] :][: sums.size].view(sums.shape)
        np.testing.assert_allclose(out.numpy(), sums, rtol=1e-5, atol=1e-5)
        found.append(out)
    return found


def bags_of(rng, sizes, offset_type):
    """Accesses cut into random bags: offsets and the bags of each feature."""
    bags = np.array([rng.integers(1, size + 3) for size in sizes], dtype=np.int64)
    lengths = [
        rng.multinomial(size, np.full(b, 1 / b)) for size, b in zip(sizes, bags, strict=True)
    ]
    return np.append(0, np.cumsum(np.concatenate([[], *lengths]))).astype(offset_type), bags


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 5),
    sizes=st.one_of(
        st.lists(st.integers(0, 200), max_size=6),
        st.builds(lambda size, number: [size] * number, st.integers(1, 200), st.integers(2, 6)),
    ),
    dims=st.lists(
        st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 128, 508, 512])),
        min_size=1,
        max_size=3,
    ),
    slots=st.sampled_from([1, 50, 5000]),
    offset_type=st.sampled_from([None, np.int32, np.int64]),
    weighted=st.booleans(),
    frozen=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_numpy(seed, ranks, sizes, dims, slots, offset_type, weighted, frozen, dtype):
    rng = np.random.default_rng(seed)
    accesses = random_accesses(rng, ranks, sizes, len(dims), slots, 10, frozen)
    offsets, bags = None, np.array(sizes, dtype=np.int64)
    if offset_type:
        offsets, bags = bags_of(rng, sizes, offset_type)
    elements = describe(rng, accesses, dims, bags)
    grad = torch.from_numpy(rng.standard_normal(elements)).to(dtype)
    weights = rng.standard_normal(sum(sizes)).astype(np.float32) if weighted else None
    check(accesses, grad, offsets, weights, scale=1 / ranks)


def test_a_row_of_more_pieces_than_a_piece_has_accesses():
    """Its pieces are added up one after another, as where rows are numbered."""
    rng = np.random.default_rng(0)
    accesses = random_accesses(rng, 1, [80_000], 1, 1, 0, frozen=False)
    elements = describe(rng, accesses, [4], np.array([80_000]))
    grad = torch.from_numpy(rng.standard_normal(elements).astype(np.float32))
    check(accesses, grad, None, None, scale=0.5)


@pytest.mark.parametrize("bagged", [False, True])
def test_hot_rows_on_any_number_of_threads(bagged):
    """Runs of many pieces beside short ones: the same sums, bit by bit."""
    rng = np.random.default_rng(0)
    sizes = [40_000, 3000, 1]
    accesses = random_accesses(rng, 2, sizes, 2, 3000, 1, frozen=False)
    offsets, bags = bags_of(rng, sizes, np.int64) if bagged else (None, np.array(sizes))
    elements = describe(rng, accesses, [20, 4], bags)
    grad = torch.from_numpy(rng.standard_normal(elements).astype(np.float32))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(check(accesses, grad, offsets, None, scale=0.5))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_sixteen_bits(dtype):
    """Subnormal, infinite and no numbers included."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    accesses = random_accesses(np.random.default_rng(0), 1, [2**16 // 32], 1, 1, 0, frozen=False)
    accesses.bucket_slots = [2**16 // 32]
    accesses.addresses[:] += np.arange(len(accesses.addresses))
    describe(np.random.default_rng(0), accesses, [32], np.array([2**16 // 32]))
    accesses.features["out_stride"] = 32
    positions, run_start, _, before = native.ops().sort_accesses(*accesses.tensors())
    groups, out = groups_of(before, [32])
    features, segments = accesses.words, torch.from_numpy(accesses.segment_offset)
    native.ops().sum_gradients(
        values, positions, run_start, groups, 0, 0, 2, None, None, features, segments, 32, 1.0, out
    )
    np.testing.assert_array_equal(out.numpy(), values.float().numpy())


def test_bad_input():
    rng = np.random.default_rng(0)
    accesses = random_accesses(rng, 1, [6], 1, 10, 0, frozen=False)
    elements = describe(rng, accesses, [4], np.array([6]))
    positions, run_start, _, before = native.ops().sort_accesses(*accesses.tensors())
    features, segments = accesses.words, torch.from_numpy(accesses.segment_offset)

    def sums(grad, rows=before, last=2, dim=4, offsets=None, weights=None, by_bag=False):
        groups, out = groups_of(rows, [4])
        native.ops().sum_gradients(
            grad, positions, run_start, groups, 0, 0, last, offsets, weights, features, segments,
            dim, 1.0, out, by_bag,
        )  # fmt: skip

    grad = torch.zeros(elements)
    sums(grad)
    with pytest.raises(ValueError, match="the 6 bags of feature 0 go beyond them"):
        sums(torch.zeros(8))
    with pytest.raises(IndexError, match="groups: 0 to 3 of 2"):
        sums(grad, last=3)
    with pytest.raises(ValueError, match="groups: rows 0 to 7 of 2"):
        sums(grad, rows=torch.tensor([0, 0, 7]))
    with pytest.raises(ValueError, match="groups: 16 values from 0 on, of 8"):
        sums(grad, dim=8)
    with pytest.raises(ValueError, match="has dim 4, and dim is 2"):
        sums(grad, dim=2)
    with pytest.raises(TypeError, match="Double"):
        sums(grad.double())
    with pytest.raises(ValueError, match="the bags of feature 0 do not hold"):
        sums(grad, offsets=torch.tensor([0, 1, 2, 3, 4, 5, 5]))
    with pytest.raises(ValueError, match="must ascend"):
        sums(grad, offsets=torch.tensor([0, 1, 10**9, 3, 4, 5, 6]))
    with pytest.raises(ValueError, match="with offsets and without weights alone"):
        sums(grad, by_bag=True)
    with pytest.raises(ValueError, match="with offsets and without weights alone"):
        sums(grad, offsets=torch.arange(7), weights=torch.ones(6), by_bag=True)
    accesses.features["first_bag"] = 1
    with pytest.raises(ValueError, match="the bags of feature 0 do not follow those before it"):
        sums(grad, offsets=torch.arange(7), by_bag=True)


def test_operator_is_as_torch_wants_it():
    rng = np.random.default_rng(0)
    accesses = random_accesses(rng, 1, [40], 1, 10, 0, frozen=False)
    elements = describe(rng, accesses, [4], np.array([40]))
    positions, run_start, _, before = native.ops().sort_accesses(*accesses.tensors())
    features, segments = accesses.words, torch.from_numpy(accesses.segment_offset)
    groups, out = groups_of(before, [4])
    rows = (positions, run_start, groups, 0, 0, 2)
    batch = (None, torch.ones(40), features, segments)
    arguments = (torch.ones(elements), *rows, *batch, 4, 1.0, out)
    torch.library.opcheck(native.ops().sum_gradients.default, arguments)


def test_bad_input_of_numbered_rows():
    accesses = random_accesses(np.random.default_rng(0), 1, [6], 1, 3, 0, frozen=False)
    row_of, _, (before, _) = native.ops().number_rows(*accesses.tensors())

    def add(grad, dim=4, offsets=None, weights=None, rows=row_of):
        of = (accesses.words, torch.from_numpy(accesses.segment_offset))
        groups, out = groups_of(before, [4])
        given = (grad, rows, groups, 0, 0, 2, offsets, weights, *of)
        native.ops().add_gradients(*given, dim, 1.0, out)

    describe(np.random.default_rng(0), accesses, [4], np.array([6]))
    accesses.features["out_stride"], accesses.features["mean"] = 4, 0
    add(torch.ones(24))
    with pytest.raises(ValueError, match="grad: 23 elements, and the 6 bags of feature 0"):
        add(torch.ones(23))
    with pytest.raises(ValueError, match="dim 4, and dim is 2"):
        add(torch.ones(24), dim=2)
    with pytest.raises(ValueError, match="rows: expected 6 contiguous elements, got 5"):
        add(torch.ones(24), rows=row_of[:5])
    with pytest.raises(ValueError, match="weights"):
        add(torch.ones(24), weights=torch.ones(5))
    with pytest.raises(ValueError, match="the bags of feature 0 do not hold the accesses 0 to 6"):
        add(torch.ones(24), offsets=torch.tensor([0, 1, 2, 3, 4, 5, 5]))
    with pytest.raises(TypeError, match="expected dtype float32, float16 or bfloat16, got Double"):
        add(torch.ones(24, dtype=torch.float64))


def test_adding_is_as_torch_wants_it():
    rng = np.random.default_rng(0)
    accesses = random_accesses(rng, 1, [40], 1, 10, 0, frozen=False)
    elements = describe(rng, accesses, [4], np.array([40]))
    row_of, _, (before, _) = native.ops().number_rows(*accesses.tensors())
    batch = (None, torch.ones(40), accesses.words, torch.from_numpy(accesses.segment_offset))
    groups, out = groups_of(before, [4])
    arguments = (torch.ones(elements), row_of, groups, 0, 0, 2, *batch, 4, 1.0, out)
    torch.library.opcheck(native.ops().add_gradients.default, arguments)
