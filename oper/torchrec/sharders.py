"""Sharders of TorchRec's collections of tables.

    plan = oper.Plan.load("plan/")
    model = DistributedModelParallel(
        dlrm,
        sharders=[oper.OperEmbeddingBagCollectionSharder(plan)],
        plan=oper.torchrec_plan(plan, dlrm),
    )

or `model = oper.shard(dlrm, plan)`. The rest of a script stays unchanged: KeyedJaggedTensors go in
and KeyedTensors come out, optimizers are put on tables by `apply_optimizer_in_backward` or by fused
parameters, gradients are divided by the number of ranks, pipelines and checkpoints work.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.types import (
    BoundsCheckMode,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from oper.base.errors import OperError
from oper.base.units import finite_number, positive_seconds
from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Device, device_of
from oper.runtime.memory.runtime_plan import check_for_devices
from oper.runtime.tables.optimizers import check_without_effect
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.training.cached_rows import source_of
from oper.torchrec import module_tables
from oper.torchrec.model_warnings import ModelWarnings
from oper.torchrec.sharded_collections import (
    OperShardedEmbeddingBagCollection,
    OperShardedEmbeddingCollection,
)
from oper.torchrec.sharding_plan import OperModulePlan, plan_of
from oper.torchrec.table_parameters import check_hooks
from oper.torchrec.told_failures import telling_others
from oper.torchrec.torchrec_arguments import check_arguments, keywords_of


class OperSharder(BaseEmbeddingSharder):
    """Sharder of a collection by a plan of OPER.

    Args:
        plan: a plan or its folder; None takes the one that `torchrec_plan` or OperShardingPlanner
            put into TorchRec's plan.
        fused_params: the optimizer of tables that `apply_optimizer_in_backward` gave none, in
            FBGEMM's names: `optimizer`, `learning_rate`, `eps`, `beta1`, `weight_decay`, ….
        bounds: reaction to ids out of range: "fatal", or "warning" and "ignore", which read row 0;
            None: the fused parameters' `bounds_check_mode`, or fatal.
        nodes: a number for each rank, equal for ranks that share memory; None finds out.
        deadline_seconds: longest wait of a rank for another.
        check_gradients: look for NaN in gradients, and name the feature.
        cache: each rank's cache of the tier's tables; None: 10 % of their bytes, synchronised on
            demand.
        spare: extra rows to reserve per rank, on devices, for migration to later plans, as a share
            of the largest rank's rows. CPU ranks grow by themselves.
        deterministic: equal runs must give equal bits. CPU ranks always do, because every sum has
            one order: there False makes nothing faster.
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
        cache: CacheSettings | None = None,
        spare: float = 0.0,
        deterministic: bool = True,
        **others: Any,
    ) -> None:
        check_arguments(type(self).__name__, others, keywords_of(OperSharder))
        if qcomm_codecs_registry:
            raise OperError(
                "qcomm_codecs_registry: OPER does not quantise what travels; leave it out"
            )
        fused_params = dict(fused_params or {})
        _check_types(fused_params)
        if cache is not None and not isinstance(cache, CacheSettings):
            raise OperError(
                f"cache: expected oper.CacheSettings, got a {type(cache).__name__}: give for "
                "example oper.CacheSettings('10%')"
            )
        super().__init__(fused_params)
        self._plan, self._cache = plan, cache
        self._options: dict[str, Any] = {
            "bounds": bounds or _bounds(fused_params.get("bounds_check_mode")),
            "nodes": nodes,
            "deadline_seconds": positive_seconds(deadline_seconds, "deadline_seconds"),
            "check_gradients": check_gradients,
            "spare": finite_number(spare, "spare"),
        }
        if spare < 0:
            raise OperError(f"spare: expected a share of at least 0, got {spare:g}")

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that TorchRec's own planner may put into a plan, which are
        ignored."""
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the weight of each table by its name."""
        return module_tables.parameters(module)

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Put the module's rows at their places in the plan; raise OperError if it is for other
        tables."""
        engine = self._engine(module, params, env, device, module_fqn or "")
        return self._sharded(module, engine, env.process_group)

    @property
    def module_type(self) -> type[nn.Module]:
        """Class of the collections that DistributedModelParallel passes to this sharder."""
        return self._unsharded

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """Class of the collections that `shard` returns."""
        return self._sharded

    def _engine(
        self, module: Any, params: Any, env: ShardingEnv, device: torch.device | None, path: str
    ) -> EmbeddingEngine:
        _check_environment(env)
        with telling_others(env, self._options["deadline_seconds"]):
            plan = self._plan if self._plan is not None else getattr(params, "oper_plan", None)
            if plan is None:
                raise OperError(
                    f"{type(self).__name__}: no plan; give it one, or make TorchRec's plan by "
                    "oper.torchrec_plan or oper.OperShardingPlanner"
                )
            plan = plan_of(plan)
            if not isinstance(params, OperModulePlan):
                module_tables.check_path(path)
                module_tables.check_places_of_tables(module, [(path, module)])
                _check_planned(params)
            check_hooks(module, module_tables.parameters(module))
            placed_on = device_for(plan, device)
            warnings = getattr(params, "warnings", None) or ModelWarnings(env.rank == 0)
            part, tables = module_tables.match_tables(plan, module, self.fused_params, warnings)
            if self._cache is not None and not plan.tier:
                raise OperError(
                    "cache: the plan has no tables in the tier; leave it out, or plan with a tier"
                )
        bags = isinstance(module, EmbeddingBagCollection)
        return EmbeddingEngine(
            part,
            tables,
            group=env.process_group,
            weighted=bags and module.is_weighted(),
            gradient_scale=None if get_gradient_division() else 1.0,
            make_source=source_of(self._cache or CacheSettings()),
            device=placed_on,
            **self._options,
        )


class OperEmbeddingBagCollectionSharder(OperSharder):
    __doc__ = OperSharder.__doc__
    _unsharded, _sharded = EmbeddingBagCollection, OperShardedEmbeddingBagCollection


class OperEmbeddingCollectionSharder(OperSharder):
    __doc__ = OperSharder.__doc__
    _unsharded, _sharded = EmbeddingCollection, OperShardedEmbeddingCollection


def _check_types(fused_params: Mapping[str, Any]) -> None:
    check_without_effect(fused_params)
    output = fused_params.get("output_dtype")
    output = getattr(output, "name", output)
    if output not in (None, "FP32"):
        raise OperError(f"output_dtype {output}: outputs are FP32; leave it out")
    if "weights_precision" in fused_params:
        raise OperError("weights_precision: give a table's dtype as data_type in its config")


def _bounds(mode: Any) -> str:
    """Return the `bounds` of FBGEMM's BoundsCheckMode; NONE is 'ignore': ids out of range read row
    0."""
    if mode is not None and not isinstance(mode, BoundsCheckMode):
        raise OperError(
            f"bounds_check_mode: expected one of FBGEMM's BoundsCheckMode, got {mode!r}; or give "
            'bounds="fatal", "warning" or "ignore"'
        )
    name = "fatal" if mode is None else mode.name.lower().removeprefix("v2_")
    return "ignore" if name == "none" else name


def device_for(plan: Plan, given: torch.device | str | None) -> Device:
    """Return the device for the tables, by default the CPU; raise OperError if it is unusable, or
    the plan is not for it."""
    device = device_of(given)
    if device.kind != "cpu":
        check_for_devices(plan, str(device.torch_device))
    return device


def _check_planned(params: Mapping[str, ParameterSharding]) -> None:
    """Raise OperError if a plan of TorchRec's own planner has a setting that only its kernels
    use."""
    for table, planned in params.items():
        for setting, remedy in _NOT_READ.items():
            value = getattr(planned, setting, None)
            if value is not None:
                raise OperError(
                    f"table {table!r}: expected a plan without {setting}, got {value!r}: {remedy}"
                )


_NOT_READ = {
    "bounds_check_mode": "give the sharder bounds= or fused_params",
    "cache_params": "plan with a tier and give the sharder cache=oper.CacheSettings(…)",
    "enforce_hbm": "leave it out of the planner's constraints",
    "key_value_params": "leave the table to a sharder of TorchRec's",
    "output_dtype": "leave it out of the planner's constraints, because outputs are FP32",
    "stochastic_rounding": "give the sharder fused_params",
}


def _check_environment(env: ShardingEnv) -> None:
    if isinstance(env, ShardingEnv2D) or env.output_dtensor:
        raise OperError(
            "2D parallelism and DTensor state dicts are not supported; use a ShardingEnv of one "
            "process group"
        )
