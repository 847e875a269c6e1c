"""Check a plan from its files alone: rows, slots, memory, figures; with its log, replay that.

Nothing here uses the planner, the cost model or the order in which slots were assigned: all rows
are translated by the maps of all ranks on disk, and the addresses are compared with one another and
with the plan's figures.

* rows: every row is read from a rank that holds it, at its slot there; so every row has one
  owner, or replicas that all maps agree on. In training ranks read their own replicas.
* slots: no two rows share one, and all are within their arenas.
* memory, figures: recomputed from slots and from one another.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import check_type
from oper.checker.bag_vectors import PooledBags, TableVectors
from oper.checker.findings import Finding, Findings
from oper.checker.rank_address_maps import RankMaps
from oper.checker.replay import replay, rows_of_log
from oper.checker.slot_occupancy import SlotMarks
from oper.cost.objective import Cost
from oper.logs import LogOptions
from oper.plan.certificate import Certificate
from oper.plan.memories import DEVICE, HOST
from oper.plan.plan import Plan

# Rows of each table that are compared with the layout in NumPy, which is slower than the maps by
# orders of magnitude. They are spread evenly over the table, because listed rows are not
# concentrated in one part.
_REFERENCE_ROWS = 4096
# Figures are summed in another order here: an error of 2^-52 per addition, over at most a few
# million terms.
_CLOSE = 1e-9


def check(
    folder: Path | str,
    log: Path | str | Sequence[Path | str] = (),
    options: LogOptions | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> Findings:
    """Check all invariants of the plan in a folder, from its files. With the files of the log that
    its profile counted, read by `options`, also replay the log through the address maps: each owner
    must serve the reads that the plan states; and count the vectors of pooled tables. `report` is
    called with the name of each step as it begins.

    Raise OperError if the folder cannot be read as a plan, or if the log is another one.
    """
    check_type("check", "folder", folder, Path, str)
    files = [Path(file) for file in ([log] if isinstance(log, Path | str) else log)]
    report("all rows")
    findings = _check_files(folder)
    vectors: tuple[TableVectors, ...] = ()
    if files:
        report("replaying the log")
        bags = PooledBags(Plan.load(folder))
        read = rows_of_log(folder, files, options or LogOptions(), bags.add)
        findings += replay(folder, read)
        vectors = bags.found
    return Findings(tuple(findings), vectors)


def _check_files(folder: Path | str) -> list[Finding]:
    plan = Plan.load(folder)
    maps = RankMaps(plan, folder)
    placed = SlotMarks(plan)
    for chunk in maps.all_rows():
        placed.add(chunk)
    findings = [
        Finding("maps agree with the layout by its definition", _reference(plan, maps)),
        Finding("every row is read from a rank that holds it, at one slot", placed.astray),
        Finding("in training every rank reads the replicas that it has", placed.unread),
        Finding("no two rows share a slot, and all are within the arenas", placed.clash()),
        Finding("copies that are updated together are at equal slots", placed.unequal),
    ]
    return findings + _memory(plan, placed) + _figures(plan)


def _reference(plan: Plan, maps: RankMaps) -> str | None:
    """Compare rows spread over each table with the definition in oper/plan/layout.py."""
    for table, rows in enumerate(plan.layout.rows.tolist()):
        ids = np.unique(np.linspace(0, rows - 1, min(rows, _REFERENCE_ROWS)).astype(np.int64))
        for rank in range(plan.ranks):
            expected = plan.layout.addresses(table, ids, rank)
            different = np.flatnonzero(maps.translate(rank, table, ids) != expected)
            if len(different):
                return (
                    f"table {plan.tables[table].name!r}, row {ids[different[0]]}: rank {rank}'s "
                    "map and the layout disagree"
                )
    return None


def _memory(plan: Plan, placed: SlotMarks) -> list[Finding]:
    layout = plan.layout
    row_memory = np.array([t.memory_bytes(plan.workload.mode) for t in plan.tables])
    width_memory = np.zeros(len(layout.slots), dtype=np.int64)
    width_memory[layout.width_of_table] = row_memory  # equal for the tables of a width
    arenas = width_memory[:, None] * layout.slots
    findings = [Finding("every slot of the arenas holds a row", placed.unused())]
    widths = []
    for memory in plan.memories:
        of_memory = layout.width_of_table[list(memory.tables)]
        widths.append(of_memory)
        held = arenas[np.isin(np.arange(len(layout.slots)), of_memory)].sum(axis=0)
        findings += _held("" if memory.name == DEVICE else " of the tier", memory.cost, held)
    if plan.host is not None:
        wrong = "tables of both share an arena" if np.isin(widths[0], widths[1]).any() else None
        findings.append(Finding("the tier's arenas have none of the devices' rows", wrong))
        wrong = None
        if (plan.host.cost.capacity_bytes != np.array(plan.topology.host_memory_bytes)).any():
            wrong = "it has another capacity than the topology's hosts"
        findings += [
            Finding("the tier may hold what the hosts have for it", wrong),
            Finding("every row of the tier is on one rank", placed.copied),
        ]
    on_devices = list(plan.memories[0].tables)
    total = max(int(layout.rows[on_devices] @ row_memory[on_devices]), 1)
    ratio, limits = placed.copies / total, plan.limits
    stated, wrong = plan.cost.extra_memory_ratio, None
    if not np.isclose(ratio, stated, rtol=_CLOSE, atol=0):
        wrong = f"copies take {ratio:.6%}, and the plan says {stated:.6%}"
    elif limits is not None and ratio > limits.extra_memory * (1 + _CLOSE):
        wrong = (
            f"copies take {ratio:.6%} of the tables' bytes, and {limits.extra_memory:.6%} was "
            "allowed"
        )
    findings.append(Finding("copies take the extra memory stated, within that allowed", wrong))
    return findings


def _held(which: str, cost: Cost, memory: Ints) -> list[Finding]:
    """Check that the ranks' bytes, `memory` [M], are those stated and within capacity."""
    stated, wrong = cost.memory_bytes, None
    if (memory != stated).any():
        rank = int(np.flatnonzero(memory != stated)[0])
        wrong = f"rank {rank} holds {memory[rank]:,} bytes, and the plan says {stated[rank]:,.0f}"
    findings = [Finding(f"memory{which} of each rank is the plan's", wrong)]
    over, wrong = memory - cost.capacity_bytes, None
    if (over > 0).any():
        wrong = f"rank {over.argmax()} exceeds its capacity by {over.max():,.0f} bytes"
    return [*findings, Finding(f"memory{which} is within each rank's capacity", wrong)]


def _figures(plan: Plan) -> list[Finding]:
    """Check that the figures are consistent: each is recomputed from its parts."""
    link_cost, one_memory = plan.topology.link_cost, plan.topology.is_one_memory
    # The slower of the owner's host link and the link between the ranks; its own rows pass only the
    # host link.
    costs = {DEVICE: link_cost}
    if plan.host is not None:
        host = 1 / np.array(plan.topology.host_bandwidth)[None]
        diagonal = np.eye(plan.ranks, dtype=bool)
        costs[HOST] = np.where(diagonal, host, np.maximum(host, link_cost))
    unequal, below = [], None
    for memory in plan.memories:
        link_seconds: NDArray[np.float64] | None = memory.cost.link_bytes * costs[memory.name]
        if plan.workload.fetch == "pooled":
            link_seconds = _link_seconds_of_sums(plan, memory.cost.link_bytes)
        elif plan.vector_ratio is not None:  # rows and sums, of which the bytes are one figure
            link_seconds = None
        rows_alone = memory.name == DEVICE and plan.vector_ratio is None
        links = _relayed_links(plan) if rows_alone else None
        if links is not None and memory.cost.link_bytes[~links].any():
            unequal.append(f"{memory.name}: link_bytes between ranks that exchange nothing")
        wrong, memory_below = _inconsistent(
            memory.cost, memory.certificate, link_seconds, one_memory, links
        )
        unequal += [f"{memory.name}: {figure}" for figure in wrong]
        below = below or memory_below
    if plan.host is not None:
        wrong, whole_below = _inconsistent(plan.cost, plan.certificate, None, one_memory)
        unequal += [f"all tables: {figure}" for figure in wrong]
        below = below or whole_below
    return [
        Finding("the figures add up", f"inconsistent: {', '.join(unequal)}" if unequal else None),
        Finding("the objective is not below its lower bound", below),
        Finding("accesses of replicated rows are the plan's", _replica_accesses(plan)),
    ]


def _relayed_links(plan: Plan) -> NDArray[np.bool_] | None:
    """Return a mask of the pairs of ranks, [reader, source], between which rows pass if a row of
    another node crosses to a node once, to the rank at its owner's position there, from which the
    other ranks of the node read it; None if rows pass between all pairs. The diagonal is True."""
    node_of = np.array(plan.topology.node_of)
    sizes = np.bincount(node_of)
    collective = plan.topology.known_transport == "collective"
    if plan.workload.fetch != "distinct" or not collective or sizes.max() == 1:
        return None
    links = np.equal.outer(node_of, node_of)
    for owner, node in enumerate(node_of):
        position = int((node_of[:owner] == node).sum())
        for other in np.flatnonzero(np.arange(len(sizes)) != node):
            links[np.flatnonzero(node_of == other)[position % sizes[other]], owner] = True
    return links


def _link_seconds_of_sums(plan: Plan, sent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of each link for the bytes `sent`, [reader, source]. Bytes between nodes
    are sums of rows, of which as many come back in training. To them belong the rows that they sum,
    which the reader's proxy, at its position in the source's node, reads there."""
    node_of, cost = np.array(plan.topology.node_of), plan.topology.link_cost
    assert plan.vector_ratio is not None
    ratio = np.array(plan.vector_ratio)
    members = [np.flatnonzero(node_of == node) for node in range(len(ratio))]
    seconds = sent * cost
    for reader, node in enumerate(node_of):
        position = int((node_of[:reader] == node).sum())
        for other, ranks in enumerate(members):
            if other != node:
                seconds[reader, ranks] *= 2 if plan.workload.training else 1
                proxy = ranks[position % len(ranks)]
                read = sent[reader, ranks] / ratio[other] if ratio[other] else 0.0
                seconds[proxy, ranks] += np.where(ranks == proxy, 0.0, read * cost[proxy, ranks])
    return seconds


def _inconsistent(
    stated: Cost,
    certificate: Certificate | None,
    link_seconds: NDArray[np.float64] | None,
    one_memory: bool,
    links: NDArray[np.bool_] | None = None,
) -> tuple[list[str], str | None]:
    """Return the figures that are inconsistent with others, and the objective if it is below its
    bound. `link_seconds` follow from the bytes; None if links have several costs. `links` is a mask
    of the pairs between which rows pass; None: all."""
    ranks = len(stated.rank_seconds)
    away = ~np.eye(ranks, dtype=bool)
    if links is not None:
        away &= links
    traffic = stated.communication_bytes
    rank_seconds = (
        stated.lookup_seconds
        + stated.link_seconds.sum(axis=1)
        + stated.gradient_lookup_seconds
        + stated.gradient_link_seconds.sum(axis=1)
        + stated.allreduce_seconds
    )
    memory_share = stated.memory_bytes / np.maximum(stated.capacity_bytes, 1)
    link_balance = _balance(stated.link_seconds[away]) if ranks > 1 else None
    equal: dict[str, tuple[Any, Any]] = {
        "rank_seconds": (stated.rank_seconds, rank_seconds),
        "communication_bytes.fetch": (traffic.fetch, stated.link_bytes.sum()),
    }
    if link_seconds is not None:
        equal["link_seconds"] = (stated.link_seconds, link_seconds)
    served = stated.lookups if one_memory else stated.lookup_seconds
    balances = _balance(memory_share), _balance(served), link_balance
    for name, recomputed in zip(("memory", "lookups", "link_cost"), balances, strict=True):
        equal[f"dob.{name}"] = (getattr(stated.dob, name), recomputed)
    bound = None
    if certificate is not None:
        bound = certificate.lower_bound_seconds
        equal["certificate"] = (stated.objective_seconds, certificate.objective_seconds)
    unequal = [
        name
        for name, (stated_value, recomputed) in equal.items()
        if (stated_value is None) != (recomputed is None)
        or (
            recomputed is not None
            and not np.allclose(stated_value, recomputed, rtol=_CLOSE, atol=0)
        )
    ]
    below = None
    if bound is not None and stated.objective_seconds < bound * (1 - _CLOSE):
        below = f"{stated.objective_seconds:.9g} s, below {bound:.9g} s"
    return unequal, below


def _replica_accesses(plan: Plan) -> str | None:
    layout = plan.layout
    # Codes are decoded here by their definition, not by row_codes.py, which wrote them.
    bits = max(len(layout.group_width) - 1, 0).bit_length()
    group = (layout.codes.astype(np.uint64) & np.uint64((1 << bits) - 1)).astype(int)
    several = layout.holds.sum(axis=1) > 1
    counts = plan.counts
    accesses = int(counts.accesses[several[group]].sum(dtype=np.int64)) if len(group) else 0
    accesses += int(counts.everywhere_accesses.sum())
    if accesses == plan.replica_accesses:
        return None
    return f"they are {accesses:,}, and the plan says {plan.replica_accesses:,}"


def _balance(values: NDArray[Any]) -> float:
    """Return min/max, 1 if all are 0."""
    return float(values.min() / values.max()) if values.max() > 0 else 1.0
