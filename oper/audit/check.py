"""Check a plan from its files alone: coverage, slots, memory, figures; and replay a log through it.

Nothing here uses the planner, the cost model or the order in which slots were given: all rows are
translated by the maps of all ranks, as those lie on disk, and what the addresses say is compared
with itself and with the plan's figures.

* rows: every row is read from a rank that holds it, at the slot that rank itself reads it from;
  so every row has one owner, or replicas that all maps agree about.
* slots: no two rows share one, and all lie within their arenas.
* memory, figures: recomputed from slots and from one another.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.plan import Plan, load_plan

if TYPE_CHECKING:
    from oper.logs import LogOptions
    from oper.plan.address_map import AddressMap


_CHUNK_ADDRESSES = 1 << 18  # what the second-level cache holds
_REFERENCE_ROWS = 4096  # of each table, compared with the map's reference in NumPy
_CLOSE = 1e-9  # figures are sums of floats in another order


@dataclass(frozen=True)
class Finding:
    """One invariant: what was checked, and what is wrong with it, if anything is."""

    invariant: str
    wrong: str | None = None

    @property
    def ok(self) -> bool:
        return self.wrong is None


def check(folder: Path | str) -> list[Finding]:
    """All invariants of a plan's folder. OperError where the folder cannot be read as a plan."""
    plan = load_plan(folder)
    maps = _maps(plan, folder)
    placed = _Placement(plan)
    for table, rows, addresses in _all_addresses(plan, maps):
        placed.add(table, rows, addresses)
    findings = [
        Finding("maps agree with the layout by its definition", _reference(plan, maps)),
        Finding("every row is read from a rank that holds it, at one slot", placed.astray),
        Finding("no two rows share a slot, and all lie within the arenas", placed.clash()),
        Finding("replicas on all ranks lie at equal slots", placed.unequal),
    ]
    return findings + _memory(plan, placed) + _figures(plan)


def replay(folder: Path | str, rows_read: Iterable[tuple[int, Ints]]) -> list[Finding]:
    """Replay the rows that a log reads, as (number of the table, its rows) in any order, through
    the maps: what each owner serves of rows with one owner must be the plan's figure to the row.

    The log must be the one that the plan's profile counted.
    """
    plan = load_plan(folder)
    maps = _maps(plan, folder)
    served = np.zeros(plan.ranks, dtype=np.int64)
    replicated = 0
    for table, rows in rows_read:
        chunk = _chunk_rows(plan)
        for first in range(0, len(rows), chunk):
            part = rows[first : first + chunk]
            addresses = np.stack([_translate(m, table, part) for m in maps])
            local = addresses >> SLOT_BITS == LOCAL
            single = local.sum(axis=0) == 1
            served += np.bincount(local[:, single].argmax(axis=0), minlength=plan.ranks)
            replicated += int(len(part) - single.sum())
    wrong = None
    if replicated != plan.replica_accesses or (served != plan.owner_accesses).any():
        worst = int(np.abs(served - plan.owner_accesses).argmax())
        wrong = (
            f"rank {worst} serves {served[worst]:,} reads of rows it alone holds, and the plan "
            f"says {plan.owner_accesses[worst]:,}; {replicated:,} reads are of replicated rows, "
            f"and the plan says {plan.replica_accesses:,}; is it the log that was profiled?"
        )
    return [Finding("a replay of the log serves what the plan says, to the row", wrong)]


def rows_of_log(
    folder: Path | str, log: Sequence[Path], options: "LogOptions"
) -> Iterator[tuple[int, Ints]]:
    """What `replay` needs, from the files of a log, by the plan's own rules for ids.

    The plan's features are read where `options` names no columns.
    """
    from oper.logs import Prepared, RowReader, open_log

    plan = load_plan(folder)
    if not options.columns:
        features = [name for table in plan.tables for name in table.features or (table.name,)]
        options = replace(options, columns=tuple(features))
    reader = RowReader(open_log(log, options), Prepared.load(plan.tables, folder))
    for batch in reader.batches(ids_only=True):
        for key, table in reader.tables_of.items():
            yield table, batch.features[key].values


@dataclass
class _Placement:
    """Marks each row's slots, and keeps the first thing of each kind that is wrong."""

    plan: Plan
    astray: str | None = None
    unequal: str | None = None
    misplaced: str | None = None
    copies: int = 0  # bytes beyond one copy of each row
    _taken: list[list[NDArray[np.bool_]]] = field(default_factory=list)
    _marked: Ints = field(init=False)

    def __post_init__(self) -> None:
        slots = self.plan.layout.slots
        self._taken = [[np.zeros(n, dtype=bool) for n in of_width] for of_width in slots]
        self._marked = np.zeros_like(slots)

    def add(self, table: int, rows: Ints, addresses: Ints) -> None:
        """Rows of a table by the addresses [M, N] of all ranks."""
        local = addresses >> SLOT_BITS == LOCAL
        owner = local.argmax(axis=0)
        at_owner = np.take_along_axis(addresses, owner[None], axis=0)[0] & SLOT_MASK
        # Most rows have one owner, which all others read from; the rest is looked at closer.
        plain = (local | (addresses == owner << SLOT_BITS | at_owner)).all(axis=0)
        plain &= local.sum(axis=0) == 1
        self._mark(table, rows[plain], owner[plain], at_owner[plain])
        if not plain.all():
            self._add_replicated(table, rows[~plain], addresses[:, ~plain], local[:, ~plain])

    def _add_replicated(
        self, table: int, rows: Ints, addresses: Ints, local: NDArray[np.bool_]
    ) -> None:
        """Rows with several holders, if any: each must be read from one of them, at its slot."""
        ranks = np.arange(len(local))[:, None]
        slot = addresses & SLOT_MASK
        source = np.where(local, ranks, addresses >> SLOT_BITS)
        known = np.minimum(source, self.plan.ranks - 1)
        held = np.take_along_axis(local, known, axis=0) & (known == source)
        same = np.take_along_axis(slot, known, axis=0) == slot
        for reader, n in np.argwhere(~(held & same))[:1]:
            self.astray = self.astray or (
                f"{self._name(table, int(rows[n]))}: rank {reader} reads slot {slot[reader, n]} "
                f"of rank {source[reader, n]}, which "
                + ("has it at another" if held[reader, n] else "does not hold it")
            )
        everywhere = local.all(axis=0)
        for n in np.flatnonzero(everywhere & (slot != slot[0]).any(axis=0))[:1]:
            self.unequal = self.unequal or (
                f"{self._name(table, int(rows[n]))}: is on all ranks, "
                f"at slots {sorted(set(slot[:, n].tolist()))}"
            )
        copies = local.sum(axis=0)
        self.copies += int((copies - 1).clip(0).sum()) * self._row_memory(table)
        holder, of_row = np.nonzero(local)
        self._mark(table, rows[of_row], holder, slot[holder, of_row])

    def _mark(self, table: int, rows: Ints, rank: Ints, slot: Ints) -> None:
        width = int(self.plan.layout.width_of_table[table])
        for r in range(self.plan.ranks):
            taken, mine = self._taken[width][r], rank == r
            at = slot[mine]
            beyond = at >= len(taken)
            if beyond.any():
                self.misplaced = self.misplaced or (
                    f"{self._name(table, int(rows[mine][beyond][0]))}: slot {at[beyond][0]} of "
                    f"rank {r}, whose arena has {len(taken)}"
                )
                at = at[~beyond]
            elif taken[at].any():
                self.misplaced = self.misplaced or (
                    f"{self._name(table, int(rows[mine][taken[at]][0]))}: slot "
                    f"{at[taken[at]][0]} of rank {r} is another row's too"
                )
            taken[at] = True
            self._marked[width, r] += len(at)

    def clash(self) -> str | None:
        """What is wrong with the slots, once all rows have been added."""
        if self.misplaced is not None:
            return self.misplaced
        for width, arenas in enumerate(self._taken):
            for rank, taken in enumerate(arenas):
                shared = int(self._marked[width, rank]) - int(np.count_nonzero(taken))
                if shared:
                    return f"rank {rank}, width {width}: {shared} rows share slots with others"
        return None

    def unused(self) -> str | None:
        """Slots without a row; they are allowed where rows have moved since the stripes were laid
        out."""
        if self.plan.layout.stripe_bitmap is not None:
            return None
        for width, arenas in enumerate(self._taken):
            for rank, taken in enumerate(arenas):
                holes = len(taken) - int(np.count_nonzero(taken))
                if holes:
                    return f"rank {rank}, width {width}: {holes:,} slots hold no row"
        return None

    def _row_memory(self, table: int) -> int:
        return self.plan.tables[table].memory_bytes(self.plan.workload.mode)

    def _name(self, table: int, row: int) -> str:
        return f"table {self.plan.tables[table].name!r}, row {row}"


def _maps(plan: Plan, folder: Path | str) -> "list[AddressMap]":
    from oper.plan.address_map import AddressMap
    from oper.plan.plan import load_rank_map

    return [
        AddressMap(plan.tables, plan.layout, load_rank_map(folder, rank))
        for rank in range(plan.ranks)
    ]


def _translate(address_map: "AddressMap", table: int, rows: Ints) -> Ints:
    from oper.base.tensors import as_int64

    addresses: Ints = address_map.translate(table, as_int64(rows)).numpy()
    return addresses


def _chunk_rows(plan: Plan) -> int:
    return max(_CHUNK_ADDRESSES // plan.ranks, 1024)


def _all_addresses(plan: Plan, maps: "list[AddressMap]") -> Iterator[tuple[int, Ints, Ints]]:
    """Chunks of rows of a table, with their addresses for each rank, [M, N]."""
    chunk = _chunk_rows(plan)
    for table, rows in enumerate(plan.layout.rows.tolist()):
        for first in range(0, rows, chunk):
            ids = np.arange(first, min(first + chunk, rows))
            yield table, ids, np.stack([_translate(m, table, ids) for m in maps])


def _reference(plan: Plan, maps: "list[AddressMap]") -> str | None:
    """Rows spread over each table, by the definition in oper/plan/layout.py."""
    for table, rows in enumerate(plan.layout.rows.tolist()):
        ids = np.unique(np.linspace(0, rows - 1, min(rows, _REFERENCE_ROWS)).astype(np.int64))
        for rank, address_map in enumerate(maps):
            expected = plan.layout.addresses(table, ids, rank)
            different = np.flatnonzero(_translate(address_map, table, ids) != expected)
            if len(different):
                return (
                    f"table {plan.tables[table].name!r}, row {ids[different[0]]}: rank {rank}'s "
                    "map and the layout disagree"
                )
    return None


def _memory(plan: Plan, placed: _Placement) -> list[Finding]:
    figures, layout = plan.figures, plan.layout
    row_memory = np.array([t.memory_bytes(plan.workload.mode) for t in plan.tables])
    width_memory = np.zeros(len(layout.slots), dtype=np.int64)
    width_memory[layout.width_of_table] = row_memory  # equal for the tables of a width
    memory = width_memory @ layout.slots
    total = int(layout.rows @ row_memory)
    stated, capacity = figures["memory_bytes"], figures["capacity_bytes"]
    findings = [Finding("every slot of the arenas holds a row", placed.unused())]
    wrong = None
    if memory.tolist() != stated:
        rank = int(np.flatnonzero(memory != np.array(stated))[0])
        wrong = f"rank {rank} holds {memory[rank]:,} bytes, and the plan says {stated[rank]:,}"
    findings.append(Finding("memory of each rank is the plan's", wrong))
    over = memory - np.array(capacity)
    wrong = None
    if (over > 0).any() == bool(figures["feasible"]):
        wrong = f"feasible is {figures['feasible']}, and ranks exceed by {over.max():,} bytes"
    elif (over > 0).any():
        wrong = f"rank {over.argmax()} exceeds its capacity by {over.max():,} bytes"
    findings.append(Finding("memory is within each rank's capacity", wrong))
    ratio, asked = placed.copies / total, plan.settings.get("extra_memory")
    wrong = None
    if not np.isclose(ratio, figures["extra_memory_ratio"], rtol=_CLOSE, atol=0):
        wrong = f"copies take {ratio:.6%}, and the plan says {figures['extra_memory_ratio']:.6%}"
    elif asked is not None and ratio > asked * (1 + _CLOSE):
        wrong = f"copies take {ratio:.6%} of the tables' bytes, and {asked:.6%} was asked for"
    findings.append(Finding("copies take the extra memory stated, within that asked for", wrong))
    return findings


def _figures(plan: Plan) -> list[Finding]:
    """The figures add up: each is recomputed from those it is the sum of."""
    f = {
        name: np.array(value) if isinstance(value, list) else value
        for name, value in plan.figures.items()
    }
    away = ~np.eye(plan.ranks, dtype=bool)
    traffic = f["communication_bytes"]
    largest = float(f["rank_seconds"].max())
    rank_seconds = (
        f["lookup_seconds"]
        + f["link_seconds"].sum(axis=1)
        + f["gradient_lookup_seconds"]
        + f["gradient_link_seconds"].sum(axis=1)
        + f["allreduce_seconds"]
    )
    parts = traffic["fetch"] + traffic["gradient"] + traffic["allreduce"]
    memory_share = f["memory_bytes"] / np.maximum(f["capacity_bytes"], 1)
    dob = {
        "memory": _balance(memory_share),
        "lookups": _balance(f["lookup_seconds"]),
        "link_cost": _balance(f["link_seconds"][away]) if plan.ranks > 1 else None,
    }
    equal = {
        "rank_seconds": (f["rank_seconds"], rank_seconds),
        "objective_seconds": (f["objective_seconds"], largest),
        "link_seconds": (f["link_seconds"], f["link_bytes"] * plan.topology.link_cost),
        "communication_bytes.fetch": (traffic["fetch"], f["link_bytes"].sum()),
        "communication_bytes.total": (traffic["total"], parts),
        **{f"dob.{name}": (f["dob"][name], value) for name, value in dob.items()},
    }
    bound = plan.certificate.get("lower_bound_seconds")
    if bound:
        gap = (f["objective_seconds"] - bound) / bound
        equal["certified_gap"] = (1 + plan.certificate["certified_gap"], 1 + gap)
    unequal = [
        name
        for name, (stated, found) in equal.items()
        if (stated is None) != (found is None)
        or (found is not None and not np.allclose(stated, found, rtol=_CLOSE, atol=0))
    ]
    below = bound is not None and f["objective_seconds"] < bound * (1 - _CLOSE)
    return [
        Finding("the figures add up", f"not so: {', '.join(unequal)}" if unequal else None),
        Finding(
            "the objective is not below its lower bound",
            f"{f['objective_seconds']:.9g} s, below {bound:.9g} s" if below else None,
        ),
        Finding("accesses of replicated rows are the plan's", _replica_accesses(plan)),
    ]


def _replica_accesses(plan: Plan) -> str | None:
    layout = plan.layout
    # Codes are taken apart here by their definition, not by row_codes.py, which wrote them.
    bits = max(len(layout.group_width) - 1, 0).bit_length()
    group = (layout.codes.astype(np.uint64) & np.uint64((1 << bits) - 1)).astype(int)
    several = layout.holds.sum(axis=1) > 1
    found = int(plan.explicit_accesses[several[group]].sum(dtype=np.int64)) if len(group) else 0
    if found == plan.replica_accesses:
        return None
    return f"they are {found:,}, and the plan says {plan.replica_accesses:,}"


def _balance(values: NDArray[Any]) -> float:
    """min/max, 1 where all are 0."""
    return float(values.min() / values.max()) if values.max() > 0 else 1.0
