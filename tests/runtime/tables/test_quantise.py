"""Row-wise 8-bit rows against those of FBGEMM, as torch has them, and conversions of values."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native

ops = native.ops()


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from([0, 1, 5, 40]),
    dim=st.sampled_from([1, 2, 7, 16, 33, 64, 257]),
    scale=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e20]),
    mean=st.sampled_from([0.0, -5.0, 1e6]),
)
def test_quantised_rows_are_fbgemms(seed, rows, dim, scale, mean):
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(mean + scale * rng.normal(size=(rows, dim))).float()
    if rows:
        expected = torch.ops.quantized.embedding_bag_byte_prepack(values)
        assert torch.equal(ops.quantise_rows(values), expected)
        assert torch.equal(ops.quantise_rows(values.t().contiguous().t()), expected)
    found = ops.dequantise_rows(ops.quantise_rows(values))
    span = values.amax(1) - values.amin(1) if rows else values.sum(1)
    slack = 1e-8 + (1e-6 * values.abs().max() if rows else 0)  # 1e-8 is FBGEMM's
    assert ((found - values).abs() <= span[:, None] / 255 * 0.501 + slack).all()


def test_dequantised_rows_are_scale_times_byte_plus_bias():
    packed = torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(9, 20))
    expected = torch.ops.quantized.embedding_bag_byte_unpack(packed)
    torch.testing.assert_close(ops.dequantise_rows(packed), expected, rtol=1e-6, atol=1e-6)


def test_operators_are_as_torch_wants_them():
    torch.library.opcheck(ops.quantise_rows.default, (torch.randn(3, 5),))
    torch.library.opcheck(ops.dequantise_rows.default, (ops.quantise_rows(torch.randn(3, 5)),))
