"""Gradients of weights on devices, emulated: the bits of the processor's kernels, in any order of
threads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from tests.support.cuda.devices import Device
from tests.support.examples import examples
from tests.support.runtime.lookups import Case, random_case

GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROW_DTYPES = ("fp32", "fp16", "bf16", "int8")


def arguments(
    case: Case, grad: torch.Tensor, put: Callable[[torch.Tensor | None], torch.Tensor | None]
) -> tuple[list[Any], list[Any]]:
    """The operator's, in the memory that `put` brings tensors to, and what must be kept there."""
    kept = [[put(arena) for arena in of_width] for of_width in case.arenas]
    bases = [[arena.data_ptr() for arena in of_width if arena is not None] for of_width in kept]
    given = [put(grad), put(case.addresses), put(case.offsets), put(case.weights)]
    return [*given, case.features, put(torch.tensor(bases)), case.rank], kept


def assert_equal_on(device: Device, case: Case, grad: torch.Tensor) -> None:
    """The processor's bits, in any order of threads."""
    expected = native.ops().weight_gradients(*arguments(case, grad, lambda tensor: tensor)[0])
    assert expected.any() or not len(expected)
    for order in device.orders:
        given, _kept = arguments(case, grad, device.put)
        found = device.run("weight_gradients", *given, order=order)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def gradient(rng: np.random.Generator, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(elements)).to(dtype)


# Less than the sixteen sums of a product, whole numbers of them and others, by pieces of four
# values and by one.
@pytest.mark.parametrize("dim", [1, 3, 4, 5, 16, 20, 33, 64, 130])
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_every_shape_of_rows(device: Device, dtype: str, dim: int) -> None:
    for seed, (longest, means) in enumerate([(None, False), (9, True), (3, False)]):
        rng = np.random.default_rng(seed)
        bags = [30, 11]
        case = random_case(
            rng, [dim], [dtype], bags=bags, longest=longest, weighted=True, means=means
        )
        assert_equal_on(device, case, gradient(rng, case.out_elements, GRAD_DTYPES[seed]))


@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(
        st.tuples(st.sampled_from([2, 5, 8, 16, 36, 64]), st.sampled_from(ROW_DTYPES)),
        min_size=1,
        max_size=3,
    ),
    bags=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    longest=st.sampled_from([None, 0, 1, 7, 40]),
    index=st.sampled_from([torch.int32, torch.int64]),
    means=st.booleans(),
    blocks=st.booleans(),
    dtype=st.sampled_from(GRAD_DTYPES),
)
@examples(30)
def test_batches_of_unlike_tables(
    device: Device,
    seed: int,
    widths: list[tuple[int, str]],
    bags: list[int],
    longest: int | None,
    index: torch.dtype,
    means: bool,
    blocks: bool,
    dtype: torch.dtype,
) -> None:
    rng = np.random.default_rng(seed)
    dims, dtypes = zip(*widths, strict=True)
    case = random_case(
        rng,
        list(dims),
        list(dtypes),
        bags=bags,
        longest=longest,
        index=index,
        weighted=True,
        means=means,
        blocks=blocks,
    )
    assert_equal_on(device, case, gradient(rng, case.out_elements, dtype))


def test_weights_of_no_bag_have_no_gradient(device: Device) -> None:
    """As of features that another module looks up."""
    rng = np.random.default_rng(0)
    case = random_case(rng, [8], ["fp32"], bags=[20, 20, 20], longest=4, weighted=True)
    case.described = case.described[[0, 2]]
    grad = gradient(rng, case.out_elements, torch.float32)
    assert_equal_on(device, case, grad)


def test_nothing_is_read_by_offsets_that_do_not_fit(device: Device) -> None:
    rng = np.random.default_rng(1)
    case = random_case(rng, [8], ["fp32"], bags=[20], longest=4, weighted=True)
    assert case.offsets is not None
    case.offsets[7:] += 1 << 40  # far beyond all addresses
    given, _kept = arguments(case, gradient(rng, case.out_elements, torch.float32), device.put)
    report = device.put(torch.tensor([-1, 7]))
    assert not device.run("weight_gradients", *given, report=report).any()


def test_a_gradient_that_is_too_small_is_refused(device: Device) -> None:
    rng = np.random.default_rng(2)
    case = random_case(rng, [8], ["fp32"], bags=[20], longest=4, weighted=True)
    given, _kept = arguments(case, torch.ones(case.out_elements - 1), device.put)
    with pytest.raises(ValueError, match="ends beyond an output of"):
        device.run("weight_gradients", *given)
