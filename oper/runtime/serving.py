"""Serving: answer requests one after another, and say how long each took.

    latencies, last = oper.serve(model, requests)

While a request is looked up, the next one's ids are translated by a second thread, as a data loader
would: translation needs the ids only.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.errors import OperError
from oper.runtime.embedding import Embedding
from oper.runtime.sharded_modules import (
    OperShardedEmbeddingBagCollection,
    OperShardedEmbeddingCollection,
)


@dataclass(frozen=True)
class Latencies:
    """What each request took, its translation and its lookup, and requests per second in all."""

    seconds: np.ndarray  # [requests]
    per_second: float

    def to_dict(self) -> dict[str, float]:
        """Percentiles in milliseconds, as JSON holds them."""
        named = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
        found = {name: float(np.percentile(1e3 * self.seconds, at)) for name, at in named.items()}
        return {"requests": len(self.seconds), **found, "requests_per_second": self.per_second}


def serve(model: Any, requests: Iterable[Any], warm_up: int = 3) -> tuple[Latencies, Any]:
    """Look every request (a KeyedJaggedTensor) up, without gradients.

    Args:
        model: a collection sharded by OPER, under DistributedModelParallel or not, or its engine.
        requests: ranks that share memory may have different numbers of them; others not.
        warm_up: so many first requests are answered and not counted.

    Returns:
        What the requests took, and the last one's output.

    Raises:
        OperError: the model is none of these, or there are no more requests than `warm_up`.
    """
    prepare, look_up = _stages(model)
    seconds, out, begun = [], None, time.perf_counter()
    with torch.no_grad():
        for number, (batch, translation_seconds) in enumerate(_translated(prepare, requests)):
            if number == warm_up:
                begun = time.perf_counter()
            start = time.perf_counter()
            out = look_up(batch)
            seconds.append(translation_seconds + time.perf_counter() - start)
    counted = np.array(seconds[warm_up:])
    if not len(counted):
        raise OperError(
            f"{len(seconds)} requests, and more than the {warm_up} of the warm-up were needed"
        )
    return Latencies(counted, len(counted) / (time.perf_counter() - begun)), out


def _stages(model: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What prepares a request, and what answers it then."""
    if isinstance(model, Embedding):
        return model.prepare, model.lookup
    inner = getattr(model, "module", model)
    if not isinstance(inner, OperShardedEmbeddingBagCollection | OperShardedEmbeddingCollection):
        raise OperError(
            f"{type(inner).__name__}: is no collection of tables sharded by OPER; serve takes one "
            "(oper.shard), or its engine"
        )

    def prepare(request: Any) -> Any:
        context = inner.create_context()
        return context, inner.input_dist(context, request).wait().wait()

    return prepare, lambda ready: inner.compute_and_output_dist(*ready).wait()


def _translated(
    prepare: Callable[[Any], Any], requests: Iterable[Any]
) -> Iterator[tuple[Any, float]]:
    """The requests prepared, each while the one before is served, and what that took."""

    def timed(request: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        with torch.no_grad():
            return prepare(request), time.perf_counter() - start

    with ThreadPoolExecutor(1, thread_name_prefix="translate") as thread:
        waiting = None
        for request in requests:
            following = thread.submit(timed, request)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
