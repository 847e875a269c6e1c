"""Times on a device, and the memory that tests of bandwidth read."""

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(work: Callable[[], object], device: torch.device, runs: int = 15) -> float:
    """Of `work` on the device's current stream, after two runs that are not counted."""
    return statistics.median([seconds_of(work, device) for _ in range(runs + 2)][2:])


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Of one call of `work` on the device's current stream."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_bandwidth(device: torch.device, size_bytes: int) -> float:
    """Bytes read and written per second by a copy of `size_bytes`, of random words: equal ones may
    be compressed on their way."""
    source = torch.empty(size_bytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def stream(device: torch.device) -> int:
    """The current stream as a number, as the operators take it."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
