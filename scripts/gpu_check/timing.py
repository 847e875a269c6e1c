"""Times of work on a device without gaps between launches, and the bandwidth of a copy.

A kernel that starts on an idle device waits for its own launch, and an event before it counts that
wait. So the device sleeps before the first event until the host has started all of the work.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

SLEEP_CYCLES = 1 << 21  # about a millisecond, more than most launches take the host
MOST_CYCLES = 1 << 27  # about 70 ms; work that takes the host longer is timed with gaps


class Timing(NamedTuple):
    """The median of all runs in seconds, and the difference between the medians of its two passes
    as a fraction of the smaller: a difference between versions below it means nothing."""

    seconds: float
    spread: float


def timed(
    work: Callable[[Any], object],
    inputs: Sequence[Any],
    device: torch.device,
    *,
    before: Callable[[Any], Any] = lambda given: given,
    runs: int = 9,
) -> Timing:
    """Time `work` of inputs in turn on the device's current stream, in two passes of `runs`.

    `before` makes the argument of `work` from an input, outside of the measured time.
    """
    cycles = SLEEP_CYCLES
    for given in inputs:  # kernels load, and memory is allocated, in their first call
        work(before(given))
    passes: list[list[float]] = [[], []]
    for seconds in passes:
        while len(seconds) < runs:
            given = before(inputs[len(seconds) % len(inputs)])
            elapsed, covered = seconds_of(work, given, device, cycles)
            if covered or cycles >= MOST_CYCLES:
                seconds.append(elapsed)
            else:
                cycles *= 2
    return _of_passes(passes)


def seconds_of(
    work: Callable[[Any], object], given: Any, device: torch.device, cycles: int
) -> tuple[float, bool]:
    """Return the seconds of one call, and whether the device slept until all of it was started."""
    if device.type != "cuda":
        started = time.perf_counter()
        work(given)
        return time.perf_counter() - started, True
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    work(given)
    end.record()
    covered = not begin.query()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, covered


def timed_steps(
    steps: Mapping[str, Callable[[Any], object]],
    inputs: Sequence[Any],
    wait: Callable[[], object],
    *,
    rounds: int = 20,
) -> dict[str, Timing]:
    """Time steps back to back by the host's clock, the host's own work included, in two passes.

    The versions in `steps` take turns. Each is run once per input before it is timed.
    """
    passes: dict[str, list[list[float]]] = {name: [] for name in steps}
    for _ in range(2):
        for name, step in steps.items():
            for given in inputs:
                step(given)
            wait()
            began = time.perf_counter()
            for number in range(rounds):
                step(inputs[number % len(inputs)])
            wait()
            passes[name].append([(time.perf_counter() - began) / rounds])
    return {name: _of_passes(seconds) for name, seconds in passes.items()}


def _of_passes(passes: Sequence[Sequence[float]]) -> Timing:
    first, second = (statistics.median(seconds_of_pass) for seconds_of_pass in passes)
    median = statistics.median(
        [seconds for seconds_of_pass in passes for seconds in seconds_of_pass]
    )
    return Timing(median, abs(first - second) / min(first, second))


def copy_bandwidth(device: torch.device, size_bytes: int) -> float:
    """Return bytes read and written per second by a copy of `size_bytes` of random words: equal
    words may be compressed on their way."""
    source = torch.empty(size_bytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(target.copy_, [source], device).seconds
