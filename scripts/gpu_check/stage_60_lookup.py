"""The lookup: bytes per second beside a copy, torch's embedding_bag and FBGEMM's TBE.

Rows of fp32 on one rank, 26 features, 1.7 to 2.1 million rows a launch from an arena of 10 GB.
Bytes are those of rows, addresses and output. Zipf ids are served from the second cache in part, so
that they may take less time than their bytes would from memory; bars are for uniform ids. FBGEMM's
figures are null where it is not installed.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

SECONDS = 90.0
NEEDS = ("torch", "numpy", "pyarrow")
FEATURES = 26
ARENA_BYTES = 10 << 30
DIMS = (16, 64, 128)
BAGS = ((65_536, 1), (4_096, 20))  # samples, ids a bag
IDS = ("uniform", "zipf")


def records(
    device: str = "cuda", arena_bytes: int = ARENA_BYTES, samples_per: int = 1
) -> Iterator[dict[str, Any]]:
    """With `device` "cpu", and smaller sizes, the same of the CPU's kernels: to try the script."""
    import torch

    from scripts.gpu_check.timing import copy_bandwidth

    on = torch.device(device)
    copied = copy_bandwidth(on, min(arena_bytes, 4 << 30))
    for dim in DIMS:
        arena = torch.randn(arena_bytes // (4 * dim), dim, device=on)
        for samples, length in BAGS:
            for ids in IDS:
                found = measure(arena, ids, samples // samples_per, length)
                yield {
                    "dim": dim,
                    "bag": length,
                    "ids": ids,
                    **found,
                    "of_copy": found["bytes_per_second"] / copied,
                }
        del arena


def measure(arena: Any, ids: str, samples: int, length: int) -> dict[str, Any]:
    """One lookup, checked against torch's."""
    import numpy as np
    import torch

    from oper.base import native
    from oper.plan.layout import LOCAL, SLOT_BITS
    from oper.runtime.tables.kernel_structs import FEATURE, as_words
    from scripts.gpu_check.timing import median_seconds, stream

    rows, dim = arena.shape
    accesses = FEATURES * samples * length
    drawn = torch.rand(accesses, device=arena.device, dtype=torch.float64)
    slots = (
        (rows * drawn).long() if ids == "uniform" else (rows**drawn).long() * 2_654_435_761 % rows
    )
    slots = slots.clamp_(max=rows - 1)
    features = np.zeros(FEATURES, FEATURE)
    features["dim"], features["row_bytes"], features["bags"] = dim, 4 * dim, samples
    features["first_bag"] = np.arange(FEATURES) * samples
    features["out_base"], features["out_stride"] = np.arange(FEATURES) * dim, FEATURES * dim
    starts = torch.arange(0, accesses + 1, length, device=arena.device)
    bases = torch.tensor([[arena.data_ptr(), 0]], device=arena.device)
    ops = native.device_ops() if arena.is_cuda else native.ops()
    addresses, out_elements = LOCAL << SLOT_BITS | slots, samples * FEATURES * dim
    offsets, words = None if length == 1 else starts, as_words(features)

    def ours() -> Any:
        given = (addresses, offsets, None, words, bases, 0, out_elements, torch.float32)
        return ops.pooled_rows(*given, stream(arena.device))

    def torchs() -> Any:
        return torch.nn.functional.embedding_bag(slots, arena, starts[:-1], mode="sum")

    expected = torchs().view(FEATURES, samples, dim).transpose(0, 1).reshape(-1)
    same = bool(torch.allclose(ours(), expected, rtol=1e-5, atol=1e-5))
    seconds, seconds_of_torch = (median_seconds(work, arena.device) for work in (ours, torchs))
    tbe, seconds_of_fbgemm = fbgemms_lookup(arena, FEATURES), None
    if tbe is not None:

        def fbgemms() -> Any:
            return tbe(slots, starts)

        same &= bool(torch.allclose(ours(), fbgemms().reshape(-1), rtol=1e-5, atol=1e-5))
        seconds_of_fbgemm = median_seconds(fbgemms, arena.device)
    moved = accesses * (4 * dim + 8) + 4 * out_elements
    return {
        "rows": accesses,
        "seconds": seconds,
        "bytes_per_second": moved / seconds,
        "torch_seconds": seconds_of_torch,
        "times_torch": seconds_of_torch / seconds,
        "fbgemm_seconds": seconds_of_fbgemm,
        "times_fbgemm": None if seconds_of_fbgemm is None else seconds_of_fbgemm / seconds,
        "failed": not same,
    }


def fbgemms_lookup(arena: Any, features: int) -> Any:
    """FBGEMM's table-batched lookup of so many features in one table, of an arena's rows; None
    where FBGEMM is not installed."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if arena.is_cuda:
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(*arena.shape, *place)],
        feature_table_map=[0] * features,
        pooling_mode=PoolingMode.SUM,
        device=arena.device,
    )
    tbe.split_embedding_weights()[0].copy_(arena)

    def lookup(ids: Any, offsets: Any) -> Any:
        with torch.no_grad():
            return tbe(ids, offsets)

    return lookup
