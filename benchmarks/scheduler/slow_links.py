"""Training with cached rows over slow links to the tier, by dispatch and synchronisation.

Wide & Deep, DeepFM and DCN on a generated log of Criteo-Kaggle's tables, all in the tier, as whole
scripts: loader, dispatch, lookup, layers, DistributedDataParallel. Ranks share this machine, so its
links are made slow: after each exchange a rank sleeps as long as its own pushes, or what it pulled,
would take on its link. Vanilla is random dispatch with every update pushed. Medians of the last
iterations, after the caches have filled.

    python -m benchmarks.scheduler.slow_links [--models wide-deep] [--policies grouped+on-demand]
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import oper
from benchmarks.common import parser, publish
from benchmarks.runtime.ranks import run
from benchmarks.scheduler.click_log import ClickLog
from benchmarks.scheduler.click_models import OVER, ClickModel
from oper.cli.shared.console import new_table
from oper.runtime.comm.exchange import Exchange
from oper.runtime.fetch_paths.row_source import RowSource, SourceParts
from oper.scheduler.training.cached_rows import CachedRows
from oper.torchrec import sharders

WORKERS, SAMPLES, DIM, SCALE = 4, 128, 128, 0.02
ITERATIONS, COUNTED = 55, 25
# Gbit/s: a tenth of what the papers have, as layers take ten times as long on these cores.
LINKS = {"equal": (0.1,) * 4, "unequal": (0.5, 0.5, 0.05, 0.05)}
POLICIES = ("random+bsp", "laia+on-demand", "esd+on-demand", "grouped+on-demand")


class SlowExchange:
    """An exchange after which a rank sleeps for what passed its link; `slept` seconds so far."""

    slept = 0.0

    def __init__(self, inner: Exchange, bytes_per_second: float) -> None:
        self._inner, self._rate = inner, bytes_per_second

    def send(self, parts: Sequence[torch.Tensor], action: str) -> list[torch.Tensor]:
        """See Exchange."""
        received = self._inner.send(parts, action)
        passed = {"push rows": parts, "send rows": received}.get(action, ())
        seconds = sum(part.numel() for part in passed) / self._rate
        time.sleep(seconds)
        SlowExchange.slept += seconds
        return received


def train(
    rank: int, folder: Path, log: ClickLog, name: str, way: str, links: tuple[float, ...]
) -> dict[str, float]:
    """Milliseconds of an iteration, and of the rank's link in it."""
    policy, sync = way.split("+")
    cache = oper.CacheSettings("10%", sync)
    rate = 1e9 / 8 * links[rank]

    def slowed(settings: oper.CacheSettings) -> Any:
        def make(parts: SourceParts) -> RowSource:
            slow = SlowExchange(parts.exchange, rate)
            return CachedRows(replace(parts, exchange=slow), settings)

        return make

    arrays = log.open()
    model = ClickModel(name, log.tables)
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": 1.0})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with patch.object(sharders, "source_of", slowed):
        sharded = oper.shard(model, folder, env=env, cache=cache)
    layers = dict(in_backward_optimizer_filter(sharded.named_parameters())).values()
    optimizer = torch.optim.SGD(layers, lr=0.01)
    first = [(n * WORKERS + rank) * SAMPLES for n in range(ITERATIONS)]
    own = [tuple(arrays.batch(at, SAMPLES)) for at in first]
    loader = oper.DispatchingLoader(
        own, oper.Plan.load(folder), policy=policy, cache=cache, links=links, deterministic=True
    )
    times, slept = [], 0.0
    began = time.perf_counter()
    for number, (dense, ids, labels) in enumerate(loader):
        optimizer.zero_grad()
        sharded(dense, ids, labels).backward()
        optimizer.step()
        now = time.perf_counter()
        times.append(now - began)
        began = now
        if number + 1 == ITERATIONS - COUNTED:
            slept = SlowExchange.slept
    return {
        "step_ms": 1e3 * float(np.median(times[-COUNTED:])),
        "link_ms": 1e3 * (SlowExchange.slept - slept) / COUNTED,
    }


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--models", default=",".join(OVER))
    options.add_argument("--policies", default=",".join(POLICIES))
    given = options.parse_args()
    samples = ITERATIONS * WORKERS * SAMPLES
    log = ClickLog(SCALE * given.scale, samples, DIM)
    log.write()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "plan"
        log.plan(folder, WORKERS, WORKERS * SAMPLES)
        for links, rates in LINKS.items():
            for name in given.models.split(","):
                for way in given.policies.split(","):
                    answers = run(train, WORKERS, folder, log, name, way, rates)
                    found[f"{links} {name} {way}"] = {
                        "step_ms": answers[0]["step_ms"],
                        "slowest_link_ms": max(answer["link_ms"] for answer in answers),
                    }
    publish(given, {"runs": found}, lambda: _table(found))


def _table(found: dict[str, dict[str, float]]) -> Any:
    table = new_table("links", "model", "", "ms a step", "slowest link, ms", "speed-up")
    for name, figures in found.items():
        links, model, way = name.split()
        vanilla = found.get(f"{links} {model} {POLICIES[0]}", figures)
        table.add_row(
            links,
            model,
            way,
            f"{figures['step_ms']:.0f}",
            f"{figures['slowest_link_ms']:.0f}",
            f"{vanilla['step_ms'] / figures['step_ms']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
