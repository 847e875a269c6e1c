"""OPER's plan in the form of TorchRec's ShardingPlan, for its DistributedModelParallel."""

import logging
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from oper.base.errors import OperError
from oper.plan.plan import Plan, load_plan
from oper.torchrec import module_tables
from oper.torchrec.state_dict import row_blocks

_log = logging.getLogger(__name__)


class OperModulePlan(EmbeddingModuleShardingPlan):
    """TorchRec's plan of a module: the blocks of rows of its state dict; and OPER's plan, which
    the sharders take where they were given none."""

    oper_plan: Plan


class OperShardingPlan(ShardingPlan):
    """TorchRec's plan of a model that is sharded by `oper_plan`."""

    def __init__(self, plan: dict[str, OperModulePlan], oper_plan: Plan) -> None:
        super().__init__(plan)
        self.oper_plan = oper_plan


def torchrec_plan(plan: Plan | Path | str, module: nn.Module) -> OperShardingPlan:
    """A plan in TorchRec's form, for its DistributedModelParallel.

    It has all collections of `module`, and for each table the blocks of rows that its state dict
    will have. Raises OperError where `plan` is not for these tables.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    planned = {table.name for table in plan.tables}
    matched, names_of_model = [], set()
    for path, collection in module_tables.collections(module):
        names = [config.name for config in module_tables.configs(collection)]
        names_of_model.update(names)
        if planned.isdisjoint(names):
            _log.warning(
                "%s: the plan has none of its %d tables, and it will be data-parallel on all ranks",
                path or type(module).__name__,
                len(names),
            )
        else:
            matched.append((path, collection))
    paths = module_tables.paths_of_tables(matched)
    found: dict[str, OperModulePlan] = {}
    for path, collection in matched:
        module_tables.check_tables(plan, collection)
        content = OperModulePlan(
            (config.name, _parameter_sharding(config, plan.ranks))
            for config in module_tables.configs(collection)
        )
        content.oper_plan = plan
        found[path] = content
    if not found:
        raise OperError(
            f"{type(module).__name__}: holds no EmbeddingBagCollection or EmbeddingCollection of "
            "TorchRec's with tables of the plan: it has "
            f"{module_tables.first_names(names_of_model)}, and the plan "
            f"{module_tables.first_names(planned)}; make a plan for this model"
        )
    unused = planned.difference(paths)
    if unused:
        _log.warning(
            "%d of the plan's %d tables are not in %s (%s, …): it may be for another model",
            len(unused),
            len(plan.tables),
            type(module).__name__,
            min(unused),
        )
    return OperShardingPlan(found, plan)


def _parameter_sharding(config: Any, ranks: int) -> ParameterSharding:
    shards = [
        ShardMetadata([first, 0], [count, config.embedding_dim], f"rank:{rank}/cpu")
        for rank, (first, count) in enumerate(row_blocks(config.num_embeddings, ranks))
    ]
    return ParameterSharding(
        sharding_type=ShardingType.ROW_WISE.value,
        # Of which TorchRec's own sharders say that they have none.
        compute_kernel=EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value,
        ranks=list(range(len(shards))),
        sharding_spec=EnumerableShardingSpec(shards),
    )
