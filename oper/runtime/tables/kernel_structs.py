"""The features of a batch as the kernels see them: Feature of csrc/include/oper/step/feature.h.

Bag i of a feature is bag first_bag + i of the batch, and its sum is
out[out_base + i·out_stride : + dim]. If a lookup pools nothing, each access is a bag.
"""

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import struct_words

FEATURE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "bucket",
            "width",
            "dtype",  # a code of DTYPE_CODE
            "dim",
            "row_bytes",  # from one slot of the arena to the next
            "first_bag",
            "bags",
            "out_base",
            "out_stride",
            "mean",  # 1: sums are divided by the bag's length
            "has_gradient",  # 0: of a frozen table, left out of the sort
            "lookup",  # its number in the module, which no kernel reads
        )
    ]
)
native.shared("struct Feature", FEATURE)
FEATURE_WORDS = FEATURE.itemsize // 8

# How the values of rows are stored; int8 rows are dim bytes, an fp32 scale and an fp32 bias.
DTYPE_CODE = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}
for _dtype, _code in DTYPE_CODE.items():
    native.shared(f"dtype {_dtype}", _code)


def as_words(features: np.ndarray) -> torch.Tensor:
    """Return an array of FEATURE [F] as the kernels take it, int64 [F, FEATURE_WORDS]."""
    return struct_words(features)


def as_features(words: torch.Tensor) -> np.ndarray:
    """Return the features in words of the kernels, as a view of the same memory."""
    features: np.ndarray = words.numpy().view(FEATURE)[:, 0]
    return features
