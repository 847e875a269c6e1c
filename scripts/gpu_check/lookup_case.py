"""The lookup that stages time: 26 features of one table of fp32 rows on one rank."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FEATURES = 26
INPUTS = 3  # draws of ids, which runs take in turn
IDS = ("uniform", "zipf")


@dataclass(frozen=True)
class Sizes:
    """Row counts and batches of the measured lookups; `bags` are samples and ids a bag."""

    arena_bytes: int = 10 << 30
    copy_bytes: int = 4 << 30
    dims: tuple[int, ...] = (16, 32, 64, 128)
    bags: tuple[tuple[int, int], ...] = ((65_536, 1), (4_096, 20))


DRY = Sizes(arena_bytes=1 << 20, copy_bytes=1 << 20, dims=(16,), bags=((128, 1), (8, 20)))


def zipf_ids(count: int, rows: int, device: Any) -> Any:
    """Draw row ids below `rows` by Zipf's law with exponent 1, hot rows spread over the table."""
    import torch

    ranks = (rows ** torch.rand(count, device=device, dtype=torch.float64)).long()
    return ranks * 2_654_435_761 % rows  # Knuth's multiplier, a prime


class LookupCase:
    """Every bag of `samples` samples has `length` ids of an arena's rows [rows, dim], uniform or by
    Zipf's law. The kernels' arguments are on the arena's device, `words` in the host's memory."""

    def __init__(self, arena: Any, ids: str, samples: int, length: int) -> None:
        import numpy as np
        import torch

        from oper.plan.layout import LOCAL, SLOT_BITS
        from oper.runtime.tables.kernel_structs import FEATURE, as_words

        rows, self.dim = arena.shape
        self.samples, self.length = samples, length
        self.accesses = FEATURES * samples * length
        if ids == "uniform":
            self.slots = torch.randint(rows, (self.accesses,), device=arena.device)
        else:
            self.slots = zipf_ids(self.accesses, rows, arena.device)
        self.addresses = LOCAL << SLOT_BITS | self.slots
        self.starts = torch.arange(0, self.accesses + 1, length, device=arena.device)
        features = np.zeros(FEATURES, FEATURE)
        features["dim"], features["row_bytes"] = self.dim, 4 * self.dim
        features["bags"], features["has_gradient"] = samples, 1
        features["first_bag"] = np.arange(FEATURES) * samples
        features["out_base"] = np.arange(FEATURES) * self.dim
        features["out_stride"] = FEATURES * self.dim
        self.words = as_words(features)


def measured_cases(
    library: str | None, measure: Callable[[Any, Any, str, int, int], dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the record of each case and the bytes a second that a copy moves. `measure` makes the
    record from the device, an arena, the kind of ids, the number of samples and the ids a bag."""
    import torch

    from scripts.gpu_check.timing import copy_bandwidth
    from tests.support.cuda.device_engines import device_of

    device, sizes = device_of(library), Sizes() if library is None else DRY
    on = device.torch_device
    copied = copy_bandwidth(on, sizes.copy_bytes)
    for dim in sizes.dims:
        arena = torch.randn(sizes.arena_bytes // (4 * dim), dim, device=on)
        for samples, length in sizes.bags:
            for ids in IDS:
                record = measure(device, arena, ids, samples, length)
                yield {"dim": dim, "bag": length, "ids": ids, **record}, copied
        del arena


def fbgemms_table(arena: Any, **optimizer: Any) -> Any:
    """Return FBGEMM's table of an arena's size, which all features read; None without FBGEMM."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if arena.is_cuda:
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(*arena.shape, *place)],
        feature_table_map=[0] * FEATURES,
        pooling_mode=PoolingMode.SUM,
        device=arena.device,
        **optimizer,
    )
