"""OPER: row-level sharding of embedding tables, planned from how often each row is accessed.

    profile = oper.profile(batches, tables)     # KeyedJaggedTensors; or Profile.load(folder)
    topology = oper.Topology.load("dgx-a100")
    workload = oper.Workload("training", batch_size=65536)
    oper.make_plan(profile, topology, workload, oper.Settings(), "plan/")
    plan = oper.load_plan("plan/")
    addresses = oper.AddressMap.of(plan, rank=0).translate(table, ids)

Names are loaded when they are first used: torch alone takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oper.base.errors import OperError as OperError
    from oper.cost.workload import Workload as Workload
    from oper.diagnosis.doctor import doctor as doctor
    from oper.logs.row_reader import read as read
    from oper.plan.address_map import AddressMap as AddressMap
    from oper.plan.plan import Plan as Plan
    from oper.plan.plan import load_plan as load_plan
    from oper.planner.comparison import compare as compare
    from oper.planner.make_plan import make_plan as make_plan
    from oper.planner.problem.problem import Settings as Settings
    from oper.profiling.make_profile import profile as profile
    from oper.profiling.profile import Profile as Profile
    from oper.profiling.recorder import record as record
    from oper.scheduler.cache_settings import CacheSettings as CacheSettings
    from oper.scheduler.loader.dispatching_loader import DispatchingLoader as DispatchingLoader
    from oper.tables.table import Table as Table
    from oper.topology.topology import Topology as Topology
    from oper.torchrec.planning.sharding_planner import OperShardingPlanner as OperShardingPlanner
    from oper.torchrec.serving import serve as serve
    from oper.torchrec.sharded_model import accumulate as accumulate
    from oper.torchrec.sharded_model import counters as counters
    from oper.torchrec.sharded_model import shard as shard
    from oper.torchrec.sharders import (
        OperEmbeddingBagCollectionSharder as OperEmbeddingBagCollectionSharder,
    )
    from oper.torchrec.sharders import (
        OperEmbeddingCollectionSharder as OperEmbeddingCollectionSharder,
    )
    from oper.torchrec.sharding_plan import torchrec_plan as torchrec_plan


__version__ = "0.1.0"

_HOME = {
    "AddressMap": "oper.plan.address_map",
    "CacheSettings": "oper.scheduler.cache_settings",
    "DispatchingLoader": "oper.scheduler.loader.dispatching_loader",
    "OperEmbeddingBagCollectionSharder": "oper.torchrec.sharders",
    "OperEmbeddingCollectionSharder": "oper.torchrec.sharders",
    "OperError": "oper.base.errors",
    "OperShardingPlanner": "oper.torchrec.planning.sharding_planner",
    "Plan": "oper.plan.plan",
    "Profile": "oper.profiling.profile",
    "Settings": "oper.planner.problem.problem",
    "Table": "oper.tables.table",
    "Topology": "oper.topology.topology",
    "Workload": "oper.cost.workload",
    "accumulate": "oper.torchrec.sharded_model",
    "compare": "oper.planner.comparison",
    "counters": "oper.torchrec.sharded_model",
    "doctor": "oper.diagnosis.doctor",
    "load_plan": "oper.plan.plan",
    "make_plan": "oper.planner.make_plan",
    "profile": "oper.profiling.make_profile",
    "read": "oper.logs.row_reader",
    "record": "oper.profiling.recorder",
    "serve": "oper.torchrec.serving",
    "shard": "oper.torchrec.sharded_model",
    "torchrec_plan": "oper.torchrec.sharding_plan",
}
__all__ = [
    "AddressMap",
    "CacheSettings",
    "DispatchingLoader",
    "OperEmbeddingBagCollectionSharder",
    "OperEmbeddingCollectionSharder",
    "OperError",
    "OperShardingPlanner",
    "Plan",
    "Profile",
    "Settings",
    "Table",
    "Topology",
    "Workload",
    "accumulate",
    "compare",
    "counters",
    "doctor",
    "load_plan",
    "make_plan",
    "profile",
    "read",
    "record",
    "serve",
    "shard",
    "torchrec_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oper' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
