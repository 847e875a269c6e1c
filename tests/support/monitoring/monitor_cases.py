"""Models that are monitored while they train: what their ranks return."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv

import oper
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.tables.table import tables_of
from tests.support.torchrec.models import Model, batch, plan_tables
from tests.support.torchrec.ranks import all_optimizers, put_optimizer, train_step


def planned(group: dist.ProcessGroup) -> tuple[Any, Plan]:
    """A model of three collections, sharded by a plan of the planner's."""
    model = Model("cpu")
    put_optimizer(model, "sgd")
    plan = plan_tables(tables_of(model), dist.get_world_size(group))
    return oper.shard(model, plan, env=ShardingEnv.from_process_group(group)), plan


def trained(
    rank: int,
    group: dist.ProcessGroup,
    steps: int,
    pipeline: str | None = None,
    jsonl: Path | None = None,
    **options: Any,
) -> tuple[Profile | None, list[float]]:
    """What a monitor's ranks have after so many steps, of batches `seeds(rank, steps)`; and the
    loss-like outputs of all steps."""
    model, _ = planned(group)
    optimizer = all_optimizers(model)
    batches = [batch(seed) for seed in seeds(rank, steps)]
    outputs: list[float] = []
    with oper.monitor(model, jsonl=jsonl, **options) as monitor:
        if pipeline is None:
            outputs += [float(train_step(model, optimizer, b).sum()) for b in batches]
        else:
            made = getattr(train_pipelines, pipeline)(model, optimizer, torch.device("cpu"))
            left = iter(batches)
            outputs += [float(made.progress(left).sum()) for _ in batches]
        profile = monitor.profile()
    return profile, outputs


def seeds(rank: int, steps: int) -> list[int]:
    return [1000 * rank + step for step in range(steps)]
