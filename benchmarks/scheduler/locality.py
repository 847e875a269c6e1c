"""Dispatch by locality: the share of accesses that stay local, and what a training step takes.

Four ranks that are linked, plans with no extra memory and with some: of all accesses, those to rows
that the rank of the sample holds itself, as its own or as replicas, under random dispatch, in the
order of the log, and by locality, assigned exactly and in order. Then the step of a sharded
EmbeddingBagCollection on two CPU ranks, fed by a plain loop and through DispatchingLoader.

    python -m benchmarks.scheduler.locality [LOG …] [--json]
"""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Group
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import oper
from benchmarks.common import DATA, LOGS, REAL_LOGS, parser, percent, publish
from benchmarks.runtime.ranks import run
from oper.base.arrays import Ints
from oper.cli.shared.console import new_table
from oper.logs import LogOptions, RowReader, open_log, prepare
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.profiling.make_profile import profile
from oper.scheduler.dispatch import assign_blindly, assign_in_order
from oper.scheduler.loader.assigners import most_local
from oper.scheduler.loader.batch_structure import Structure
from oper.scheduler.loader.plan_rows import PlanRows
from oper.synth.log_writer import write_log
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.tables.table import IdRule

GENERATED = "generated"
NAMES = ("criteo-80k", GENERATED)
RANKS, EXTRA = 4, (0.0, 0.01, 0.05)
SAMPLES = (128, 1024)  # of a rank
GENERATED_SCALE, GENERATED_SAMPLES = 0.02, 409_600
STEP_RANKS, STEP_SAMPLES, STEPS, WARM_UP, DIMS = 2, 2048, 30, 5, (16, 64)
FEEDS = ("plain loop", "in-order", "random", "locality")


def log_of(name: str, scale: float) -> tuple[Any, Any]:
    """A log, and its tables if they are stated."""
    if name != GENERATED:
        path, options = REAL_LOGS[name]
        return open_log(LOGS / path, LogOptions.of(options)), None
    recipe = load_recipe("criteo-kaggle", scale=GENERATED_SCALE * scale)
    samples = round(GENERATED_SAMPLES * scale)
    drawn = DATA / f"criteo-kaggle-{GENERATED_SCALE * scale:g}-{samples}.parquet"
    if not drawn.exists():
        DATA.mkdir(parents=True, exist_ok=True)
        write_log(Synthesizer(recipe, samples), drawn)
    return open_log(drawn, LogOptions()), tuple(feature.table for feature in recipe.features)


def prepared(name: str, scale: float, dim: int) -> RowReader:
    """The log's rows; all tables have this dim and are trained by SGD."""
    log, tables = log_of(name, scale)
    if tables is None:
        return RowReader(log, prepare(log, dim=dim, optimizer="sgd"))
    return RowReader(log, prepare(log, [replace(t, dim=dim, optimizer="sgd") for t in tables]))


def plan_of(reader: RowReader, ranks: int, samples: int, extra: float, linked: bool) -> oper.Plan:
    """The planner's plan from the accesses of the log's whole batches of 4,096."""
    tables = [replace(table, ids=IdRule()) for table in reader.tables]  # batches have rows
    counted = profile(list(batches(reader, 4096)), tables)
    topology = oper.Topology.load(f"cpu:{ranks}")
    workload = oper.Workload("training", "raw", ranks * samples)
    if linked:
        topology = replace(topology, memory=())
    settings = oper.PlanSettings(extra_memory=extra)
    return assemble(make_placement(counted, topology, workload, settings))


def batches(reader: RowReader, size: int) -> Iterator[KeyedJaggedTensor]:
    """Whole batches of a log."""
    for batch in reader.batches(size, ids_only=True):
        if batch.samples == size:
            yield batch.to_kjt()


def local_shares(reader: RowReader, plan: oper.Plan, samples: int) -> dict[str, float]:
    """The share of local accesses by dispatch; `exact_ms` and `in_order_ms` of the assignments."""
    rows = PlanRows(plan, range(len(plan.tables)), None)
    room = np.full(RANKS, samples)
    local = dict.fromkeys(("random", "in-order", "locality", "locality, in order"), 0)
    total, replicas, seconds, number = 0, 0, {"exact": 0.0, "in_order": 0.0}, 0
    for number, ids in enumerate(batches(reader, RANKS * samples), 1):
        whole = Structure.of(ids)
        counts, everywhere = rows.counts(whole)
        total += ids.values().numel()
        replicas += everywhere
        start = time.process_time()
        exact = most_local(counts)
        middle = time.process_time()
        greedy = assign_in_order(-counts.astype(np.float64), room)
        seconds["exact"] += middle - start
        seconds["in_order"] += time.process_time() - middle
        chosen: dict[str, Ints] = {
            "random": assign_blindly("random", room, 0, number),
            "in-order": assign_blindly("in-order", room, 0, number),
            "locality": exact,
            "locality, in order": greedy,
        }
        for name, assignment in chosen.items():
            local[name] += everywhere + int(counts[np.arange(len(counts)), assignment].sum())
    found = {name: reads / total for name, reads in local.items()}
    times = {f"{name}_ms": 1e3 * spent / number for name, spent in seconds.items()}
    return {**found, "replicas": replicas / total, **times}


def step_times(rank: int, plan: oper.Plan, given: list[KeyedJaggedTensor]) -> dict[str, Any]:
    """Medians of a step's milliseconds on this rank, wall and CPU of the process, by feed."""
    group = dist.group.WORLD
    assert group is not None
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=list(t.columns)
        )
        for t in plan.tables
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    env = ShardingEnv.from_process_group(group)
    model = oper.shard(collection, plan, env=env, fused_params={"learning_rate": 0.01})
    found = {}
    for feed in FEEDS:
        loader: Any = given
        if feed != "plain loop":
            loader = oper.DispatchingLoader(given, plan, policy=feed, group=group)
        walls, cpus = [], []
        wall, cpu = time.perf_counter(), time.process_time()
        before = _remote(model)
        for ids in loader:
            output = model(ids).values()
            output.backward(torch.ones_like(output))
            now, spent = time.perf_counter(), time.process_time()
            walls.append(1e3 * (now - wall))
            cpus.append(1e3 * (spent - cpu))
            wall, cpu = now, spent
        counted = {} if feed == "plain loop" else loader.counters.to_dict()
        found[feed] = {
            "wall_ms": float(np.median(walls[WARM_UP:])),
            "cpu_ms": float(np.mean(cpus[WARM_UP:])),
            "remote_bytes": (_remote(model) - before) / len(walls),
            **counted,
        }
    return found


def _remote(model: Any) -> int:
    """Bytes of rows that this rank has read from others."""
    (counted,) = oper.counters(model).values()
    return sum(n for r, n in enumerate(counted["fetched_bytes"]) if r != dist.get_rank())


def measure_steps(scale: float) -> dict[str, Any]:
    """The step on two ranks by dim, of the slower rank; the generated log."""
    found = {}
    for dim in DIMS:
        reader = prepared(GENERATED, scale, dim)
        plan = plan_of(reader, STEP_RANKS, STEP_SAMPLES, 0.05, linked=False)
        size = max(round(STEP_SAMPLES * min(10 * scale, 1)), 8)
        every = list(batches(reader, size))[: STEPS * STEP_RANKS]
        by_rank = [every[rank::STEP_RANKS] for rank in range(STEP_RANKS)]
        results = run(_own_part, STEP_RANKS, plan, by_rank)
        found[f"dim {dim}"] = {
            feed: {name: max(result[feed][name] for result in results) for name in results[0][feed]}
            for feed in FEEDS
        }
    return found


def _own_part(rank: int, plan: oper.Plan, by_rank: list[list[KeyedJaggedTensor]]) -> Any:
    torch.set_num_threads(1)
    return step_times(rank, plan, by_rank[rank])


def tables(shares: list[dict[str, Any]], steps: dict[str, Any]) -> Any:
    """Both tables."""
    columns = ("replicas", "random", "in-order", "locality", "locality, in order")
    made = new_table("log", "m", "extra", *columns, "exact ms", "in order ms", left=1)
    for row in shares:
        made.add_row(
            row["log"],
            f"{row['samples']:,}",
            f"{percent(row['extra'], 0)}%",
            *(f"{percent(row[name], 1)}%" for name in columns),
            f"{row['exact_ms']:.2f}",
            f"{row['in_order_ms']:.2f}",
        )
    names = ("wall_ms", "cpu_ms", "remote_bytes", "gather_ms", "scoring_ms", "exchange_ms")
    second = new_table("step", "", *(name.replace("_", " ") for name in names), "MB moved", left=2)
    for dim, feeds in steps.items():
        for feed, given in feeds.items():
            times = [given.get(name) for name in names]
            moved = given.get("bytes_moved", 0) / max(given.get("batches", 1), 1)
            second.add_row(
                dim,
                feed,
                *("" if t is None else f"{t:,.0f}" if t > 1000 else f"{t:.2f}" for t in times),
                f"{moved / 1e6:.2f}",
            )
    return Group(made, second)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", default=NAMES, help=", ".join((*REAL_LOGS, GENERATED)))
    given = options.parse_args()
    shares = []
    for name in given.names:
        if name != GENERATED and not (LOGS / REAL_LOGS[name][0]).exists():
            continue
        reader = prepared(name, given.scale, 16)
        for extra in EXTRA:
            for samples in SAMPLES:
                plan = plan_of(reader, RANKS, samples, extra, linked=True)
                found = local_shares(reader, plan, samples)
                shares.append({"log": name, "samples": samples, "extra": extra, **found})
    steps = measure_steps(given.scale)
    publish(given, {"shares": shares, "steps": steps}, lambda: tables(shares, steps))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
