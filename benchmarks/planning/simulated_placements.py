"""What is simulated: a log in memory with its profile, and placements of OPER's and TorchRec's.

OPER's placement is that of `oper.make_plan`; TorchRec's comes from its own planner, asked as
`oper compare` asks it, with the bytes and the vectors that its shards really move. Both are priced
by the cost model beside it, which the simulator knows nothing of.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import oper
from benchmarks.planning.simulator.log import Log
from benchmarks.planning.simulator.placement import Fetch, Part, Placement, of_layout, whole_table
from oper.cost.workload import Fetch as Fetched
from oper.cost.workload import usual_fetch
from oper.logs.batches.batch import Batch
from oper.planner.baselines.baseline import NoPlacementError, Status, price_baseline
from oper.planner.baselines.torchrec_planner import (
    Shard,
    ask,
    placement_of,
    read_shards,
    request,
)
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import by_devices
from oper.planner.problem.problem import make_problem
from oper.profiling.profile import Profile
from oper.synth.recipes import Recipe, load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.tables.table import Table
from oper.topology.topology import Topology

ZIPF = 1.05
DIM = 64
LOG_IDS = 1 << 18  # of each table, at least
LIMIT_SECONDS = 120.0
FETCHES: tuple[Fetched, ...] = ("pooled", "auto")
Answer = dict[str, Any]  # of TorchRec's planner


@dataclass(frozen=True)
class Case:
    """A topology, a mode and its global batch, and what plans may hold."""

    topology: Topology
    workload: oper.Workload
    settings: oper.PlanSettings


@dataclass(frozen=True)
class Method:
    """A placement by its name, and the step that is predicted; of TorchRec's the iteration."""

    name: str
    placement: Placement
    predicted_seconds: float


def make_log(scale: float, bag: int, samples: int) -> tuple[Recipe, Log, Profile]:
    """Criteo-Kaggle's tables at a scale of their rows, with bags of so many ids: a log of `samples`
    at least, to be replayed, and the counts of twice as many others."""
    published = load_recipe("criteo-kaggle", scale=scale, zipf=ZIPF, dim=DIM)
    features = tuple(replace(feature, ids=bag) for feature in published.features)
    return _log_of(replace(published, features=features), max(3 * samples, LOG_IDS // bag), samples)


def make_meta_log(scale: float, samples: int) -> tuple[Recipe, Log, Profile]:
    """The same of meta-2021's tables, with its own laws and lengths of bags."""
    return _log_of(load_recipe("meta-2021", scale=scale, dim=DIM), 3 * samples, samples)


def _log_of(recipe: Recipe, total: int, samples: int) -> tuple[Recipe, Log, Profile]:
    made = Synthesizer(recipe, total)
    stream = made.batches()
    replayed = itertools.islice(stream, -(-samples // made.batch_samples))
    log = Log.of(replayed, [table.name for table in recipe.tables])
    return recipe, log, oper.profile(map(_as_torchrec, stream), list(recipe.tables))


def _as_torchrec(batch: Batch) -> object:
    """A batch of the log as TorchRec has it."""
    import torch
    from torchrec import KeyedJaggedTensor

    values, lengths = [], []
    for ids in batch.features.values():
        values.append(ids.values)
        lengths.append(np.diff(ids.offsets()).astype(np.int32))
    return KeyedJaggedTensor(
        list(batch.features),
        torch.from_numpy(np.concatenate(values).astype(np.int64)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )


def methods(profile: Profile, case: Case, bag: int, planners: Sequence[str]) -> Iterator[Method]:
    """Yield OPER's plan, those with all tables pooled and with some if bags have several ids, and
    TorchRec's, as far as they are among the `planners`."""
    if "oper" in planners:
        distinct = replace(case.workload, fetch=usual_fetch(case.topology.nodes))
        yield oper_method("oper", profile, replace(case, workload=distinct))
        if bag > 1 and case.topology.nodes > 1:
            for fetch in FETCHES:
                workload = replace(case.workload, fetch=fetch)
                yield oper_method(f"oper, {fetch}", profile, replace(case, workload=workload))
    if "torchrec" in planners and (found := torchrec_placement(profile, case)):
        yield found


def oper_method(name: str, profile: Profile, case: Case) -> Method:
    """OPER's plan, with the step that it predicts."""
    plan = oper.make_plan(profile, case.topology, case.workload, case.settings)
    assert plan.step_time is not None
    return Method(name, oper_placement(plan), plan.step_time.seconds)


def whole_tables(tables: Sequence[Table], mode: str) -> list[Part]:
    """The tables, all rows on rank 0."""
    return [
        whole_table(t, table, mode, Fetch.RAW, np.zeros(table.rows, dtype=np.int32))
        for t, table in enumerate(tables)
    ]


def oper_placement(plan: oper.Plan) -> Placement:
    """The placement of a plan."""
    fetch = Fetch.RAW if plan.workload.known_fetch == "raw" else Fetch.DISTINCT
    mode, method = plan.workload.mode, plan.allreduce_method
    return of_layout(plan.layout, plan.tables, mode, fetch, method, plan.pooled_tables)


def asked_in_a_process(asked: dict[str, Any]) -> Answer:
    """Return the answer of TorchRec's planner, within LIMIT_SECONDS."""
    return ask(asked, LIMIT_SECONDS)


def asked_here(asked: dict[str, Any]) -> Answer:
    """Return the answer of TorchRec's planner, called here: starting a process for each call takes
    longer than the calls."""
    from oper.planner.baselines.torchrec_process import make_module, plan_once

    found = plan_once(asked, make_module(asked["tables"]), 1.0)
    if found is None:
        raise NoPlacementError(Status.INFEASIBLE, "TorchRec's planner finds no plan")
    return found


def torchrec_placement(
    profile: Profile,
    case: Case,
    answer_of: Callable[[dict[str, Any]], Answer] = asked_in_a_process,
) -> Method | None:
    """Return TorchRec's own plan by the answer of its planner; None if that finds none in time."""
    problem = make_problem(profile, case.topology, case.workload, case.settings)
    if by_devices(case.topology, case.settings):
        limits = DeviceLimits.of(problem)
        problem = limits.within(limits.most_extra)
    try:
        answer = answer_of(request(problem))
    except NoPlacementError:
        return None
    baseline, shards = placement_of(problem, answer), read_shards(answer["shards"], profile)
    sets, cost = baseline.holder_sets, price_baseline(problem, baseline)
    parts = list(shard_parts(shards, profile, case.workload.mode, problem.ranks))
    placed = Placement(sets.source.astype(np.int64), sets.holds, parts, "dense")
    return Method("torchrec", placed, cost.objective_seconds)


def shard_parts(shards: Sequence[Shard], profile: Profile, mode: str, ranks: int) -> Iterator[Part]:
    """The parts of a placement that shards are: a new one where rows begin again."""
    how: dict[str, Fetch] = {
        "data_parallel": Fetch.RAW,
        "table_row_wise": Fetch.POOLED_BY_RANK_AND_NODE,
        "grid_shard": Fetch.POOLED_BY_RANK_AND_NODE,
    }
    parts: list[tuple[Shard, np.ndarray]] = []
    for shard in shards:
        begin = int(profile.offsets[shard.table])
        if shard.first == begin and shard.last > begin:
            parts.append((shard, np.zeros(profile.tables[shard.table].rows, dtype=np.int32)))
        rows = slice(shard.first - begin, shard.last - begin)
        parts[-1][1][rows] = ranks if shard.rank < 0 else shard.rank
    for shard, holder_set in parts:
        table = replace(profile.tables[shard.table], dim=shard.columns)
        fetch = how.get(shard.sharding, Fetch.POOLED_BY_RANK)
        yield whole_table(shard.table, table, mode, fetch, holder_set)
