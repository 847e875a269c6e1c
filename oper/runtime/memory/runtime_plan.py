"""A plan as the runtime reads it: its addresses, its replicas, and the checks before training by
it.

The plan's map names the reader's own copies LOCAL. Training treats them in two ways, because
gradients of replicas go through the AllReduce: a row with copies on all ranks gets the field
REPLICA here. A row with a copy on each node is read there as if that copy were its only one.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from oper.base import native
from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.allreduce import node_sum
from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK, Layout, rank_map
from oper.plan.plan import Plan
from oper.plan.row_codes import rows_of_tables
from oper.tables.row_identity import check_same_rows, count_by_the_plan
from oper.topology.transports import NVSHMEM

REPLICA = native.shared("field replica", LOCAL - 1)
_MOST_RANKS = native.shared("ranks of a device's step", 72)
# Most bytes of plain arrays for a rank's small tables: most accesses are to these, and translate in
# a third of the time.
FLAT_BYTES = 1 << 21
NOT_FOR_TRAINING = (
    "the plan was made for inference, and the model is to be trained by it; make a plan with "
    "mode='training', or call model.eval() first"
)


def runtime_map(plan: Plan, rank: int) -> AddressMap:
    """Return the address map of one rank, with replicas marked."""
    mine = rank_map(plan.layout, rank)
    local = mine.group_base & SLOT_MASK | REPLICA << SLOT_BITS
    reads_own = mine.group_base >> SLOT_BITS == LOCAL
    marked = replicated(plan.layout) & reads_own
    mine.group_base[:] = np.where(marked, local, mine.group_base)
    return AddressMap(plan.tables, plan.layout, mine)


def replicated(layout: Layout) -> np.ndarray:
    """Return a mask of the groups that have copies on all of several ranks, bool [G]."""
    return np.asarray(layout.holds.all(axis=1) & (layout.ranks > 1))


def replica_slots(layout: Layout, tables: Iterable[int]) -> Ints:
    """Return the slots of replicas of tables of one width in its arenas, ascending; other rows may
    lie between them."""
    rows = list(rows_of_tables(layout.listed_offset))
    group, position = layout.listed_places()
    copied = replicated(layout)
    slots = [np.zeros(0, dtype=np.int64)]
    for t in tables:
        everywhere = copied[group[rows[t]]]
        groups = group[rows[t]][everywhere]
        slots.append(layout.base[groups, 0] + position[rows[t]][everywhere])
    return np.sort(np.concatenate(slots))


def copied_to_nodes(layout: Layout) -> np.ndarray:
    """Return a mask of the groups that have copies on several ranks but not on all, bool [G]."""
    copies = layout.holds.sum(axis=1)
    return np.asarray((copies > 1) & (copies < layout.ranks))


def node_copy_slots(layout: Layout, tables: Iterable[int], rank: int) -> Ints:
    """Return the slots on a rank of rows of these tables of which it has its node's copy,
    ascending."""
    rows = list(rows_of_tables(layout.listed_offset))
    group, position = layout.listed_places()
    held = copied_to_nodes(layout) & layout.holds[:, rank]
    slots = [np.zeros(0, dtype=np.int64)]
    for t in tables:
        mine = held[group[rows[t]]]
        slots.append(layout.base[group[rows[t]][mine], rank] + position[rows[t]][mine])
    return np.sort(np.concatenate(slots))


def check_trainable(plan: Plan) -> None:
    """Raise OperError unless every row can be updated and has one owner, a copy on every rank,
    which that rank reads, or a copy on each node."""
    for table in plan.tables:
        if table.dtype == "int8":
            raise OperError(
                f"table {table.name!r}: the plan has int8 rows, which can be looked up and not "
                "trained; plan for fp32, fp16 or bf16, or make the plan with "
                f"{option('--mode', 'inference')}"
            )
    layout, some = plan.layout, copied_to_nodes(plan.layout)
    if layout.unread_copies.any():
        raise OperError(NOT_FOR_TRAINING)
    holds, base, source = layout.holds[some], layout.base[some], layout.source[some]
    node_of = np.array(plan.topology.node_of)
    at_one_position = np.zeros_like(holds)
    alike = plan.topology.proxy[holds.argmax(axis=1)]
    at_one_position[np.arange(len(holds))[:, None], alike] = True
    slot = np.where(holds, base, base.max(axis=1, keepdims=True))
    near = (node_of[source] == node_of).all()
    if not (near and (holds == at_one_position).all() and (slot == slot[:, :1]).all()):
        raise OperError(NOT_FOR_TRAINING)


def check_for_devices(plan: Plan, where: str) -> None:
    """Raise OperError if the plan asks for something that engines on `where`, CUDA devices,
    lack."""
    if plan.tier:
        names = ", ".join(plan.tier_names[:3]) + ", …" * (len(plan.tier) > 3)
        raise OperError(
            f"{plan!r}: the plan keeps tables in the hosts' memory ({names}), which engines on "
            f"{where} do not read: plan without {option('--tier')}, or train on CPU ranks (device "
            "cpu)"
        )


def check_nodes(nodes: Sequence[Sequence[int]], plan: Plan, where: str) -> None:
    """Raise OperError if ranks `where`, on CUDA devices, cannot follow the plan on these nodes."""
    if plan.topology.transport == NVSHMEM:
        if len(nodes) > 1 and plan.pooled_tables:
            raise OperError(
                f"table {plan.pooled_tables[0]!r}: the plan pools its bags between nodes, and on "
                f"{where} rows of other nodes are read by {NVSHMEM}, each for itself: plan without "
                "pooled tables or without the transport, or take CPU ranks (device cpu)"
            )
        if not plan.workload.training:
            return
        nodes = [range(plan.ranks)]  # every rank sends its gradients by itself
    # An update merges a list of each rank of the node, of each other node, and of each rank that
    # adds up copies: the holders, or, if all ranks are on one node, each rank for each holder.
    copies = 0
    if plan.workload.training and (copied := copied_to_nodes(plan.layout)).any():
        on_one = int(plan.layout.holds[copied].sum(axis=1).max()) * plan.ranks
        copies = len(nodes) if len(nodes) > 1 else on_one
    lists = max(map(len, nodes)) + len(nodes) - 1 + copies
    if plan.workload.training and lists > _MOST_RANKS:
        held = " with a copy of some rows on each" * (copies > 0)
        raise OperError(
            f"{plan!r}: of {plan.ranks} ranks {max(map(len, nodes))} share a node, and there are "
            f"{len(nodes)} nodes{held}; an update on {where} adds up {_MOST_RANKS} gradients of a "
            f"row, and there may be {lists}: plan for fewer"
        )
    if len(nodes) > 1 and plan.workload.known_fetch == "raw":
        raise OperError(
            f"{plan!r}: the plan fetches a row for each access, and the ranks are on {len(nodes)} "
            f"nodes: on {where} distinct rows cross the network, once for each node. Plan with "
            f"{option('--fetch', 'distinct')}, which is what plans for several nodes do unless "
            f"told otherwise; or for inference with transport: {NVSHMEM} in the topology; or take "
            "CPU ranks (device cpu)"
        )


def check_same_step(plan: Plan, other: Plan) -> None:
    """Raise OperError unless an engine that runs by a plan can go on by another once its rows have
    moved to their places there. The other plan has the engine's tables by name."""
    if plan.ranks != other.ranks:
        raise OperError(
            f"{other!r}: the model runs on {plan.ranks} ranks, and rows cannot move to others "
            "meanwhile: save a checkpoint, and start on the new ranks by the new plan"
        )
    for table in plan.tables:
        theirs = other.tables[other.table_index(table.name)]
        if (table.rows, table.dim, table.dtype) != (theirs.rows, theirs.dim, theirs.dtype):
            raise OperError(
                f"table {table.name!r}: the model has {table.rows:,} rows of dim {table.dim}, "
                f"{table.dtype}, and the plan {theirs.rows:,} of dim {theirs.dim}, {theirs.dtype}: "
                "save a checkpoint, and start by the new plan"
            )
    check_same_rows(
        plan.numbered_tables(),
        other.numbered_tables(),
        ("the model's plan", "the new plan"),
        f"make the new plan from a profile of the same vocabulary: {count_by_the_plan()}",
        other.vocabulary_start,
    )
    names = {table.name for table in plan.tables}
    for what, here, there in zip(
        ("mode", "fetch", "pooled tables", "tables in the tier"),
        *(
            (
                of.workload.mode,
                of.workload.known_fetch,
                _shown(of.pooled_tables, names),
                _shown(of.tier_names, names),
            )
            for of in (plan, other)
        ),
        strict=True,
    ):
        if here != there:
            raise OperError(
                f"{other!r}: has {what} {there}, and the model runs with {here}: save a "
                "checkpoint, and start by the new plan"
            )
    if NVSHMEM in (plan.topology.transport, other.topology.transport):
        raise OperError(
            f"rows that are read by {NVSHMEM} cannot move while the model runs: save a checkpoint, "
            "and start by the new plan"
        )


def _shown(tables: Iterable[str], names: Collection[str]) -> str:
    """Return the names of the tables that are among `names`, in words."""
    return ", ".join(sorted(set(names).intersection(tables))) or "none"


def nodes_of(plan: Plan) -> list[list[int]]:
    """Return the ranks of each node of a plan's topology."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(plan.topology.node_of):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())


def tables_of_ranks(layout: Layout, rank: int, owners: Collection[int]) -> np.ndarray:
    """Return a mask of the tables that may have rows that `rank` reads from one of `owners`, bool
    [T]."""
    of_owners = np.isin(np.arange(layout.ranks), list(owners))
    everything = np.arange(len(layout.rows))
    striped = layout.rows - np.diff(layout.listed_offset)
    if layout.stripe_bitmap is not None:  # rows may have left the stripes since
        striped = layout.rows
    may_read = np.array((layout.stripe_rows(everything, striped)[:, of_owners] > 0).any(axis=1))
    group, _ = layout.listed_places()
    read = of_owners[layout.source[:, rank]]
    for t, rows in enumerate(rows_of_tables(layout.listed_offset)):
        may_read[t] |= read[group[rows]].any()
    return may_read


def plan_digest(plan: Plan) -> bytes:
    """Return the digest that ranks compare to find that they hold different plans."""
    digest = hashlib.sha256()
    layout = plan.layout
    for array in (
        layout.rows, layout.width_of_table, layout.slots, layout.source, layout.base,
        *layout.orders, layout.pattern_of, layout.rotation, layout.stripe_base, layout.bitmap,
        layout.codes, layout.stripe_bitmap, layout.everywhere_bitmap, layout.everywhere_group,
        layout.everywhere_first,
    ):  # fmt: skip
        if array is not None:
            digest.update(np.ascontiguousarray(array).data)
    digest.update(
        repr(
            (
                plan.tables,
                plan.workload,
                plan.allreduce_method,
                plan.topology.known_transport,
                plan.pooled_tables,
                node_sum(plan.topology),
            )
        ).encode()
    )
    return digest.digest()
