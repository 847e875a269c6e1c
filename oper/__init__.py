"""OPER: row-level sharding of embedding tables, planned from how often each row is accessed.

    profile = oper.profile(batches, tables)     # KeyedJaggedTensors; or Profile.open(folder)
    topology = oper.Topology.load("dgx-a100")
    workload = oper.Workload("training", "raw", batch_size=65536)
    oper.make_plan(profile, topology, workload, oper.Settings(), "plan/")
    plan = oper.load_plan("plan/")
    addresses = oper.AddressMap.of(plan, rank=0).translate(table, ids)

Names are loaded when they are first used: torch alone takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oper.address_map import AddressMap as AddressMap
    from oper.cost import Workload as Workload
    from oper.errors import OperError as OperError
    from oper.plan import Plan as Plan
    from oper.plan import load_plan as load_plan
    from oper.planner.assemble import plan_and_save as make_plan
    from oper.planner.counting import profile as profile
    from oper.planner.planner import Settings as Settings
    from oper.planner.profile import Profile as Profile
    from oper.runtime.serving import serve as serve
    from oper.runtime.torchrec import (
        OperEmbeddingBagCollectionSharder as OperEmbeddingBagCollectionSharder,
    )
    from oper.runtime.torchrec import (
        OperEmbeddingCollectionSharder as OperEmbeddingCollectionSharder,
    )
    from oper.runtime.torchrec import accumulate as accumulate
    from oper.runtime.torchrec import counters as counters
    from oper.runtime.torchrec import shard as shard
    from oper.runtime.torchrec import torchrec_plan as torchrec_plan
    from oper.runtime.torchrec_planner import OperShardingPlanner as OperShardingPlanner
    from oper.tables import Table as Table
    from oper.topology import Topology as Topology

__version__ = "0.1.0"

_HOME = {
    "AddressMap": ("oper.address_map", "AddressMap"),
    "OperEmbeddingBagCollectionSharder": (
        "oper.runtime.torchrec",
        "OperEmbeddingBagCollectionSharder",
    ),
    "OperEmbeddingCollectionSharder": ("oper.runtime.torchrec", "OperEmbeddingCollectionSharder"),
    "OperError": ("oper.errors", "OperError"),
    "OperShardingPlanner": ("oper.runtime.torchrec_planner", "OperShardingPlanner"),
    "Plan": ("oper.plan", "Plan"),
    "Profile": ("oper.planner.profile", "Profile"),
    "Settings": ("oper.planner.planner", "Settings"),
    "Table": ("oper.tables", "Table"),
    "Topology": ("oper.topology", "Topology"),
    "Workload": ("oper.cost", "Workload"),
    "accumulate": ("oper.runtime.torchrec", "accumulate"),
    "counters": ("oper.runtime.torchrec", "counters"),
    "load_plan": ("oper.plan", "load_plan"),
    "make_plan": ("oper.planner.assemble", "plan_and_save"),
    "profile": ("oper.planner.counting", "profile"),
    "serve": ("oper.runtime.serving", "serve"),
    "shard": ("oper.runtime.torchrec", "shard"),
    "torchrec_plan": ("oper.runtime.torchrec", "torchrec_plan"),
}
__all__ = [
    "AddressMap",
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
    "counters",
    "load_plan",
    "make_plan",
    "profile",
    "serve",
    "shard",
    "torchrec_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oper' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)
