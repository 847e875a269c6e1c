"""OPER in a TorchRec script: sharders for its collections of tables.

    plan = oper.load_plan("plan/")
    model = DistributedModelParallel(
        dlrm,
        sharders=[oper.OperEmbeddingBagCollectionSharder(plan)],
        plan=oper.torchrec_plan(plan, dlrm),
    )

or `model = oper.shard(dlrm, plan)`. Nothing else of a script changes: KeyedJaggedTensors go in and
KeyedTensors come out, optimizers are put on tables by `apply_optimizer_in_backward` or by fused
parameters, gradients are divided by the number of ranks, pipelines and checkpoints work.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from oper.base.errors import OperError
from oper.plan.plan import Plan, load_plan
from oper.runtime.comm.group import Group
from oper.runtime.engine import EmbeddingEngine
from oper.torchrec import module_tables
from oper.torchrec.sharded_modules import (
    OperShardedEmbeddingBagCollection,
    OperShardedEmbeddingCollection,
)
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


class _OperSharder(BaseEmbeddingSharder):
    """Shards a collection by a plan of OPER's.

    Args:
        plan: a plan or its folder; None takes the one that `torchrec_plan` or OperShardingPlanner
            put into TorchRec's plan.
        fused_params: the optimizer of tables that `apply_optimizer_in_backward` gave none, in
            FBGEMM's names: `optimizer`, `learning_rate`, `eps`, `beta1`, `weight_decay`, ….
        bounds: what ids out of range do: "fatal", or "warning" and "ignore", which read row 0;
            None: the fused parameters' `bounds_check_mode`, or fatal.
        nodes: which ranks share memory, a number for each; None finds out.
        deadline_seconds: how long a rank waits for another.
        check_gradients: look for NaN in gradients, and name the feature.
        deterministic: whether equal runs must give equal bits. CPU ranks always do, as every sum
            has one order: False makes nothing faster.
    """

    _unsharded: type[nn.Module]
    _sharded: type[nn.Module]

    def __init__(
        self,
        plan: Plan | Path | str | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        *,
        bounds: str | None = None,
        nodes: Sequence[int] | None = None,
        deadline_seconds: float = 60.0,
        check_gradients: bool = False,
        deterministic: bool = True,
    ) -> None:
        if qcomm_codecs_registry:
            raise OperError(
                "qcomm_codecs_registry: OPER does not quantise what travels; leave it out"
            )
        fused_params = dict(fused_params or {})
        _check_types(fused_params)
        super().__init__(fused_params)
        self._plan = plan
        self._options: dict[str, Any] = {
            "bounds": bounds or _bounds(fused_params.get("bounds_check_mode")),
            "nodes": nodes,
            "deadline_seconds": deadline_seconds,
            "check_gradients": check_gradients,
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """What TorchRec's own planner may put into a plan for us, which we do not read."""
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The weight of each table by its name."""
        return module_tables.parameters(module)

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Put the module's rows where the plan says. OperError where it is not a plan for them."""
        engine = self._engine(module, params, env, device)
        return self._sharded(module, engine, env.process_group)

    @property
    def module_type(self) -> type[nn.Module]:
        """What DistributedModelParallel is to hand to this sharder."""
        return self._unsharded

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """What comes back."""
        return self._sharded

    def _engine(
        self, module: Any, params: Any, env: ShardingEnv, device: torch.device | None
    ) -> EmbeddingEngine:
        plan = self._plan if self._plan is not None else getattr(params, "oper_plan", None)
        if plan is None:
            raise OperError(
                f"{type(self).__name__}: no plan; give it one, or make TorchRec's plan by "
                "oper.torchrec_plan or oper.OperShardingPlanner"
            )
        if not isinstance(plan, Plan):
            plan = load_plan(plan)
        _check_environment(env, device)
        part, tables = module_tables.match_tables(plan, module, self.fused_params)
        bags = isinstance(module, EmbeddingBagCollection)
        return EmbeddingEngine(
            part,
            tables,
            group=env.process_group,
            weighted=bags and module.is_weighted(),
            gradient_scale=None if get_gradient_division() else 1.0,
            **self._options,
        )


class OperEmbeddingBagCollectionSharder(_OperSharder):
    __doc__ = _OperSharder.__doc__
    _unsharded, _sharded = EmbeddingBagCollection, OperShardedEmbeddingBagCollection


class OperEmbeddingCollectionSharder(_OperSharder):
    __doc__ = _OperSharder.__doc__
    _unsharded, _sharded = EmbeddingCollection, OperShardedEmbeddingCollection


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
            f"TorchRec's with tables of the plan: it has {_some(names_of_model)}, and the plan "
            f"{_some(planned)}; make a plan for this model"
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


def shard(
    module: nn.Module,
    plan: Plan | Path | str,
    *,
    env: ShardingEnv | None = None,
    fused_params: Mapping[str, Any] | None = None,
    **options: Any,
) -> DistributedModelParallel:
    """A model with its tables placed by a plan, and its dense part data-parallel.

    `env` is TorchRec's, by default of the default process group, or of one rank alone where there
    is none. `options` are the sharders'. Raises OperError where the plan is not for this model,
    or for another number of ranks.
    """
    known = {
        p.name for p in signature(_OperSharder).parameters.values() if p.kind == p.KEYWORD_ONLY
    }
    if unknown := options.keys() - known:
        raise OperError(f"oper.shard has no option {min(unknown)!r}; it has {_some(known, 9)}")
    if env is None:
        env = (
            ShardingEnv.from_process_group(dist.group.WORLD)
            if dist.is_initialized()
            else ShardingEnv.from_local(1, 0)
        )
    with _all_ranks(env, options.get("deadline_seconds", 60.0)):
        made = torchrec_plan(plan, module)
    return DistributedModelParallel(
        module,
        env=env,
        device=torch.device("cpu"),
        plan=made,
        sharders=[
            OperEmbeddingBagCollectionSharder(None, fused_params, **options),
            OperEmbeddingCollectionSharder(None, fused_params, **options),
        ],
        init_data_parallel=env.process_group is not None,
    )


@contextmanager
def _all_ranks(env: ShardingEnv, deadline_seconds: float) -> Iterator[None]:
    """Ends when all ranks have come to its end, or one has failed in it. DistributedModelParallel
    begins with a broadcast that has no deadline."""
    if env.process_group is None or env.world_size == 1:
        yield
        return
    group = Group(env.process_group, deadline_seconds)
    try:
        yield
    except BaseException as error:
        group.fail(error)
        raise
    group.gather(b"1", "come to shard the model")


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Gradient accumulation: backward passes inside hold the tables' gradients back, and the next
    one outside takes one step with the sum of all. To be used on all ranks alike."""
    with ExitStack() as stack:
        for module in _sharded_collections(model).values():
            stack.enter_context(module.engine.accumulate())
        yield


def counters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What this rank read, sent and updated so far, of each sharded collection by its path in the
    user's model."""
    return {
        path: module.engine.counters.to_dict()
        for path, module in _sharded_collections(model).items()
    }


def _some(names: Collection[str], most: int = 4) -> str:
    first = ", ".join(sorted(names)[:most]) or "none"
    return first + (", …" if len(names) > most else "")


def _sharded_collections(model: nn.Module) -> dict[str, Any]:
    found = {
        path: module
        for path, module in get_unwrapped_module(model).named_modules()
        if isinstance(module, OperShardedEmbeddingBagCollection | OperShardedEmbeddingCollection)
    }
    if not found:
        raise OperError(
            f"{type(model).__name__}: has no collection that OPER sharded; give the model that "
            "oper.shard or DistributedModelParallel returned"
        )
    return found


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


def _check_types(fused_params: Mapping[str, Any]) -> None:
    output = fused_params.get("output_dtype")
    if output is not None and output.name != "FP32":
        raise OperError(f"output_dtype {output.name}: outputs are FP32; leave it out")
    if "weights_precision" in fused_params:
        raise OperError("weights_precision: give a table's dtype as data_type in its config")


def _bounds(mode: Any) -> str:
    """FBGEMM's BoundsCheckMode in our words; without its checks ids out of range read row 0 too."""
    name = "fatal" if mode is None else mode.name.lower().removeprefix("v2_")
    return "ignore" if name == "none" else name


def _check_environment(env: ShardingEnv, device: torch.device | None) -> None:
    if isinstance(env, ShardingEnv2D) or env.output_dtensor:
        raise OperError(
            "2D parallelism and DTensor state dicts are not supported; use a ShardingEnv of one "
            "process group"
        )
    if device is not None and device.type != "cpu":
        raise OperError(
            f"device {device}: tables are on CPU ranks; give DistributedModelParallel device cpu"
        )
