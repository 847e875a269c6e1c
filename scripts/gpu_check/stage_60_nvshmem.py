"""NVSHMEM with one rank on one device: it starts, and a get brings the right bytes."""

from collections.abc import Iterator
from typing import Any

from scripts import build_cuda

SECONDS = 15.0
NEEDS = ("torch", "numpy")
BYTES = 1 << 20


def records(library: str | None) -> Iterator[dict[str, Any]]:
    """Yield a record after each part, because NVSHMEM's own errors may end the process."""
    import numpy as np
    import torch

    from oper.base import native
    from oper.runtime.fetch_paths.gradient_gets import pieces_of
    from tests.support.cuda.device_engines import device_of

    device, ops = device_of(library), native.ops()
    if library is not None:
        from tests.support.cuda.emulator import kept

        ops.load_nvshmem_library(str(kept("nvshmem")), "")
    elif not (build_cuda.LIBRARY.with_name(build_cuda.NVSHMEM_LIBRARY)).exists():
        yield {"NVSHMEM": "its kernels are not built here"}
        return
    else:
        native.load_nvshmem()
    built, found = ops.nvshmem_versions()
    yield {"NVSHMEM": "loaded", "built for": built, "found": found}
    place = device.torch_device
    rank, ranks = ops.start_nvshmem(ops.nvshmem_unique_id(), 0, 1, place)
    yield {"NVSHMEM": "started", "rank": rank, "ranks": ranks, "failed": (rank, ranks) != (0, 1)}
    source, target = (ops.allocate_symmetric(BYTES, place) for _ in range(2))
    source.random_(0, 255)
    target.zero_()
    pieces = torch.from_numpy(pieces_of([0], np.array([0]), np.array([BYTES]))).to(place)
    device.synchronize()
    device.ops().get_pieces(pieces, source, target, device.stream)
    device.synchronize()
    yield {"NVSHMEM": "brought", "bytes": BYTES, "failed": not torch.equal(source, target)}
    for memory in (target, source):
        ops.free_symmetric(memory)
