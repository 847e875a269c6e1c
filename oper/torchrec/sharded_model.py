"""Whole models: sharding by a plan, gradient accumulation, counters."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from oper.base.errors import OperError, check_type
from oper.plan.plan import Plan
from oper.runtime.comm.node import check_backend
from oper.runtime.engine import EmbeddingEngine
from oper.torchrec.model_warnings import ModelWarnings
from oper.torchrec.other_modules import check_fused
from oper.torchrec.parallel_model import ShardedModel, named_modules
from oper.torchrec.sharded_collections import (
    OperShardedEmbeddingBagCollection,
    OperShardedEmbeddingCollection,
)
from oper.torchrec.sharders import (
    OperEmbeddingBagCollectionSharder,
    OperEmbeddingCollectionSharder,
    OperSharder,
    device_for,
)
from oper.torchrec.sharding_plan import plan_of, planned_module
from oper.torchrec.told_failures import all_ranks
from oper.torchrec.torchrec_arguments import check_arguments, keywords_of


def shard(
    module: nn.Module,
    plan: Plan | Path | str,
    *,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    fused_params: Mapping[str, Any] | None = None,
    **options: Any,
) -> ShardedModel:
    """Shard a model: its tables by a plan, and its dense part data-parallel.

    `module` may be a part of a model, or a collection alone, which the result replaces in the
    model.

    `env` is TorchRec's, by default of the default process group, or of a single rank if there is
    none. `device`, the CPU unless given, gets this rank's tables and its dense part. `options` are
    the sharders'. Raises OperError if the plan is not for this model, for another number of ranks,
    or not for the device.
    """
    check_type("shard", "module", module, nn.Module)
    check_arguments("oper.shard", options, keywords_of(OperSharder))
    if env is None:
        env = (
            ShardingEnv.from_process_group(dist.group.WORLD)
            if dist.is_initialized()
            else ShardingEnv.from_local(1, 0)
        )
    if env.process_group is not None:
        check_backend(env.process_group)
    with all_ranks(env, options.get("deadline_seconds", 60.0)):
        # The sharders are made first, because they check their options quickly.
        sharders: list[ModuleSharder[Any]] = [
            OperEmbeddingBagCollectionSharder(None, fused_params, **options),
            OperEmbeddingCollectionSharder(None, fused_params, **options),
        ]
        made = planned_module(plan_of(plan), module, ModelWarnings(env.rank == 0))
        place = device_for(made.oper_plan, device).torch_device
        check_fused(module)
    model = ShardedModel(
        module,
        env=env,
        device=place,
        plan=made,
        sharders=sharders,
        init_data_parallel=env.process_group is not None,
    )
    # Without data parallelism, TorchRec leaves the dense part on its device.
    return model if env.process_group is not None else model.to(place)


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients: backward passes inside hold the tables' gradients back, and the next
    one outside takes one step with the sum of all. Use it on all ranks."""
    with ExitStack() as stack:
        for module in sharded_collections(model).values():
            stack.enter_context(module.engine.accumulate())
        yield


def counters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return this rank's counts of reads, messages and updates so far, for each sharded collection
    by its path in the user's model."""
    return {
        path: module.engine.counters.to_dict() | _of_caches(module.engine)
        for path, module in sharded_collections(model).items()
    }


def _of_caches(engine: EmbeddingEngine) -> dict[str, Any]:
    caches = engine.source.to_dict()
    return {"caches": caches} if caches else {}


def sharded_collections(model: nn.Module) -> dict[str, Any]:
    """Return the collections that OPER sharded, by their paths in the user's model."""
    modules = named_modules(model) if isinstance(model, nn.Module) else ()
    sharded = {
        path: module
        for path, module in modules
        if isinstance(module, OperShardedEmbeddingBagCollection | OperShardedEmbeddingCollection)
    }
    if not sharded:
        raise OperError(
            f"{type(model).__name__}: has no collection that OPER sharded; give the model that "
            "oper.shard or DistributedModelParallel returned"
        )
    return sharded
