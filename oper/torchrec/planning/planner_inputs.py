"""Inputs of OperShardingPlanner: the profile of a model's tables, and the topology."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torchrec.distributed.planner.types import Topology as TorchRecTopology

from oper.base.errors import OperError
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import CPU_RANKS, DEVICES
from oper.topology.links import LINKED, SHARED, link_matrix
from oper.topology.presets import CPU_ALLREDUCE, CPU_LOCAL
from oper.topology.topology import Topology


def profile_of(profile: Profile, tables: Sequence[Table]) -> Profile:
    """Return a profile restricted to the tables of a model, as the model defines them.

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
        of_model = wanted[counted.name]
        if counted.rows != of_model.rows:
            raise OperError(
                f"table {of_model.name!r}: the profile has {counted.rows:,} rows, and the model "
                f"{of_model.rows:,}; profile with the tables of this model"
            )
        adapted.append(
            replace(
                counted,
                dim=of_model.dim,
                dtype=of_model.dtype,
                optimizer=of_model.optimizer,
                pooling=of_model.pooling,
            )
        )
    later = profile.open_following
    return replace(
        profile.select(chosen),
        tables=tuple(adapted),
        open_following=None if later is None else lambda: profile_of(later(), tables),
    )


def topology_of(given: Topology | TorchRecTopology | Path | str | None) -> Topology:
    """Return OPER's topology from a planner's argument; None: the ranks of the default process
    group, on CPUs of one host."""
    if isinstance(given, Topology):
        return given
    if given is None:
        if not dist.is_initialized():
            raise OperError(
                "OperShardingPlanner: no topology, and no process group to count ranks of; give "
                "one, such as 'cpu:4'"
            )
        given = f"cpu:{dist.get_world_size()}"
    if isinstance(given, str | Path):
        return Topology.load(str(given))
    return from_torchrec(given)


def from_torchrec(topology: TorchRecTopology) -> Topology:
    """Convert TorchRec's Topology, which has bytes per millisecond, to OPER's.

    For CPU ranks it has only the bandwidth of streaming memory and of GPUs' links. Between ranks of
    a host the preset `cpu:N` is used instead, which was measured with random rows in shared memory.
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
        CPU_RANKS if topology.compute_device == "cpu" else DEVICES,
        device_memory_bytes=tuple(getattr(d.storage, on_device) for d in topology.devices),
        shares_host_memory=topology.compute_device == "cpu",
        memory=(SHARED if topology.compute_device == "cpu" else LINKED,) * len(set(node_of)),
    )
