"""From a draft over classes to a placement of rows: what is listed, what is striped, and where.

1. Each table gets a cut: rows accessed more often are listed one by one (explicit), the rest is
   striped; a quota lists some of the rows right at the cut.
2. Stripes take the memory each rank has left; the rows of rounding are evened out by moving the
   coldest listed rows, so that memory is even to one row of each width.
3. One pass over the counters (`scan`) finds the listed rows and what the stripes really carry.
4. Exchanges (`refine.py`) even out T against those true sums.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.cost import Cost, Floats, Groups, Sums, evaluate, expected
from oper.planner.classes import Classes, Ints, table_widths
from oper.planner.draft import Draft, Problem
from oper.planner.placement import deal_evenly, memory_left, whole_rows
from oper.planner.profile import Profile
from oper.planner.refine import Exchange, columns, pair_columns
from oper.planner.scan import Scan, class_of, scan
from oper.planner.stripes import Stripes, make_stripes

# Listed single rows of each width there are at least, to even out the chance differences between
# stripes with: so many, and one row in so many (0.016 bytes a row in the address map).
_RESERVE_ROWS = 4096
RESERVE_SHARE = 1 / 256


@dataclass(frozen=True)
class Realised:
    """A placement of all rows. `counts` [C, G] are the listed rows; `class_of_row` [E] says which
    class each listed row is of, in order of rows; stripes are one per width."""

    groups: Groups
    counts: Ints
    cut: Ints
    quota: Ints
    stripes: list[Stripes]
    scan: Scan
    class_of_row: NDArray[np.int32]
    sums: Sums
    cost: Cost
    cost_before: Cost  # before exchanges
    exchanges: int


@dataclass(frozen=True)
class Cuts:
    """Rows of table t accessed more than `cut[t]` times are listed, and the first `quota[t]` of
    those accessed exactly so often. `listed` [C] counts them by class, exactly where no two
    classes of a table share their accesses and nearly elsewhere."""

    cut: Ints
    quota: Ints
    listed: Ints


def make_cuts(
    classes: Classes, width_of_table: Ints, wanted: Ints, replicas: Ints, reserve_share: float
) -> Cuts:
    """The least cuts that list at least `wanted[c]` rows of each class, and, beside the
    `replicas[c]` among them, a reserve."""
    tables = len(width_of_table)
    cut = np.full(tables, np.iinfo(np.int64).max)
    quota = np.zeros(tables, dtype=np.int64)
    listed = np.zeros(len(classes), dtype=np.int64)
    entry_accesses = classes.accesses[classes.entry_class]
    for w in range(len(classes.widths)):
        mine = np.flatnonzero(classes.width == w)  # accesses descend
        if not len(mine):
            continue
        rows, single = classes.rows[mine], classes.rows[mine] - replicas[mine]
        reserve = max(_RESERVE_ROWS, int(rows.sum() * reserve_share))
        reserve = min(int(single.sum()), reserve)
        last = np.flatnonzero(wanted[mine])
        by_wanted = int(last[-1]) if len(last) else 0
        by_reserve = int(np.searchsorted(np.cumsum(single), reserve))
        edge = int(classes.accesses[mine[max(by_wanted, min(by_reserve, len(mine) - 1))]])
        above = mine[classes.accesses[mine] > edge]
        level = mine[classes.accesses[mine] == edge]
        listed[above] = classes.rows[above]
        spare = int((listed[above] - replicas[above]).sum())
        need = max(int(wanted[level].sum()), reserve - spare + int(replicas[level].sum()))
        of_width = np.flatnonzero(width_of_table == w)
        cut[of_width] = edge
        # At the cut: wanted classes first, then whichever, table after table.
        for c in sorted(level.tolist(), key=lambda c: -int(wanted[c])):
            entries = np.flatnonzero((classes.entry_class == c) & (entry_accesses == edge))
            for e in entries:
                take = min(need, int(classes.entry_rows[e]))
                quota[classes.entry_table[e]] += take
                listed[c] += take
                need -= take
    return Cuts(cut, quota, listed)


def realise(
    profile: Profile, problem: Problem, draft: Draft, reserve_share: float = RESERVE_SHARE
) -> Realised:
    """Place every row of the profile as the draft says; `reserve_share` of all rows at least are
    listed beside the replicas, to even out the rest with."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    ranks = topology.ranks
    widths, width_of_table = table_widths(profile.tables, workload.mode)
    groups = draft.groups
    used = np.r_[np.ones(ranks, dtype=bool), draft.counts[:, ranks:].any(axis=0)]
    groups, counts = groups.take(used), draft.counts[:, used]

    replicas = counts[:, ranks:].sum(axis=1)
    cuts = make_cuts(classes, width_of_table, counts.sum(axis=1), replicas, reserve_share)
    weight = classes.weight(workload)
    counts = _match(counts, cuts.listed, classes, ranks, draft.shares, weight)
    striped = classes.rows - cuts.listed
    replica = groups.holds[ranks:].T @ (counts[:, ranks:].T @ classes.m)
    left = memory_left(classes, counts[:, :ranks], striped, replica, draft.shares)

    stripes = []
    for w in range(len(widths)):
        table_rows = np.zeros(len(profile.tables), dtype=np.int64)
        of_width = classes.width[classes.entry_class] == w
        np.add.at(table_rows, classes.entry_table[of_width], classes.entry_rows[of_width])
        listed = _listed_by_table(classes, cuts, width_of_table == w)
        stripes.append(make_stripes(left, table_rows - listed))

    scanned = scan(profile, cuts.cut, cuts.quota, stripes, width_of_table, classes)
    rows_class = class_of(
        scanned.explicit_accesses, scanned.explicit_containing, classes, profile, scanned
    )
    found = np.bincount(rows_class, minlength=len(classes))
    counts = _match(counts, found, classes, ranks, draft.shares, weight)
    even_memory(counts, classes, groups, stripes, draft.shares)
    striped_sums = stripe_sums(profile, problem, scanned, ranks)

    def priced() -> tuple[Sums, Cost]:
        sums = classes.sums(counts)
        sums = sums + striped_sums.append(Sums.zeros(len(groups) - ranks))
        return sums, evaluate(topology, workload, groups, sums, problem.capacity_bytes)

    sums, before = priced()
    swappable = np.ones(len(groups), dtype=bool)
    if workload.training:
        swappable[ranks:] = False
    part = np.ascontiguousarray(counts[:, swappable])
    movable = groups.take(swappable)
    if problem.balance == "link":
        weight = classes.S * classes.R
        aims, seconds = pair_columns(movable, topology), before.link_seconds.ravel()
    else:
        aims, seconds = columns(movable, topology), before.rank_seconds
    exchange = Exchange(part, weight, classes.width, aims, seconds.copy())
    exchange.run()
    counts[:, swappable] = part
    sums, cost = priced()
    return Realised(
        groups=groups,
        counts=counts,
        cut=cuts.cut,
        quota=cuts.quota,
        stripes=stripes,
        scan=scanned,
        class_of_row=rows_class,
        sums=sums,
        cost=cost,
        cost_before=before,
        exchanges=exchange.rounds_made,
    )


def stripe_sums(profile: Profile, problem: Problem, scanned: Scan, ranks: int) -> Sums:
    """The sums of the striped rows on each rank, one group a rank, from what the scan found.

    R is linear in accesses when fetches are raw and is D otherwise, so both follow from
    Σ accesses and Σ D per table and rank.
    """
    S = np.array([table.row_bytes for table in profile.tables], dtype=np.float64)[:, None]
    m = np.array(
        [table.memory_bytes(problem.workload.mode) for table in profile.tables], dtype=np.float64
    )[:, None]
    rows = scanned.striped_rows.astype(np.float64)
    accesses = scanned.striped_accesses.astype(np.float64)
    touched = scanned.striped_touched
    raw, _, _ = expected(
        accesses, np.zeros_like(accesses), profile.samples, problem.workload, ranks
    )
    reads = raw if problem.workload.fetch == "raw" else touched
    none = np.zeros(ranks)
    return Sums(
        rows=rows.sum(axis=0),
        memory_bytes=(m * rows).sum(axis=0),
        row_bytes=(S * rows).sum(axis=0),
        accesses=accesses.sum(axis=0),
        read_rows=reads.sum(axis=0),
        read_bytes=(S * reads).sum(axis=0),
        gradient_bytes=(S * touched).sum(axis=0),
        union_bytes=none,  # asked for of replicas only, which are never striped
        gather_bytes=none,
    )


def even_memory(
    counts: Ints, classes: Classes, groups: Groups, stripes: list[Stripes], shares: Floats
) -> None:
    """Move the coldest listed single rows, in place, until memory follows `shares` to a row."""
    ranks = len(shares)
    memory: Floats = groups.holds.T @ (counts.T @ classes.m)
    for (_, m), made in zip(classes.widths, stripes, strict=True):
        memory += made.rows.sum(axis=0) * float(m)
    target = memory.sum() * shares / shares.sum()
    for w in np.argsort([-m for _, m in classes.widths], kind="stable").tolist():
        row_bytes = float(classes.widths[w][1])
        surplus = (memory - target) / row_bytes
        rows = np.floor(surplus + 1e-9).astype(np.int64)
        # Whole rows that sum to none: the largest fractions are rounded up.
        short = -int(rows.sum())
        if short > 0:
            rows[np.argsort(rows - surplus, kind="stable")[: min(short, ranks)]] += 1
        if rows.sum() != 0 or not rows.any():
            continue
        moving = np.zeros(len(classes), dtype=np.int64)
        mine = np.flatnonzero(classes.width == w)[::-1]
        for r in np.flatnonzero(rows > 0):
            held = counts[mine, r]
            give = np.clip(rows[r] - (np.cumsum(held) - held), 0, held)
            counts[mine, r] -= give
            moving[mine] += give
            memory[r] -= float(give.sum()) * row_bytes
        for r in np.flatnonzero(rows < 0):
            held = moving[mine]
            take = np.clip(-rows[r] - (np.cumsum(held) - held), 0, held)
            counts[mine, r] += take
            moving[mine] -= take
            memory[r] += float(take.sum()) * row_bytes
        # A donor short of listed rows leaves receivers short, never rows without a home.


def _match(
    counts: Ints, listed: Ints, classes: Classes, ranks: int, shares: Floats, weight: Floats
) -> Ints:
    """Counts whose rows of each class are `listed[c]`: more are dealt to single owners, fewer
    are taken from single owners in proportion, and from replicas last."""
    counts = counts.copy()
    more = np.clip(listed - counts.sum(axis=1), 0, None)
    some = np.flatnonzero(more)
    if len(some):
        load = weight @ counts[:, :ranks]
        dealt = deal_evenly(more[some], shares, load, weight[some])
        counts[np.ix_(some, np.arange(ranks))] += dealt
    for c in np.flatnonzero(counts.sum(axis=1) > listed):
        single, replicas = counts[c, :ranks], counts[c, ranks:]
        kept = min(int(replicas.sum()), int(listed[c]))
        if kept < replicas.sum():
            counts[c, ranks:] = whole_rows(replicas.astype(np.float64), kept)
        counts[c, :ranks] = whole_rows(single.astype(np.float64), int(listed[c]) - kept)
    return counts


def _listed_by_table(classes: Classes, cuts: Cuts, of_width: NDArray[np.bool_]) -> Ints:
    """Listed rows of each table, [T], of the tables marked `of_width` [T]."""
    listed = np.zeros(len(of_width), dtype=np.int64)
    table, accesses = classes.entry_table, classes.accesses[classes.entry_class]
    above = of_width[table] & (accesses > cuts.cut[table])
    np.add.at(listed, table[above], classes.entry_rows[above])
    return listed + np.where(of_width, cuts.quota, 0)
