"""Random plans for the tests of the runtime: any placement is right, so none is planned."""

from dataclasses import replace

import numpy as np

from oper.base import native
from oper.base.arrays import as_int64, as_tensor
from oper.cost.objective import Balance, Cost
from oper.cost.workload import Workload
from oper.plan.layout import Layout
from oper.plan.memories import DEVICE, HOST, Memory, PlanningRecord, ThresholdReason
from oper.plan.plan import ListedCounts, Plan
from oper.plan.row_codes import marked_groups, with_marks
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.topology import Topology


def random_plan(
    seed: int,
    tables: tuple[Table, ...],
    ranks: int,
    *,
    replicated: float = 0.2,
    listed: float = 0.4,
    fetch: str = "raw",
    mode: str = "training",
    method: str = "bitmap",
    idle: tuple[int, ...] = (),
    tier: tuple[int, ...] = (),
    nodes: tuple[int, ...] = (),
) -> Plan:
    """A plan that replicates a share of the rows, lists others by a random owner and stripes the
    rest; `idle` ranks own nothing. In inference replicas lie on some of the ranks only, and some
    ranks read another's copy of what they hold. With `nodes`, of one size, by rank, many replicas
    have a copy on each node. Of odd seeds, rows on all ranks have marks instead of codes, as in
    plans. Tables of the `tier` have no replicas."""
    rng = np.random.default_rng(seed)
    owners = [r for r in range(ranks) if r not in idle]
    size_of = [(t.row_bytes, t.memory_bytes(mode), n in tier) for n, t in enumerate(tables)]
    sizes = sorted(set(size_of))
    width_of_table = np.array([sizes.index(size) for size in size_of])
    holds, source = _groups(rng, ranks, owners, mode, nodes)
    shares = [_shares(0.0 if n in tier else replicated, listed) for n in range(len(tables))]
    fate = [rng.choice(3, t.rows, p=p) for t, p in zip(tables, shares, strict=True)]
    group_of = []
    for f in fate:
        copied = rng.integers(len(owners), len(holds), len(f))
        group_of.append(np.where(f == 0, copied, rng.integers(0, len(owners), len(f))))
    several = holds.sum(axis=1) > 1
    turn = np.where(holds.all(axis=1), 0, np.where(several & bool(nodes), 1, 2))
    pairs = sorted(
        {
            (int(w), int(g))
            for t, w in enumerate(width_of_table)
            for g in np.unique(group_of[t][fate[t] < 2])
        },
        key=lambda pair: (pair[0], turn[pair[1]], pair[1]),
    ) or [(0, 0)]
    number = np.zeros((len(sizes), len(holds)), dtype=np.int64)
    number[tuple(np.transpose(pairs))] = np.arange(len(pairs))
    lines = [max(-(-t.rows // 448), 1) for t in tables]
    line_offset = np.r_[0, np.cumsum(lines)].astype(np.int64)
    bitmap = np.zeros((line_offset[-1], 8), np.uint64)
    numbers = []
    for t, table in enumerate(tables):
        marks = np.zeros(lines[t] * 448, bool)
        marks[: table.rows] = fate[t] < 2
        words = np.packbits(marks, bitorder="little").view(np.uint64).reshape(-1, 7)
        bitmap[line_offset[t] : line_offset[t + 1], 1:] = words
        numbers.append(number[width_of_table[t], group_of[t][fate[t] < 2]])
    of_rows = np.concatenate(numbers)
    used = np.bincount(of_rows, minlength=len(pairs))
    place_in_group = np.empty(len(of_rows), dtype=np.int64)
    first_of_group = np.cumsum(used) - used
    place_in_group[np.argsort(of_rows, kind="stable")] = np.arange(len(of_rows)) - np.repeat(
        first_of_group, used
    )
    codes = place_in_group << max(len(pairs) - 1, 0).bit_length() | of_rows
    listed_offset = (
        native.ops().number_bitmap(as_tensor(bitmap.view(np.int64)), as_int64(line_offset)).numpy()
    )
    order = rng.choice(owners, 7).astype(np.uint16)
    slots = np.zeros((len(sizes), ranks), dtype=np.int64)
    base = np.full((len(pairs), ranks), -1, dtype=np.int64)
    for n, (w, g) in enumerate(pairs):
        base[n] = np.where(holds[g], slots[w], -1)
        slots[w] += holds[g] * used[n]
    rotation = rng.integers(0, len(order), len(tables))
    stripe_base = np.zeros((len(tables), ranks), dtype=np.int64)
    for t, w in enumerate(width_of_table):
        stripe_base[t] = slots[w]
        striped = int((fate[t] == 2).sum())
        turn = (np.arange(striped) + rotation[t]) % len(order)
        slots[w] += np.bincount(order[turn], minlength=ranks)
    groups = [g for _, g in pairs]
    packed = codes.astype(np.uint32)
    marked = marked_groups(packed, holds[groups], bitmap, listed_offset) if seed % 2 else None
    layout = Layout(
        rows=np.array([t.rows for t in tables], np.int64),
        width_of_table=width_of_table.astype(np.int64),
        slots=slots,
        group_width=np.array([w for w, _ in pairs], np.int64),
        source=source[groups],
        holds=holds[groups],
        base=base,
        orders=(order,),
        pattern_of=np.zeros(len(tables), np.int64),
        rotation=rotation,
        stripe_base=stripe_base,
        line_offset=line_offset,
        bitmap=bitmap,
        **with_marks(packed, len(groups), bitmap, line_offset, marked)._asdict(),
    )
    nothing = np.zeros(len(layout.codes), dtype=np.uint32)
    return Plan(
        tables=tables,
        topology=Topology(
            "test", nodes or (0,) * ranks, np.ones((ranks, ranks)), 1.0, Latency.of_hops(0.0)
        ),
        workload=Workload(mode, fetch, 64),  # type: ignore[arg-type]
        layout=layout,
        counts=ListedCounts(nothing, nothing, *np.zeros((2, len(tables)), dtype=np.int64)),
        memories=_memories(len(tables), ranks, tier, method),
        samples=1,
        profile="",
    )


def _memories(tables: int, ranks: int, tier: tuple[int, ...], method: str) -> tuple[Memory, ...]:
    """The memories of so many tables, of which nothing is read."""
    nothing, none = np.zeros(ranks, dtype=np.int64), ThresholdReason.NOT_PLACED_BY_PARTITIONS
    cost = replace(Cost.of_no_rows(np.zeros(ranks)), allreduce_method=method)  # type: ignore[arg-type]
    record = PlanningRecord(1.0, "test", none, None, Balance(1.0, 1.0, None), 0)
    on_devices = tuple(t for t in range(tables) if t not in tier)
    found = [Memory(DEVICE, on_devices, cost, nothing, record=record)]
    if tier:
        found.append(Memory(HOST, tier, Cost.of_no_rows(np.zeros(ranks)), nothing, record=record))
    return tuple(found)


def _shares(replicated: float, listed: float) -> list[float]:
    return [replicated, (1 - replicated) * listed, (1 - replicated) * (1 - listed)]


def _groups(
    rng: np.random.Generator, ranks: int, owners: list[int], mode: str, nodes: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """One group per owner, then those with copies: on all ranks, in inference on some, and on one
    of each of the `nodes`."""
    single = np.zeros((len(owners), ranks), bool)
    single[np.arange(len(owners)), owners] = True
    several = [np.ones(ranks, bool)]
    if mode == "inference":
        for _ in range(3):
            some = rng.random(ranks) < 0.5
            some[rng.integers(0, ranks)] = True
            several.append(some)
    if nodes:
        members = [np.flatnonzero(np.array(nodes) == node) for node in sorted(set(nodes))]
        several += [np.isin(np.arange(ranks), holders) for holders in np.array(members).T]
    holds = np.concatenate([single, several])
    if nodes:
        near = [np.array(nodes) == node for node in nodes]
        own = np.eye(ranks, dtype=bool)
        order = [[h & own[r], h & near[r], h] for h in holds for r in range(ranks)]
        first = [next(int(of.argmax()) for of in each if of.any()) for each in order]
        return holds, np.array(first, dtype=np.uint16).reshape(holds.shape)
    source = [[r if h[r] else rng.choice(np.flatnonzero(h)) for r in range(ranks)] for h in holds]
    if mode == "inference":
        # Some holders read another's copy, as where their own memory is slower than a link.
        for g in range(len(single), len(holds)):
            for r in np.flatnonzero(holds[g] & (rng.random(ranks) < 0.3)):
                source[g][r] = rng.choice(np.flatnonzero(holds[g]))
    return holds, np.array(source, dtype=np.uint16)
