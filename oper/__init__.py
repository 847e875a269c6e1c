"""OPER: row-level sharding of embedding tables, planned from how often each row is accessed.

    profile = oper.profile(batches, tables)     # KeyedJaggedTensors; or Profile.load(folder)
    topology = oper.Topology.load("dgx-a100")
    workload = oper.Workload("training", batch_size=65536)
    plan = oper.make_plan(profile, topology, workload)
    plan.save("plan/")                          # read again by Plan.load("plan/")
    addresses = oper.AddressMap.of(plan, rank=0).translate(table, ids)

Names are loaded when they are first used: torch alone takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

from oper.base.display import printed_by, summarised_by

if TYPE_CHECKING:
    from oper.analysis.plan_differences import diff as diff
    from oper.analysis.row_facts import explain as explain
    from oper.base.errors import OperError as OperError
    from oper.checker.check import check as check
    from oper.cost.workload import Workload as Workload
    from oper.diagnosis.doctor import doctor as doctor
    from oper.logs.row_reader import read as read
    from oper.monitoring.monitor import monitor as monitor
    from oper.plan.address_map import AddressMap as AddressMap
    from oper.plan.plan import Plan as Plan
    from oper.plan.settings import PlanSettings as PlanSettings
    from oper.planner.compare import compare as compare
    from oper.planner.make_plan import make_plan as make_plan
    from oper.planner.replan.drift import drift as drift
    from oper.planner.replan.drift import drift_by_window as drift_by_window
    from oper.planner.replan.replan import replan as replan
    from oper.profiling.make_profile import profile as profile
    from oper.profiling.profile import Profile as Profile
    from oper.profiling.recorder import record as record
    from oper.report.write_report import write_report as write_report
    from oper.runtime.engine import EmbeddingEngine as EmbeddingEngine
    from oper.runtime.memory.device import Cuda as Cuda
    from oper.runtime.tables.optimizer_buckets import EmbeddingTable as EmbeddingTable
    from oper.scheduler.cache_settings import CacheSettings as CacheSettings
    from oper.scheduler.loader.dispatching_loader import DispatchingLoader as DispatchingLoader
    from oper.scheduler.simulator import SimulationSettings as SimulationSettings
    from oper.scheduler.simulator import simulate as simulate
    from oper.tables.table import Table as Table
    from oper.topology.topology import Topology as Topology
    from oper.torchrec.graph_step import graph_step as graph_step
    from oper.torchrec.load_checkpoint import load as load
    from oper.torchrec.measure_latency import measure_latency as measure_latency
    from oper.torchrec.migration import migrate as migrate
    from oper.torchrec.planning.sharding_planner import OperShardingPlanner as OperShardingPlanner
    from oper.torchrec.save_checkpoint import save as save
    from oper.torchrec.save_delta import save_delta as save_delta
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
    "Cuda": "oper.runtime.memory.device",
    "DispatchingLoader": "oper.scheduler.loader.dispatching_loader",
    "EmbeddingEngine": "oper.runtime.engine",
    "EmbeddingTable": "oper.runtime.tables.optimizer_buckets",
    "OperEmbeddingBagCollectionSharder": "oper.torchrec.sharders",
    "OperEmbeddingCollectionSharder": "oper.torchrec.sharders",
    "OperError": "oper.base.errors",
    "OperShardingPlanner": "oper.torchrec.planning.sharding_planner",
    "Plan": "oper.plan.plan",
    "Profile": "oper.profiling.profile",
    "PlanSettings": "oper.plan.settings",
    "SimulationSettings": "oper.scheduler.simulator",
    "Table": "oper.tables.table",
    "Topology": "oper.topology.topology",
    "Workload": "oper.cost.workload",
    "accumulate": "oper.torchrec.sharded_model",
    "check": "oper.checker.check",
    "compare": "oper.planner.compare",
    "counters": "oper.torchrec.sharded_model",
    "diff": "oper.analysis.plan_differences",
    "drift": "oper.planner.replan.drift",
    "drift_by_window": "oper.planner.replan.drift",
    "explain": "oper.analysis.row_facts",
    "graph_step": "oper.torchrec.graph_step",
    "load": "oper.torchrec.load_checkpoint",
    "make_plan": "oper.planner.make_plan",
    "measure_latency": "oper.torchrec.measure_latency",
    "migrate": "oper.torchrec.migration",
    "monitor": "oper.monitoring.monitor",
    "doctor": "oper.diagnosis.doctor",
    "profile": "oper.profiling.make_profile",
    "read": "oper.logs.row_reader",
    "record": "oper.profiling.recorder",
    "replan": "oper.planner.replan.replan",
    "save": "oper.torchrec.save_checkpoint",
    "save_delta": "oper.torchrec.save_delta",
    "shard": "oper.torchrec.sharded_model",
    "simulate": "oper.scheduler.simulator",
    "torchrec_plan": "oper.torchrec.sharding_plan",
    "write_report": "oper.report.write_report",
}
__all__ = [
    "AddressMap",
    "CacheSettings",
    "Cuda",
    "DispatchingLoader",
    "EmbeddingEngine",
    "EmbeddingTable",
    "OperEmbeddingBagCollectionSharder",
    "OperEmbeddingCollectionSharder",
    "OperError",
    "OperShardingPlanner",
    "Plan",
    "PlanSettings",
    "Profile",
    "SimulationSettings",
    "Table",
    "Topology",
    "Workload",
    "accumulate",
    "check",
    "compare",
    "counters",
    "diff",
    "doctor",
    "drift",
    "drift_by_window",
    "explain",
    "graph_step",
    "load",
    "make_plan",
    "measure_latency",
    "migrate",
    "monitor",
    "profile",
    "read",
    "record",
    "replan",
    "save",
    "save_delta",
    "shard",
    "simulate",
    "torchrec_plan",
    "write_report",
]

summarised_by("oper.report.notebook_summaries")  # in notebooks
printed_by("oper.cli.printed_objects")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oper' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Return the public names, used already or not, for completion in an interpreter."""
    return sorted([*__all__, "__version__"])
