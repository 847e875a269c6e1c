"""OperShardingPlanner: TorchRec's EmbeddingShardingPlanner, with OPER's plans.

    planner = oper.OperShardingPlanner(topology, profile, batch_size=1024)
    sharders = [oper.OperEmbeddingBagCollectionSharder(fused_params=...)]
    plan = planner.collective_plan(dlrm, sharders)
    model = DistributedModelParallel(dlrm, plan=plan, sharders=sharders)

It has the interface of TorchRec's planner and plans the same model. Instead of pooling factors it
takes a profile, which has the number of accesses to each row.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.types import Topology as TorchRecTopology
from torchrec.distributed.types import ModuleSharder, ShardingPlanner

from oper.base.errors import OperError
from oper.base.formatting import plural
from oper.cost.workload import Fetch, Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_plan import place_fetched
from oper.planner.reference_figures import with_reference_figures
from oper.profiling.profile import Profile
from oper.tables.table import Table, tables_of
from oper.topology.topology import Topology
from oper.torchrec import module_tables, other_modules
from oper.torchrec.model_warnings import ModelWarnings
from oper.torchrec.planning.planner_inputs import profile_of, topology_of
from oper.torchrec.planning.planner_statistics import planner_statistics
from oper.torchrec.sharders import OperSharder
from oper.torchrec.sharding_plan import OperShardingPlan, planned_module
from oper.torchrec.torchrec_arguments import check_arguments, keywords_of

_log = logging.getLogger("oper.runtime.torchrec_planner")  # a public name: docs/torchrec.md


class OperShardingPlanner(ShardingPlanner):
    """Planner of the place of each row of a model's tables.

    Args:
        topology: OPER's Topology, its name or file (`cpu:4`), or TorchRec's, which is refused for
            compute_device "cuda" on several nodes with fetch "raw"; None: the ranks of the default
            process group, on CPUs of one host.
        profile: a profile or its folder; it must have all tables of the model, by name and rows.
        batch_size: samples per iteration of one rank, like in TorchRec's planners; 512 unless
            given. `Workload` and `oper plan --batch-size` count the samples of all ranks.
        constraints: TorchRec's, by table. They are ignored, with a warning: the profile has their
            information, or OPER cannot keep them.
        mode, fetch: see Workload; fetch is raw on one node and auto on several, unless given:
            tables are pooled if that makes the step shorter by `oper.base.defaults.POOLED_GAIN`.
            "distinct" pools none.
        settings: extra memory, threshold and aim of the plan.
    """

    def __init__(
        self,
        topology: Topology | TorchRecTopology | Path | str | None = None,
        profile: Profile | Path | str | None = None,
        *,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        settings: PlanSettings | None = None,
        mode: Literal["training", "inference"] = "training",
        fetch: Fetch | None = None,
        **others: Any,
    ) -> None:
        check_arguments("OperShardingPlanner", others, keywords_of(OperShardingPlanner))
        if profile is None:
            raise OperError(
                "OperShardingPlanner: no profile; count one with `oper profile` or oper.profile"
            )
        self._topology = topology_of(topology)
        self._profile = profile if isinstance(profile, Profile) else Profile.load(profile)
        self._workload = Workload(mode, fetch, (batch_size or BATCH_SIZE) * self._topology.ranks)
        if isinstance(topology, TorchRecTopology) and topology.compute_device == "cuda":
            _check_for_devices(self._workload, self._topology)
        self._settings = settings or PlanSettings()
        _warn_of_constraints(constraints or {}, ModelWarnings.of_ranks(self._topology.ranks))

    def plan(
        self, module: nn.Module, sharders: Sequence[ModuleSharder] | None = None
    ) -> OperShardingPlan:
        """Plan for the collections of a model that `sharders` take (None: all), and log the
        statistics.

        Raises:
            OperError: the profile lacks tables, no sharder takes any, or the ranks cannot hold
                them.
        """
        return self._plan(module, sharders, ModelWarnings.of_ranks(self._topology.ranks))

    def _plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder] | None,
        warnings: ModelWarnings,
    ) -> OperShardingPlan:
        began = time.perf_counter()
        tables, paths = _tables(module, sharders, warnings)
        profiled = {table.name for table in self._profile.tables}
        for text in other_modules.left_out(module, profiled, "profile"):
            warnings.warn(_log, text, text)
        profile = profile_of(self._profile, tables)
        planned = place_fetched(profile, self._topology, self._workload, self._settings)
        plan = with_reference_figures(assemble(planned), profile, [planned.problem])
        if sentence := self._topology.memory_warning(plan.cost.memory_bytes, plan.cost.step_bytes):
            raise OperError(sentence)
        for line in planner_statistics(plan, paths, time.perf_counter() - began):
            _log.info(line)
        return planned_module(plan, module, warnings)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> OperShardingPlan:
        """Plan on rank 0 of a group for all its ranks. A failure there is raised on all of them."""
        if pg is None and not dist.is_initialized():
            raise OperError(
                "collective_plan: there is no process group; call "
                "torch.distributed.init_process_group first, or plan() on one process"
            )
        answer: list[Any] = [None]
        failed: Exception | None = None
        warnings = ModelWarnings(dist.get_rank(pg) == 0)
        if dist.get_rank(pg) == 0:
            try:
                answer[0] = self._plan(module, sharders, warnings).oper_plan
            except Exception as error:
                failed, answer[0] = error, str(error)
                if not isinstance(error, OperError):
                    answer[0] = f"planning failed on rank 0: {type(error).__name__}: {error}"
        dist.broadcast_object_list(answer, group=pg, group_src=0)
        if failed is not None:
            raise failed
        if not isinstance(answer[0], Plan):
            raise OperError(answer[0])
        return planned_module(answer[0], module, warnings)


def _check_for_devices(workload: Workload, topology: Topology) -> None:
    """Raise OperError unless CUDA devices can do this work: TorchRec's topology, unlike OPER's
    presets, says that the model will be on them."""
    fetch = workload.on(topology.nodes).fetch
    if topology.nodes > 1 and fetch == "raw":
        raise OperError(
            f"topology {topology.name}, {plural(topology.nodes, 'node')}, fetch {fetch}: on CUDA "
            "devices distinct rows cross the network, once for each node: leave fetch out or give "
            "'distinct', 'pooled' or 'auto'; or give the model to CPU ranks, by a topology of "
            "OPER's (such as 'cpu:4', or a preset of devices, whose times it then has) and "
            "DistributedModelParallel's device cpu"
        )


def _tables(
    module: nn.Module, sharders: Sequence[ModuleSharder] | None, warnings: ModelWarnings
) -> tuple[list[Table], dict[str, str]]:
    """Return the tables to plan for, with the optimizers that will train them, and their paths."""
    tables: list[Table] = []
    taken: list[tuple[str, Any]] = []
    for path, collection in module_tables.collections(module):
        fused_params: Mapping[str, Any] = {}
        if sharders is not None:
            takers = [s for s in sharders if s.module_type is type(collection)]
            if not takers:
                continue
            if not isinstance(takers[-1], OperSharder):
                text = (
                    f"{path or type(module).__name__}: TorchRec's {type(takers[-1]).__name__} "
                    "cannot shard by this plan; give DistributedModelParallel "
                    "oper.OperEmbeddingBagCollectionSharder() or "
                    "oper.OperEmbeddingCollectionSharder() in its place"
                )
                warnings.warn(_log, text, text)
            fused_params = takers[-1].fused_params or {}
        module_tables.check_place(module, path)
        taken.append((path, collection))
        weights = module_tables.parameters(collection)
        for table in tables_of(collection):
            optimizer = module_tables.optimizer_of(weights[table.name], fused_params, warnings)
            tables.append(replace(table, optimizer=optimizer.kind))
    if not tables:
        raise OperError(
            f"{type(module).__name__}: has no collection that the sharders take"
            + other_modules.instead(module)
        )
    module_tables.check_places_of_tables(module, taken)
    return tables, module_tables.paths_of_tables(taken)


def _warn_of_constraints(
    constraints: Mapping[str, ParameterConstraints], warnings: ModelWarnings
) -> None:
    default = ParameterConstraints()
    for table, of_table in constraints.items():
        named = [
            each.name
            for each in fields(of_table)
            if getattr(of_table, each.name) != getattr(default, each.name)
        ]
        if of_table.use_virtual_table or of_table.key_value_params:
            raise OperError(
                f"constraints of table {table!r}: virtual and key-value tables are not supported; "
                "leave the table to TorchRec's sharders"
            )
        if named:
            # One warning covers all tables, because scripts give most of them equal constraints.
            warnings.warn(
                _log,
                tuple(named),
                f"constraints of table {table!r} have no effect: {', '.join(named)} (a profile "
                "says how often rows are accessed, and rows go wherever that is best)",
            )
