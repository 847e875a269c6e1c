"""Random gathers of rows by size, and by how many are read at once: the ceiling of the lookup.

From an arena of 16 GB, 4 million rows a launch, each row read once, nothing written. Its words are
random, as zeros may be compressed on their way. `of_copy` is the share of a copy's bandwidth.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scripts import build_cuda

SECONDS = 80.0
NEEDS = ("torch",)
SOURCE = Path(__file__).with_name("gathers.cu")
ARENA_BYTES, COUNT = 16 << 30, 4 << 20
ROW_BYTES, AT_ONCE, BLOCKS_OF_A_MULTIPROCESSOR = (64, 128, 256, 512), (1, 2, 4, 8), (4, 8)


def compiled(architecture: str, folder: Path) -> Path:
    """The library of gathers; CalledProcessError where it does not compile."""
    toolkit = build_cuda.toolkit()
    if toolkit is None:
        raise SystemExit("no CUDA compiler")
    made = folder / "gathers.o"
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    flags = [*build_cuda.FLAGS, *build_cuda.STRICT, target]
    command: list[str | Path] = [toolkit / "bin/nvcc", *flags, "-c", SOURCE, "-o", made]
    subprocess.run(command, check=True)
    build_cuda.link(toolkit, [made], folder / "gathers.so")
    return folder / "gathers.so"


def records() -> Iterator[dict[str, Any]]:
    import torch

    from scripts.gpu_check.timing import copy_bandwidth, median_seconds, stream

    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(compiled(f"{major}{minor}", Path(folder))))
    copied = copy_bandwidth(device, 4 << 30)
    arena = torch.empty(ARENA_BYTES // 8, dtype=torch.int64, device=device).random_()
    out = torch.empty(16 * 256 * multiprocessors * max(BLOCKS_OF_A_MULTIPROCESSOR), device=device)
    codes: list[int] = []

    def gather(slots: torch.Tensor, row_bytes: int, rows: int, blocks: int) -> None:
        code = library.oper_gather(
            ctypes.c_void_p(arena.data_ptr()),
            ctypes.c_void_p(slots.data_ptr()),
            ctypes.c_int64(COUNT),
            ctypes.c_int(row_bytes // 16),
            ctypes.c_int(rows),
            ctypes.c_uint(blocks * multiprocessors),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(stream(device)),
        )
        codes.append(code)

    for row_bytes in ROW_BYTES:
        slots = torch.randint(0, ARENA_BYTES // row_bytes, (COUNT,), device=device)
        for blocks, rows in product(BLOCKS_OF_A_MULTIPROCESSOR, AT_ONCE):
            work = partial(gather, slots, row_bytes, rows, blocks)
            bandwidth = COUNT * (row_bytes + 8) / median_seconds(work, device, 7)
            yield {
                "row_bytes": row_bytes,
                "at_once": rows,
                "blocks": blocks,
                "bytes_per_second": bandwidth,
                "of_copy": bandwidth / copied,
                "failed": any(codes),
            }
