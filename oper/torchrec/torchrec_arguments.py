"""Arguments of TorchRec's planner, sharders and DistributedModelParallel that OPER's lack.

Each has OPER's equivalent setting, or the reason for which there is none.
"""

from collections.abc import Collection, Iterable
from inspect import signature

from oper.base.errors import OperError
from oper.torchrec.module_tables import first_names

_NO_PARTS = (
    "leave it out: OPER's planner takes a profile and a topology, and no parts of TorchRec's"
)
_WHOLE = (
    "give it to DistributedModelParallel(model, plan=oper.torchrec_plan(plan, model), "
    "sharders=[…]) with OPER's sharders"
)
_SHARDERS = "leave it out: oper.shard makes both of OPER's sharders, and takes their options"
_NO_2D = "leave it out: OPER shards over all ranks of one process group (env=ShardingEnv…)"
_TOPOLOGY = "give topology=, an oper.Topology, its name such as 'cpu:4', or TorchRec's Topology"

INSTEAD = {
    # EmbeddingShardingPlanner
    "callbacks": _NO_PARTS,
    "debug": "leave it out: the logger oper.runtime.torchrec_planner gets the statistics",
    "enumerator": _NO_PARTS,
    "partitioner": _NO_PARTS,
    "performance_model": _NO_PARTS,
    "plan_loader": "leave it out, and give a saved plan to oper.torchrec_plan(folder, model)",
    "proposer": _NO_PARTS,
    "stats": "leave it out: the logger oper.runtime.torchrec_planner gets the statistics",
    "storage_reservation": (
        "give the planner settings=oper.PlanSettings(reserve=0.15), the share of each device's "
        "memory for the rest of the model"
    ),
    "timeout_seconds": "leave it out: OPER's planner has no time limit",
    # Topology
    "compute_device": _TOPOLOGY,
    "hbm_cap": _TOPOLOGY,
    "ddr_cap": _TOPOLOGY,
    "local_world_size": _TOPOLOGY,
    # Sharders
    "qcomm_codecs_registry": "leave it out: OPER does not quantise what travels",
    "sharded_module_order_overwrite": "leave it out: OPER looks all tables up together",
    "use_index_dedup": (
        'make the plan with fetch="distinct" ('
        'oper.OperShardingPlanner(fetch="distinct"), oper.Workload(fetch="distinct"))'
    ),
    # shard, DistributedModelParallel and DMPCollection
    "custom_all_reduce": _NO_2D,
    "data_parallel_wrapper": _WHOLE,
    "global_pg": _NO_2D,
    "init_data_parallel": _WHOLE,
    "init_parameters": _WHOLE,
    "init_params": _WHOLE,
    "model_tracker_configs": (
        "leave it out: oper.save(…, deltas=True) and oper.save_delta save changed rows, and "
        "oper.monitor counts what is read"
    ),
    "node_group_size": _NO_2D,
    "planner": "give the plan that it makes, or oper.make_plan's",
    "rs_awaitable_hook_module": _NO_2D,
    "sharder": _SHARDERS,
    "sharders": _SHARDERS,
    "sharding_group_size": _NO_2D,
    "sharding_strategy": _NO_2D,
    "submodule_configs": _NO_2D,
    "use_inter_host_allreduce": _NO_2D,
    "use_sharded_relay": _NO_2D,
    "world_size": _NO_2D,
    # Of oper.Workload
    "batch_size": "give it when the plan is made (oper.Workload)",
}


def keywords_of(made: type) -> set[str]:
    """Return the names of a constructor's keyword-only arguments."""
    parameters = signature(made).parameters.values()
    return {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}


def check_arguments(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise OperError if `function` was `given` arguments with other names than the `known`
    ones."""
    for name in sorted(set(given) - set(known)):
        if name in INSTEAD:
            raise OperError(f"{function}: expected no {name}=, got one: {INSTEAD[name]}")
        raise OperError(f"{function} has no option {name!r}; it has {first_names(known, 9)}")
