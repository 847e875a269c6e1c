"""What bounded staleness (HET) costs in AUC and saves in communication, in real training.

Wide & Deep, DeepFM and DCN on a labelled generated log of Criteo-Kaggle's tables, one epoch in the
order of the log, SGD, all tables in the tier; the last samples are held out. Communication is in
bytes of rows and gradients between caches and the tier, against a training without caches (each
worker pulls every row of its batch and pushes every gradient). Each seed is another log and another
initial model; AUCs are compared with `het-exact:0`, which is exact, of the same model and seed.

    python -m benchmarks.scheduler.staleness [--models wide-deep,deepfm,dcn] [--seeds 0,1,2]
        [--sync het-exact:0,het,het-exact:100]
"""

import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import rankdata
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import oper
from benchmarks.common import parser, percent, publish
from benchmarks.runtime.ranks import run
from benchmarks.scheduler.click_log import ClickLog
from benchmarks.scheduler.click_models import OVER, ClickModel
from oper.cli.shared.console import new_table

WORKERS, SAMPLES, DIM = 4, 512, 16
SCALE, LOG_SAMPLES, HELD_OUT = 0.1, 5_242_880, 0.05
# The best of 1, 4 and 16 on a tenth of the log; DeepFM diverges at 16.
TABLE_RATES = {"wide-deep": 16.0, "deepfm": 1.0, "dcn": 16.0}
LAYER_RATE = 0.1
CACHE = "10%"
EXACT = "het-exact:0"


def train(
    rank: int, folder: Path, log: ClickLog, name: str, sync: str, evict: str
) -> dict[str, Any]:
    """One epoch; the held-out AUC and what was moved."""
    arrays = log.open()
    model = ClickModel(name, log.tables, 1 + log.seed)
    apply_optimizer_in_backward(
        torch.optim.SGD, model.embeddings.parameters(), {"lr": TABLE_RATES[name]}
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    cache = oper.CacheSettings(CACHE, sync, evict)
    sharded = oper.shard(model, folder, env=env, cache=cache)
    layers = dict(in_backward_optimizer_filter(sharded.named_parameters())).values()
    optimizer = torch.optim.SGD(layers, lr=LAYER_RATE)
    size = WORKERS * SAMPLES
    steps = int(len(arrays.labels) * (1 - HELD_OUT)) // size
    began = time.perf_counter()
    for step in range(steps):
        batch = arrays.batch(step * size + rank * SAMPLES, SAMPLES)
        optimizer.zero_grad()
        sharded(batch.dense, batch.ids, batch.labels).backward()
        optimizer.step()
    seconds = (time.perf_counter() - began) / steps
    moved = next(iter(oper.counters(sharded).values()))["caches"]
    sharded.eval()
    found, labels = [], []
    with torch.no_grad():
        first = steps * size + rank * SAMPLES
        for at in range(first, len(arrays.labels) - SAMPLES, size):
            batch = arrays.batch(at, SAMPLES)
            found.append(sharded(batch.dense, batch.ids))
            labels.append(batch.labels)
    counts = [None] * WORKERS
    dist.all_gather_object(counts, (torch.cat(found), torch.cat(labels)))
    logits, clicked = (torch.cat(parts).numpy() for parts in zip(*counts, strict=True))
    return {
        "auc": _auc(logits, clicked),
        "bytes": sum(moved["pull_bytes"]) + sum(moved["push_bytes"]),
        # Every read pulled and every update pushed, of float32 rows without state.
        "bytes_without_caches": 2 * 4 * DIM * sum(moved["reads"]),
        "wrong_reads": sum(moved["wrong_reads"]) / sum(moved["reads"]),
        "most_lag": max(moved["lag"]),
        "step_ms": 1e3 * seconds,
    }


def _auc(scores: Any, clicked: Any) -> float:
    """The area under the curve, by ranks."""
    ranks, positive = rankdata(scores), clicked > 0.5
    count = int(positive.sum())
    total = float(ranks[positive].sum()) - count * (count + 1) / 2
    return total / (count * (len(clicked) - count))


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--models", default=",".join(OVER))
    options.add_argument("--sync", default=f"{EXACT},het,het-exact:10,het-exact:100,het-exact:inf")
    options.add_argument("--seeds", default="0")
    options.add_argument("--evict", default="lru")
    given = options.parse_args()
    found: list[dict[str, Any]] = []
    for seed in map(int, given.seeds.split(",")):
        log = ClickLog(SCALE * given.scale, round(LOG_SAMPLES * given.scale), DIM, seed)
        log.write()
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "plan"
            log.plan(folder, WORKERS, WORKERS * SAMPLES)
            for model, sync in product(given.models.split(","), given.sync.split(",")):
                arguments = (folder, log, model, sync, given.evict)
                answers = run(train, WORKERS, *arguments, deadline_seconds=3600.0)
                found.append({"model": model, "seed": seed, "sync": sync, **answers[0]})
    publish(given, {"runs": found}, lambda: _table(found))


def _table(found: list[dict[str, Any]]) -> Any:
    exact = {(of["model"], of["seed"]): of["auc"] for of in found if of["sync"] == EXACT}
    columns = ("AUC", "against exact", "bytes", "of no cache", "wrong", "lag", "ms")
    table = new_table("model, seed, sync", *columns)
    for figures in found:
        auc = exact.get((figures["model"], figures["seed"]))
        table.add_row(
            f"{figures['model']} {figures['seed']} {figures['sync']}",
            f"{figures['auc']:.5f}",
            f"{100 * (figures['auc'] / auc - 1):+.3f} %" if auc else "-",
            f"{figures['bytes'] / 1e9:.2f} GB",
            f"{percent(figures['bytes'] / figures['bytes_without_caches'], 1)} %",
            f"{percent(figures['wrong_reads'], 1)} %",
            str(figures["most_lag"]),
            f"{figures['step_ms']:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
