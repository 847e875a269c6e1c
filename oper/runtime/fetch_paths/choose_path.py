"""The choice of each table's fetch path, from the plan and the nodes that the ranks run on.

A new path is a module with a class of its own (fetch_path.py), and a line here.
"""

from oper.plan.plan import Plan
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.cached_tier import CachedTier
from oper.runtime.fetch_paths.copied_rows import CopiedRows
from oper.runtime.fetch_paths.fetch_path import FetchPath
from oper.runtime.fetch_paths.kernel_gets import KernelGets
from oper.runtime.fetch_paths.pointers import Pointers
from oper.runtime.fetch_paths.pooled_bags import PooledBags
from oper.runtime.fetch_paths.relayed_rows import RelayedRows
from oper.runtime.fetch_paths.row_source import RowSource
from oper.runtime.fetch_paths.rows_by_access import RowsByAccess
from oper.runtime.memory.heap import TableMemory
from oper.runtime.tables.features import FeatureSet


def choose_path(
    plan: Plan,
    memory: TableMemory,
    features: FeatureSet,
    source: RowSource,
    in_heap: int,
    counters: Counters,
) -> FetchPath:
    """Return the path of a module's tables. Rows of all but the first `in_heap` buckets are trained
    in the `source`. To be called on all ranks together."""
    buckets, slots = memory.buckets, plan.layout.slots
    distinct, trains = plan.workload.known_fetch == "distinct", plan.workload.training
    several = memory.all_to_all is not None
    rows = [b for b, bucket in enumerate(buckets) if not bucket.pooled]
    sent = [b for b in rows if b < in_heap and buckets[b].trained]
    path: FetchPath
    if memory.symmetric is not None:
        path = KernelGets(
            memory,
            memory.symmetric,
            features,
            plan.layout,
            counters,
            distinct=distinct,
            trains=trains,
        )
    elif rows and several:
        between_nodes = RelayedRows if distinct else RowsByAccess
        path = between_nodes(memory, rows, sent, counters)
    elif rows and distinct and memory.node.ranks > 1:
        path = CopiedRows(memory, rows)
    else:
        path = Pointers(memory)
    if in_heap < len(buckets):
        path = CachedTier(memory, path, source, range(in_heap, len(buckets)))
    if memory.all_to_all is not None and len(rows) < len(buckets):
        path = PooledBags(memory, path, features, slots, memory.all_to_all)
    return path
