"""The all-in-one lookup against its definition in NumPy, and against torch and FBGEMM."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.runtime.tables.kernel_structs import as_words
from tests.support.runtime.lookups import random_case

DTYPES = ("fp32", "fp16", "bf16", "int8")
ops = native.ops()


def pooled(case, dtype=torch.float32):
    return ops.pooled_rows(*case.arguments(), case.out_elements, dtype)


@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(
        st.tuples(
            st.sampled_from([1, 3, 4, 8, 16, 20, 32, 33, 64, 100, 128, 152, 264]),
            st.sampled_from(DTYPES),
        ),
        min_size=1,
        max_size=3,
    ),
    ranks=st.integers(1, 7),  # vectors hold the fields of up to 5
    bags=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    equal=st.booleans(),
    longest=st.sampled_from([None, 0, 1, 5, 40]),
    index=st.sampled_from([torch.int32, torch.int64]),
    weighted=st.booleans(),
    means=st.booleans(),
    out=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_pooled_rows_is_its_definition(
    seed, widths, ranks, bags, equal, longest, index, weighted, means, out
):
    dims, dtypes = zip(*widths, strict=True)
    case = random_case(
        np.random.default_rng(seed),
        list(dims),
        list(dtypes),
        ranks=ranks,
        bags=[bags[0]] * len(bags) if equal else bags,
        longest=longest,
        index=index,
        weighted=weighted,
        means=means,
    )
    # The same operations in the same order: equal to the last bit.
    expected = torch.from_numpy(case.expected()).to(out)
    assert torch.equal(pooled(case, out), expected)


@given(
    seed=st.integers(0, 2**32 - 1),
    dim=st.sampled_from([1, 16, 20, 100]),
    dtype=st.sampled_from(DTYPES),
    longest=st.sampled_from([None, 7]),
    means=st.booleans(),
    grad_dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_weight_gradients_are_products_with_the_bags_gradient(
    seed, dim, dtype, longest, means, grad_dtype
):
    rng = np.random.default_rng(seed)
    case = random_case(
        rng, [dim], [dtype], bags=[70, 9], longest=longest, weighted=True, means=means
    )
    grad = torch.from_numpy(rng.normal(size=case.out_elements)).to(grad_dtype)
    expected = np.zeros(len(case.addresses))
    for feature, at, accesses in case.bags():
        of_bag = grad[at : at + dim].double().numpy()
        for n in accesses:
            expected[n] = of_bag @ case.row(feature, n).astype(np.float64)
            expected[n] /= len(accesses) if feature["mean"] else 1
    addresses, offsets, weights, *rest = case.arguments()
    found = ops.weight_gradients(grad, addresses, offsets, weights, *rest)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5 * dim)


def test_results_do_not_depend_on_the_number_of_threads():
    rng = np.random.default_rng(1)
    case = random_case(rng, [20, 64], ["fp32", "fp16"], bags=[900, 40, 1000], weighted=True)
    grad = torch.from_numpy(rng.normal(size=case.out_elements)).float()
    addresses, offsets, weights, *rest = case.arguments()
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        by_weight = ops.weight_gradients(grad, addresses, offsets, weights, *rest)
        found.append((pooled(case), by_weight))
    torch.set_num_threads(before)
    for out, by_weight in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(by_weight, found[0][1])


@pytest.mark.parametrize("out", [torch.float32, torch.float16])
def test_bags_of_one_beside_others(out):
    """They are copied where a tile has no others of their feature."""
    rng = np.random.default_rng(6)
    case = random_case(rng, [16, 20, 64], ["fp32"] * 3, bags=[300] * 3, longest=None)
    offsets = np.arange(901)
    offsets[301:600] = np.sort(rng.integers(300, 601, 299))
    offsets[700:720] = 700  # and among bags of one, some of none, and one that holds them all
    case.offsets = torch.from_numpy(offsets)
    assert torch.equal(pooled(case, out), torch.from_numpy(case.expected()).to(out))


def test_slots_of_more_than_32_bits():
    """Arenas that begin as many bytes earlier as the slots are moved."""
    case = random_case(np.random.default_rng(7), [16], ["fp32"], bags=[200], longest=5)
    addresses, offsets, weights, features, bases, *rest = case.arguments()
    slots = 2**33
    moved = torch.where(bases != 0, bases - slots * int(case.described["row_bytes"][0]), 0)
    batch = (addresses + slots, offsets, weights, features, moved, *rest)
    found = ops.pooled_rows(*batch, case.out_elements, torch.float32)
    assert torch.equal(found, torch.from_numpy(case.expected()))


def test_elements_that_no_bag_covers_are_zero():
    case = random_case(np.random.default_rng(2), [16], ["fp32"], bags=[3])
    case.described["out_base"] += 5
    case.out_elements += 9
    for _ in range(3):
        out = pooled(case)
        assert torch.equal(out, torch.from_numpy(case.expected()))
        out.fill_(7)


def test_copied_rows_that_do_not_fit_are_refused():
    slots, out = torch.tensor([1, 2, 3]), torch.zeros(96, dtype=torch.uint8)
    arena = torch.zeros(10, 16, dtype=torch.uint8).data_ptr()
    for wrong, error in (
        (([0], [4], [arena], [16], out, [0]), "counts: expected 0 to 3, got 4"),
        (([4], [0], [arena], [16], out, [0]), "firsts: expected 0 to 3, got 4"),
        (([0], [3], [arena], [16], out, [50]), "out: bytes: expected 0 to 46, got 48"),
        (([0], [3], [0], [16], out, [0]), "arenas: one is not mapped here"),
        (([0], [3], [arena], [0], out, [0]), "row_bytes: expected .*, got 0"),
        (([0], [3], [arena, arena], [16], out, [0]), "expected equal numbers of them"),
        (
            ([0], [3], [arena], [16], out, [0], slots[:2], [5]),
            "targets: rows: expected 0 to 2, got 3",
        ),
        (([0], [3], [arena], [16], out, [0], slots), "expected equal numbers of them"),
    ):
        with pytest.raises(ValueError, match=error):
            ops.copy_rows(slots, *wrong)


def test_redirected_accesses_read_the_fetched_rows():
    addresses = torch.tensor([1 << SLOT_BITS | 7, 5, 1 << SLOT_BITS | 9, 1 << SLOT_BITS | 7])
    # Runs: slot 5 of rank 0; slots 7 and 9 of rank 1.
    positions = torch.tensor([1, 0, 3, 2], dtype=torch.int32)
    run_start = torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    fetched = 2 << SLOT_BITS
    targets = torch.tensor([-1, fetched | 20, fetched | 21])
    numbered = addresses.clone()
    ops.redirect(addresses, positions, run_start, targets)
    assert addresses.tolist() == [fetched | 20, 5, fetched | 21, fetched | 20]
    rows = torch.tensor([1, 0, 2, 1], dtype=torch.int32)
    assert torch.equal(ops.redirect_numbered(numbered, rows, targets), addresses)
    rows = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    found = ops.redirect_numbered(addresses, rows, targets)
    assert found.tolist() == [fetched | 20] * 2 + [fetched | 21, fetched | 20]
    assert torch.equal(ops.redirect_numbered(addresses, -1 - rows.abs(), targets[:0]), addresses)


def test_accesses_of_no_row_are_refused():
    addresses, targets = torch.zeros(3, dtype=torch.int64), torch.tensor([4, 5])
    rows, starts = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 2, 3])
    with pytest.raises(IndexError, match="row_of: one is none of 2 rows"):
        ops.redirect_numbered(addresses, rows, targets)
    with pytest.raises(ValueError, match="row_of"):
        ops.redirect_numbered(addresses, rows[:2], targets)
    with pytest.raises(IndexError, match="positions: 3 is none of 3 accesses"):
        ops.redirect(addresses, rows + 1, starts.int(), targets)
    with pytest.raises(ValueError, match="run_start"):
        ops.redirect(addresses, rows, starts[:2].int(), targets)


def test_what_cannot_be_read_is_refused():
    case = random_case(np.random.default_rng(4), [16], ["fp32"], bags=[5, 6], longest=3)
    addresses, offsets, weights, features, bases, rank = case.arguments()
    rest = (case.out_elements, torch.float32)

    def lookup(addresses=addresses, offsets=offsets, features=features, bases=bases, rest=rest):
        return ops.pooled_rows(addresses, offsets, weights, features, bases, rank, *rest)

    lookup()
    for broken in (offsets + 1, offsets - 1, offsets[:-1].contiguous(), offsets.flip(0)):
        with pytest.raises(ValueError, match=r"offsets|bags"):
            lookup(offsets=broken)
    with pytest.raises(TypeError, match="offsets"):
        lookup(offsets=offsets.double())
    with pytest.raises(ValueError, match="output of"):
        lookup(rest=(case.out_elements - 1, torch.float32))
    with pytest.raises(TypeError, match="output of dtype"):
        lookup(rest=(case.out_elements, torch.float64))
    with pytest.raises(IndexError, match="field 3"):
        lookup(addresses=addresses % (1 << SLOT_BITS) | 3 << SLOT_BITS)
    with pytest.raises(IndexError, match=f"field {LOCAL}, which has no rows of width 0"):
        lookup(addresses=addresses | LOCAL << SLOT_BITS, bases=torch.zeros_like(bases))
    with pytest.raises(TypeError, match="weights"):
        ops.pooled_rows(addresses, offsets, torch.ones(2).int(), features, bases, rank, *rest)


@pytest.mark.parametrize("dim", [5, 16])
@pytest.mark.parametrize("bagged", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_row_that_is_not_mapped_is_named_wherever_it_is_met(dim, bagged, weighted):
    longest = 3 if bagged else None
    rng = np.random.default_rng(4)
    case = random_case(rng, [dim, 8], ["fp32"] * 2, bags=[200, 90], longest=longest)
    addresses, offsets, _, features, bases, rank = case.arguments()
    weights = torch.ones(len(addresses)) if weighted else None
    rest = (case.out_elements, torch.float32)
    for n in (0, 40, 130, len(addresses) - 1):
        wrong = addresses.clone()
        wrong[n] = wrong[n] % (1 << SLOT_BITS) | 3 << SLOT_BITS
        named = rf"access {n} reads field 3, which has no rows of width [01] here"
        with pytest.raises(IndexError, match=named):
            ops.pooled_rows(wrong, offsets, weights, features, bases, rank, *rest)
        if weighted:
            grad = torch.ones(case.out_elements)
            with pytest.raises(IndexError, match=named):
                ops.weight_gradients(grad, wrong, offsets, weights, features, bases, rank)
    ops.pooled_rows(addresses, offsets, weights, features, bases, rank, *rest)


def test_operators_are_as_torch_wants_them():
    case = random_case(np.random.default_rng(5), [16, 8], ["fp32", "int8"], bags=[4, 4, 4])
    check = torch.library.opcheck
    arguments = case.arguments()
    check(ops.pooled_rows.default, (*arguments, case.out_elements, torch.float32))
    grad = torch.ones(case.out_elements)
    weights = torch.ones(len(case.addresses))
    by_weight = (grad, *arguments[:2], weights, *arguments[3:])
    check(ops.weight_gradients.default, by_weight)
    slots = torch.tensor([1, 2])
    out = torch.empty(2, case.arenas[0][0].shape[1], dtype=torch.uint8)
    rows = ([0], [2], [case.arenas[0][0].data_ptr()], [out.shape[1]])
    check(ops.copy_rows.default, (slots, *rows, out.view(-1), [0]))
    runs = torch.tensor([0, 1], dtype=torch.int32)
    to = torch.tensor([5])
    check(ops.redirect.default, (arguments[0].clone(), runs[:1], runs, to))
    check(ops.redirect_numbered.default, (torch.tensor([7]), runs[:1], to))


@pytest.mark.parametrize(
    ("dims", "dtypes", "out"),
    [
        ([64], ["fp32"], torch.float32),
        ([16, 64, 512], ["fp32"] * 3, torch.float32),
        ([16, 20], ["fp32"] * 2, torch.float32),
        ([32, 64], ["fp16"] * 2, torch.float16),
        ([32, 64], ["bf16", "int8"], torch.bfloat16),
        ([64, 64], ["fp16", "int8"], torch.float32),
    ],
)
@pytest.mark.parametrize("longest", [None, 2])
def test_large_outputs_are_the_same(dims, dtypes, out, longest):
    """Outputs beyond 4 MiB pass by the caches, whole lines of them."""
    rng = np.random.default_rng(7)
    bags = [1 + (5 << 20) // (sum(dims) * out.itemsize)] * len(dims)
    case = random_case(rng, dims, dtypes, bags=bags, longest=longest)
    found = pooled(case, out)
    assert found.nbytes > 4 << 20
    columns, start = found.view(bags[0], -1), 0
    for f, dim in enumerate(dims):
        # The same bags alone, as a small output.
        for begin in range(0, bags[0], 4000):
            part = case.described[f : f + 1].copy()
            part["first_bag"] += begin
            part["bags"] = min(4000, bags[0] - begin)
            part["out_base"], part["out_stride"] = 0, dim
            elements = int(part["bags"][0]) * dim
            alone = ops.pooled_rows(
                *case.arguments()[:3], as_words(part), case.bases, case.rank, elements, out
            )
            expected = columns[begin : begin + 4000, start : start + dim]
            assert torch.equal(alone.view(-1, dim), expected)
        start += dim


def large(mebibytes):
    """An output of so many MiB."""
    case = random_case(np.random.default_rng(8), [1024], ["fp32"], bags=[256 * mebibytes], slots=2)
    return pooled(case)


def test_blocks_of_outputs_are_used_again():
    kept = large(9)
    values = kept.clone()
    out = large(9)
    pointer = out.data_ptr()
    view = out[:5]
    del out
    other = large(9)  # the view keeps the block
    assert other.data_ptr() not in (pointer, kept.data_ptr())
    del view
    again = large(8)
    assert again.data_ptr() == pointer
    assert torch.equal(kept, values)


def test_few_blocks_are_kept():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    outputs = [large(n) for n in range(12, 28)]
    before = resident_bytes()
    held = sum(out.nbytes for out in outputs)
    del outputs
    assert before - resident_bytes() > held * 4 / 16


def test_outputs_of_many_threads():
    def work(seed):
        case = random_case(np.random.default_rng(seed), [64], ["fp32"], bags=[9000], longest=None)
        return all(torch.equal(pooled(case), pooled(case)) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
