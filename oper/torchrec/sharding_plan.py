"""OPER's plan in the form of TorchRec's ShardingPlan, for DistributedModelParallel."""

import logging
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from oper.base.errors import OperError, check_type
from oper.checkpoint.row_blocks import row_blocks
from oper.plan.plan import Plan
from oper.torchrec import module_tables, other_modules
from oper.torchrec.model_warnings import ModelWarnings

_log = logging.getLogger(__name__)


class OperModulePlan(EmbeddingModuleShardingPlan):
    """TorchRec's plan of a module, the blocks of rows of its state dict; and OPER's plan, for
    sharders that were given none. `warnings` are those of the whole model."""

    oper_plan: Plan
    warnings: ModelWarnings


class OperShardingPlan(ShardingPlan):
    """TorchRec's plan of a model that is sharded by `oper_plan`."""

    def __init__(self, plan: dict[str, OperModulePlan], oper_plan: Plan) -> None:
        super().__init__(plan)
        self.oper_plan = oper_plan


def plan_of(given: Any) -> Plan:
    """Return OPER's plan from a plan, its folder, or its form for TorchRec."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, OperShardingPlan):
        return given.oper_plan
    if isinstance(given, str | Path):
        return Plan.load(given)
    raise OperError(
        f"the plan: expected one of OPER's, or its folder, got a {type(given).__name__}: see "
        "oper.Plan.load and oper.make_plan"
    )


def torchrec_plan(plan: Plan | Path | str, module: nn.Module) -> OperShardingPlan:
    """Return a plan in TorchRec's form, for its DistributedModelParallel.

    It has all collections of `module`, and for each table the blocks of rows that its state dict
    will have. DistributedModelParallel needs a sharder of OPER's for each kind of collection:
    without one it raises a KeyError of the collection's class, and TorchRec's own sharders a
    ValueError that names OPER's. `oper.shard` gives it both.

    Raises:
        OperError: `plan` is not for these tables, or a table's collection lies in a module that
            maps its ids.
    """
    check_type("torchrec_plan", "module", module, nn.Module)
    plan = plan_of(plan)
    return planned_module(plan, module, ModelWarnings.of_ranks(plan.ranks))


def planned_module(plan: Plan, module: nn.Module, warnings: ModelWarnings) -> OperShardingPlan:
    """Make the plan that `torchrec_plan` returns; `warnings` are those of the model."""
    planned = {table.name for table in plan.tables}
    matched, names_of_model, unplanned = [], set(), []
    for path, collection in module_tables.collections(module):
        names = [config.name for config in module_tables.configs(collection)]
        names_of_model.update(names)
        if planned.isdisjoint(names):
            text = (
                f"{path or type(module).__name__}: the plan has none of its {len(names)} tables "
                f"({module_tables.first_names(names)}), and it will be data-parallel on all ranks: "
                "plan for all tables of the model, or leave it so if every rank can hold them"
            )
            unplanned.append(text)
        else:
            module_tables.check_place(module, path)
            matched.append((path, collection))
    paths = module_tables.paths_of_tables(matched)
    module_tables.check_places_of_tables(module, matched)
    plans: dict[str, OperModulePlan] = {}
    for path, collection in matched:
        module_tables.check_tables(plan, collection)
        content = OperModulePlan(
            (config.name, _parameter_sharding(type(collection), config, plan.ranks))
            for config in module_tables.configs(collection)
        )
        content.oper_plan, content.warnings = plan, warnings
        plans[path] = content
    other_modules.check_others(module, planned)
    if not names_of_model:
        raise OperError(
            f"{type(module).__name__}: holds no EmbeddingBagCollection or EmbeddingCollection of "
            f"TorchRec's, which OPER shards{other_modules.instead(module)}"
        )
    if not plans:
        raise OperError(
            f"{type(module).__name__}: the plan has none of its tables: it has "
            f"{module_tables.first_names(names_of_model)}, and the plan "
            f"{module_tables.first_names(planned)}; make a plan for this model"
        )
    for text in unplanned:  # after all errors, with which the model stays unsharded
        warnings.warn_of_script(text)
    unused = planned.difference(paths)
    if unused:
        text = (
            f"{len(unused)} of the plan's {len(plan.tables)} tables are not in "
            f"{type(module).__name__} ({min(unused)}, …): it may be for another model"
        )
        warnings.warn(_log, text, text)
    return OperShardingPlan(plans, plan)


def _parameter_sharding(kind: type[nn.Module], config: Any, ranks: int) -> ParameterSharding:
    shards = [
        ShardMetadata([first, 0], [count, config.embedding_dim], f"rank:{rank}/cpu")
        for rank, (first, count) in enumerate(row_blocks(config.num_embeddings, ranks))
    ]
    return ParameterSharding(
        sharding_type=ShardingType.ROW_WISE.value,
        # TorchRec's own sharders refuse an unknown kernel with its name: this name is that of the
        # sharder to use instead.
        compute_kernel=f"oper.Oper{kind.__name__}Sharder",
        ranks=list(range(len(shards))),
        sharding_spec=EnumerableShardingSpec(shards),
    )
