"""Serving: answer requests one after another, and say how long each took.

While a request is looked up, the next one's ids are translated by a second thread, as a data loader
would: translation needs the ids only.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.errors import OperError
from oper.runtime.batch import Batch
from oper.runtime.embedding import Embedding


@dataclass(frozen=True)
class Latencies:
    """Seconds per request, and requests per second of the whole."""

    seconds: np.ndarray  # [requests]
    per_second: float

    def to_dict(self) -> dict[str, float]:
        """Percentiles in milliseconds, as JSON holds them."""
        named = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
        found = {name: float(np.percentile(1e3 * self.seconds, at)) for name, at in named.items()}
        return {"requests": len(self.seconds), **found, "requests_per_second": self.per_second}


def serve(
    engine: Embedding, requests: Iterable[Any], warm_up: int = 3
) -> tuple[Latencies, torch.Tensor]:
    """Look every request (a KeyedJaggedTensor) up; the first `warm_up` are not counted.

    Returns the latencies from a request's translated ids to its rows, and the last output.
    OperError where there are no more requests than `warm_up`.
    """
    seconds, out, begun = [], torch.empty(0), time.perf_counter()
    with torch.no_grad():
        for number, batch in enumerate(_translated(engine, requests)):
            if number == warm_up:
                begun = time.perf_counter()
            start = time.perf_counter()
            out = engine.lookup(batch)
            seconds.append(time.perf_counter() - start)
    counted = np.array(seconds[warm_up:])
    if not len(counted):
        raise OperError(
            f"{len(seconds)} requests, and more than the {warm_up} of the warm-up were needed"
        )
    return Latencies(counted, len(counted) / (time.perf_counter() - begun)), out


def _translated(engine: Embedding, requests: Iterable[Any]) -> Iterator[Batch]:
    """The requests as batches, each translated while the one before is served."""
    with ThreadPoolExecutor(1, thread_name_prefix="translate") as thread:

        def prepare(request: Any) -> Batch:
            with torch.no_grad():
                return engine.prepare(request)

        waiting = None
        for request in requests:
            following = thread.submit(prepare, request)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
