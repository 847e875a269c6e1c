"""OperShardingPlanner: TorchRec's EmbeddingShardingPlanner, with OPER's plans.

    planner = oper.OperShardingPlanner(topology, profile, batch_size=1024)
    sharders = [oper.OperEmbeddingBagCollectionSharder(fused_params=...)]
    plan = planner.collective_plan(dlrm, sharders)
    model = DistributedModelParallel(dlrm, plan=plan, sharders=sharders)

It is called as TorchRec's is and plans the same model; what it knows beside is how often each row
is accessed, from a profile, in the place of pooling factors.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.types import Topology as TorchRecTopology
from torchrec.distributed.types import ModuleSharder, ShardingPlanner

from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.planner.assemble import assemble
from oper.planner.planner import make_placement
from oper.planner.problem.problem import Settings
from oper.profiling.profile import Profile
from oper.tables.model_tables import tables_of
from oper.tables.table import Table
from oper.topology.links import latency_seconds, link_matrix
from oper.topology.presets import CPU_ALLREDUCE, CPU_LOCAL
from oper.topology.topology import Topology
from oper.torchrec import module_tables
from oper.torchrec.planner_statistics import planner_statistics
from oper.torchrec.sharders import OperShardingPlan, _OperSharder, torchrec_plan

_log = logging.getLogger("oper.runtime.torchrec_planner")  # a public name: docs/torchrec.md


class OperShardingPlanner(ShardingPlanner):
    """Plans where each row of a model's tables goes.

    Args:
        topology: OPER's Topology, its name or file (`cpu:4`), or TorchRec's; None: the ranks of the
            default process group, on CPUs of one host.
        profile: a profile or its folder; it must have all tables of the model, by name and rows.
        batch_size: samples per iteration of one rank, as in TorchRec; 512 if not given.
        constraints: TorchRec's, by table; they say nothing that a profile does not, or that
            OPER could keep, and a warning says so.
        mode, fetch: see Workload. settings: extra memory, threshold and aim of the plan.
    """

    def __init__(
        self,
        topology: Topology | TorchRecTopology | str | None = None,
        profile: Profile | Path | str | None = None,
        *,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        settings: Settings | None = None,
        mode: Literal["training", "inference"] = "training",
        fetch: Literal["raw", "distinct"] = "raw",
    ) -> None:
        if profile is None:
            raise OperError(
                "OperShardingPlanner: no profile; count one with `oper profile` or oper.profile"
            )
        self._topology = _topology(topology)
        self._profile = profile if isinstance(profile, Profile) else Profile.open(profile)
        self._workload = Workload(mode, fetch, (batch_size or BATCH_SIZE) * self._topology.ranks)
        self._settings = settings or Settings()
        _warn_of_constraints(constraints or {})

    def plan(
        self, module: nn.Module, sharders: Sequence[ModuleSharder] | None = None
    ) -> OperShardingPlan:
        """Plan for the collections of a model that `sharders` take, all if there are none given,
        and log the statistics.

        Raises:
            OperError: the profile has not these tables, no sharder takes any, or the ranks cannot
                hold them.
        """
        began = time.perf_counter()
        tables, paths = _tables(module, sharders)
        profile = profile_of(self._profile, tables)
        planned = make_placement(profile, self._topology, self._workload, self._settings)
        plan = assemble(planned)
        if sentence := self._topology.memory_warning(plan.prediction.memory_bytes):
            raise OperError(sentence)
        for line in planner_statistics(plan, paths, time.perf_counter() - began):
            _log.info(line)
        return torchrec_plan(plan, module)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> OperShardingPlan:
        """Plan on rank 0 of a group for all its ranks. What fails there fails on all."""
        if pg is None and not dist.is_initialized():
            raise OperError(
                "collective_plan: there is no process group; call "
                "torch.distributed.init_process_group first, or plan() on one process"
            )
        answer: list[Any] = [None]
        if dist.get_rank(pg) == 0:
            try:
                answer[0] = self.plan(module, sharders).oper_plan
            except OperError as error:
                answer[0] = str(error)
        dist.broadcast_object_list(answer, group=pg, group_src=0)
        if not isinstance(answer[0], Plan):
            raise OperError(answer[0])
        return torchrec_plan(answer[0], module)


def profile_of(profile: Profile, tables: Sequence[Table]) -> Profile:
    """A profile's counts of the tables of a model: those tables alone, as the model has them.

    Raises:
        OperError: a table was not profiled, or with another number of rows.
    """
    wanted = {table.name: table for table in tables}
    known = {table.name for table in profile.tables}
    if missing := sorted(set(wanted) - known):
        raise OperError(
            f"table {missing[0]!r}: the profile has no such table; it has "
            + ", ".join(sorted(known)[:8])
            + "; profile a log with the tables of this model (oper.profile(log, model))"
        )
    chosen = [n for n, table in enumerate(profile.tables) if table.name in wanted]
    adapted = []
    for counted in (profile.tables[n] for n in chosen):
        mine = wanted[counted.name]
        if counted.rows != mine.rows:
            raise OperError(
                f"table {mine.name!r}: the profile has {counted.rows:,} rows, and the model "
                f"{mine.rows:,}; profile with the tables of this model"
            )
        adapted.append(
            replace(
                counted,
                dim=mine.dim,
                dtype=mine.dtype,
                optimizer=mine.optimizer,
                pooling=mine.pooling,
            )
        )
    if len(chosen) == len(profile.tables):
        return replace(profile, tables=tuple(adapted))
    return _part(profile, chosen, adapted)


def _part(profile: Profile, chosen: Sequence[int], tables: Sequence[Table]) -> Profile:
    """The counts of some of a profile's tables."""
    bagged = tuple(profile.bagged[n] for n in chosen)
    containing = [profile.table_containing(n) for n in chosen if profile.bagged[n]]
    measured = profile.distinct
    per_table: dict[str, Any] = {
        name: tuple(values[n] for n in chosen)
        for name, values in (vars(measured) if measured else {}).items()
        if isinstance(values, tuple)
    }
    return replace(
        profile,
        tables=tuple(tables),
        accesses=np.concatenate([profile.table_accesses(n) for n in chosen]),
        containing=np.concatenate([profile.containing[:0], *containing]),
        bagged=bagged,
        distinct=measured and replace(measured, **per_table),
    )


def _tables(
    module: nn.Module, sharders: Sequence[ModuleSharder] | None
) -> tuple[list[Table], dict[str, str]]:
    """The tables to plan for, with the optimizers that will train them, and their paths."""
    tables: list[Table] = []
    taken: list[tuple[str, Any]] = []
    for path, collection in module_tables.collections(module):
        fused_params: Mapping[str, Any] = {}
        if sharders is not None:
            takers = [s for s in sharders if s.module_type is type(collection)]
            if not takers:
                continue
            if not isinstance(takers[-1], _OperSharder):
                _log.warning(
                    "%s: TorchRec's %s cannot shard by this plan; give DistributedModelParallel "
                    "oper.OperEmbeddingBagCollectionSharder() or "
                    "oper.OperEmbeddingCollectionSharder() in its place",
                    path or type(module).__name__,
                    type(takers[-1]).__name__,
                )
            fused_params = takers[-1].fused_params or {}
        taken.append((path, collection))
        weights = module_tables.parameters(collection)
        for table in tables_of(collection):
            optimizer = module_tables.optimizer_of(weights[table.name], fused_params)
            tables.append(replace(table, optimizer=optimizer.kind))
    if not tables:
        raise OperError(f"{type(module).__name__}: has no collection that the sharders take")
    return tables, module_tables.paths_of_tables(taken)


def _topology(given: Topology | TorchRecTopology | str | None) -> Topology:
    if isinstance(given, Topology):
        return given
    if given is None:
        if not dist.is_initialized():
            raise OperError(
                "OperShardingPlanner: no topology, and no process group to count ranks of; give "
                "one, such as 'cpu:4'"
            )
        given = f"cpu:{dist.get_world_size()}"
    if isinstance(given, str):
        return Topology.load(given)
    return from_torchrec(given)


def from_torchrec(topology: TorchRecTopology) -> Topology:
    """TorchRec's Topology as one of ours; it counts bytes per millisecond.

    Of CPU ranks it says only what memory streams at and what GPUs' links do: between ranks of a
    host the preset `cpu:N` holds, which is what random rows were measured at.
    """
    ranks, per_node = topology.world_size, topology.local_world_size
    node_of = [rank // per_node for rank in range(ranks)]
    same_node, other_node = topology.intra_host_bw * 1e3, topology.inter_host_bw * 1e3
    local, allreduce = topology.hbm_mem_bw * 1e3, same_node
    if topology.compute_device == "cpu":
        local, same_node, allreduce = CPU_LOCAL, CPU_LOCAL, CPU_ALLREDUCE
        other_node = min(other_node, CPU_LOCAL)
    if len(set(node_of)) > 1:
        allreduce = min(allreduce, other_node)
    on_device = "ddr" if topology.compute_device == "cpu" else "hbm"
    bandwidth = {"local": local, "same_node": same_node, "other_node": other_node}
    return Topology(
        f"{topology.compute_device}:{ranks}",
        tuple(node_of),
        link_matrix(node_of, {kind: 1 / value for kind, value in bandwidth.items()}),
        allreduce,
        latency_seconds(node_of),
        device_memory_bytes=tuple(getattr(d.storage, on_device) for d in topology.devices),
    )


def _warn_of_constraints(constraints: Mapping[str, ParameterConstraints]) -> None:
    default = ParameterConstraints()
    for table, given in constraints.items():
        named = [
            each.name
            for each in fields(given)
            if getattr(given, each.name) != getattr(default, each.name)
        ]
        if given.use_virtual_table or given.key_value_params:
            raise OperError(
                f"constraints of table {table!r}: virtual and key-value tables are not supported; "
                "leave the table to TorchRec's sharders"
            )
        if named:
            _log.warning(
                "constraints of table %r have no effect: %s (a profile says how often rows are "
                "accessed, and rows go wherever that is best)",
                table,
                ", ".join(named),
            )
