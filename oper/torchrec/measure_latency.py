"""Latencies of a model, which answers requests one after another.

latencies, last = oper.measure_latency(model, requests)
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.distributed.types import LazyAwaitable

from oper.base.errors import OperError, check_type


@dataclass(frozen=True)
class Latencies:
    """Seconds from each request to its answer, and total requests per second."""

    seconds: np.ndarray  # [requests]
    per_second: float

    def to_dict(self) -> dict[str, float]:
        """Return the percentiles in milliseconds, for JSON."""
        named = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
        percentiles = {
            name: float(np.percentile(1e3 * self.seconds, at)) for name, at in named.items()
        }
        return {
            "requests": len(self.seconds),
            **percentiles,
            "requests_per_second": self.per_second,
        }


def measure_latency(
    model: Callable[[Any], Any], requests: Iterable[Any], warm_up: int = 3
) -> tuple[Latencies, Any]:
    """Time each answer of `model(request)`, without gradients. The time includes the translation of
    ids to addresses, the lookup, and the wait for its result.

    Args:
        model: a collection of tables sharded by OPER or by TorchRec, a whole model, or an engine.
        requests: KeyedJaggedTensors, or other inputs of the model. Only ranks that share memory,
            under a plan for inference, may have different numbers of them.
        warm_up: number of first requests that are answered but not counted.

    Returns:
        The latencies, and the last answer.

    Raises:
        OperError: there are at most `warm_up` requests. The model's errors pass through.
    """
    check_type("measure_latency", "model", model, Callable)  # type: ignore[arg-type]
    seconds, out, begun = [], None, time.perf_counter()
    with torch.no_grad():
        for number, request in enumerate(requests):
            start = time.perf_counter()
            if number == warm_up:
                begun = start
            out = model(request)
            if isinstance(out, LazyAwaitable):
                out = out.wait()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # work on a device may be unfinished
            seconds.append(time.perf_counter() - start)
    counted = np.array(seconds[warm_up:])
    if not len(counted):
        raise OperError(
            f"expected more requests than the {warm_up} of the warm-up, got {len(seconds)}: give "
            "more batches, or lower warm_up"
        )
    return Latencies(counted, len(counted) / (time.perf_counter() - begun)), out
