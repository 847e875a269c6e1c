"""The features of a batch as the kernels see them: struct Feature of csrc/include/oper/step/rows.h.

Bag i of a feature is bag first_bag + i of the batch, and its sum is
out[out_base + i·out_stride : + dim]. Where a lookup pools nothing, each access is a bag.
"""

import numpy as np
import torch

# In the order of the kernels' struct.
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
FEATURE_WORDS = FEATURE.itemsize // 8

# Of rows; int8 ones are dim bytes, an fp32 scale and an fp32 bias.
DTYPE_CODE = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}


def as_words(features: np.ndarray) -> torch.Tensor:
    """An array of FEATURE [F] as the kernels take it, int64 [F, FEATURE_WORDS]."""
    return torch.from_numpy(features.view(np.int64).reshape(len(features), FEATURE_WORDS))
