"""OPER's plan in the form of TorchRec's ShardingPlan, for its DistributedModelParallel."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from oper.base.errors import OperError, check_type
from oper.plan.plan import Plan, load_plan
from oper.torchrec import module_tables
from oper.torchrec.model_warnings import ModelWarnings
from oper.torchrec.state_dict import row_blocks

_log = logging.getLogger(__name__)


class OperModulePlan(EmbeddingModuleShardingPlan):
    """TorchRec's plan of a module: the blocks of rows of its state dict; and OPER's plan, which
    the sharders take where they were given none. `warnings` are those of the whole model."""

    oper_plan: Plan
    warnings: ModelWarnings


class OperShardingPlan(ShardingPlan):
    """TorchRec's plan of a model that is sharded by `oper_plan`."""

    def __init__(self, plan: dict[str, OperModulePlan], oper_plan: Plan) -> None:
        super().__init__(plan)
        self.oper_plan = oper_plan

    def get_plan_for_module(self, module_path: str) -> ModuleShardingPlan | None:
        """The plan of a module, None where it has none. OperError where the model that asks has no
        sharder of OPER's for that module."""
        found = super().get_plan_for_module(module_path)
        if found is not None:
            _check_sharder(sys._getframe(1), module_path)
        return found


def plan_of(given: Any) -> Plan:
    """The plan that was given: one of OPER's, its folder, or its form for TorchRec."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, OperShardingPlan):
        return given.oper_plan
    if isinstance(given, str | Path):
        return load_plan(given)
    raise OperError(
        f"the plan is a {type(given).__name__}, and one of OPER's was needed, or its folder: see "
        "oper.load_plan and oper.make_plan"
    )


def torchrec_plan(plan: Plan | Path | str, module: nn.Module) -> OperShardingPlan:
    """A plan in TorchRec's form, for its DistributedModelParallel.

    It has all collections of `module`, and for each table the blocks of rows that its state dict
    will have. Raises OperError where `plan` is not for these tables.
    """
    check_type("torchrec_plan", "module", module, nn.Module)
    plan = plan_of(plan)
    return planned_module(plan, module, ModelWarnings.of_ranks(plan.ranks))


def planned_module(plan: Plan, module: nn.Module, warnings: ModelWarnings) -> OperShardingPlan:
    """The same, with the model's warnings."""
    planned = {table.name for table in plan.tables}
    matched, names_of_model, unplanned = [], set(), []
    for path, collection in module_tables.collections(module):
        names = [config.name for config in module_tables.configs(collection)]
        names_of_model.update(names)
        if planned.isdisjoint(names):
            text = (
                f"{path or type(module).__name__}: the plan has none of its {len(names)} tables, "
                "and it will be data-parallel on all ranks"
            )
            unplanned.append(text)
        else:
            module_tables.check_place(module, path)
            matched.append((path, collection))
    paths = module_tables.paths_of_tables(matched)
    found: dict[str, OperModulePlan] = {}
    for path, collection in matched:
        module_tables.check_tables(plan, collection)
        content = OperModulePlan(
            (config.name, _parameter_sharding(config, plan.ranks))
            for config in module_tables.configs(collection)
        )
        content.oper_plan, content.warnings = plan, warnings
        found[path] = content
    if not found:
        sharded = module_tables.already_sharded(module)
        if sharded and not names_of_model:
            raise OperError(f"{type(module).__name__}: {sharded.removeprefix('; ')}")
        raise OperError(
            f"{type(module).__name__}: holds no EmbeddingBagCollection or EmbeddingCollection of "
            "TorchRec's with tables of the plan: it has "
            f"{module_tables.first_names(names_of_model)}, and the plan "
            f"{module_tables.first_names(planned)}{sharded or '; make a plan for this model'}"
        )
    for text in unplanned:  # not before an error, with which nothing is sharded
        warnings.warn(_log, text, text)
    unused = planned.difference(paths)
    if unused:
        text = (
            f"{len(unused)} of the plan's {len(plan.tables)} tables are not in "
            f"{type(module).__name__} ({min(unused)}, …): it may be for another model"
        )
        warnings.warn(_log, text, text)
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


def _check_sharder(asking: FrameType, path: str) -> None:
    """OperError where the DistributedModelParallel that asks for the plan of a module has no
    sharder for it, on which TorchRec raises a KeyError of a class, or one of TorchRec's own.

    It tells its sharders to nobody, but here they are about to be looked up in its variables.
    """
    sharders = getattr(asking.f_locals.get("self"), "_sharder_map", None)
    module = asking.f_locals.get("module")
    if not isinstance(sharders, Mapping) or not isinstance(module, nn.Module):
        return
    kind, sharder = type(module), sharders.get(type(module))
    if sharder is None:
        has = f"has no sharder for {kind.__name__}"
    elif isinstance(sharder, EmbeddingBagCollectionSharder | EmbeddingCollectionSharder):
        has = f"has TorchRec's sharder for {kind.__name__}, which cannot shard by OPER's plan"
    else:
        return
    raise OperError(
        f"{path or kind.__name__!r}: DistributedModelParallel {has}; give it "
        f"sharders=[oper.Oper{kind.__name__}Sharder(), …], one for each kind of collection, or "
        "call oper.shard(model, plan)"
    )
