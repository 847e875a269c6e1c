"""Latencies of a model: requests are answered one after another, and each is timed.

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
    """Seconds from each request to its answer, and requests per second of the whole."""

    seconds: np.ndarray  # [requests]
    per_second: float

    def to_dict(self) -> dict[str, float]:
        """Percentiles in milliseconds, as JSON holds them."""
        named = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
        found = {name: float(np.percentile(1e3 * self.seconds, at)) for name, at in named.items()}
        return {"requests": len(self.seconds), **found, "requests_per_second": self.per_second}


def measure_latency(
    model: Callable[[Any], Any], requests: Iterable[Any], warm_up: int = 3
) -> tuple[Latencies, Any]:
    """Time each answer of `model(request)`, without gradients. All of it counts: the translation of
    ids to addresses, the lookup, and the wait for its result.

    Args:
        model: a collection of tables sharded by OPER or by TorchRec, a whole model, or an engine.
        requests: KeyedJaggedTensors, or what the model takes. Ranks that share memory may have
            different numbers of them under a plan for inference; others may not.
        warm_up: so many first requests are answered and not counted.

    Returns:
        What the requests took, and the last one's answer.

    Raises:
        OperError: there are no more requests than `warm_up`, and whatever the model raises.
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
                torch.cuda.synchronize()  # an answer on a device may have been started only
            seconds.append(time.perf_counter() - start)
    counted = np.array(seconds[warm_up:])
    if not len(counted):
        raise OperError(
            f"expected more requests than the {warm_up} of the warm-up, got {len(seconds)}: give "
            "more batches, or lower warm_up"
        )
    return Latencies(counted, len(counted) / (time.perf_counter() - begun)), out
