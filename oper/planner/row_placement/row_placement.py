"""From a draft over classes to a placement of rows: what is listed, what is striped, and where.

1. Each table gets a cut: rows accessed more often are listed one by one (explicit), the rest is
   striped; a quota lists some of the rows right at the cut.
2. Stripes take the memory each rank has left; the rows of rounding are evened out by moving the
   coldest listed rows, so that memory is even to one row of each width.
3. One pass over the counters (`scan`) finds the listed rows and what the stripes really carry.
4. Exchanges (`swaps.py`) even out T against those true sums.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.cost.charges import Charges
from oper.cost.expected_reads import expected_reads
from oper.cost.holder_sets import HolderSets
from oper.cost.objective import Cost, evaluate
from oper.cost.sums import Sums
from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.greedy import memory_left, split_evenly, whole_rows
from oper.planner.problem.classes import Classes, table_widths
from oper.planner.problem.problem import Problem
from oper.planner.row_placement.listed_rows import listed_by_table, make_cuts
from oper.planner.row_placement.row_scan import Scan, class_of, scan
from oper.planner.row_placement.striping import Stripes, make_stripes
from oper.planner.row_placement.swaps import SwapSearch
from oper.profiling.profile import Profile

RESERVE_SHARE = 1 / 256


@dataclass(frozen=True)
class RowPlacement:
    """A placement of all rows. `counts` [C, G] are the listed rows; `class_of_row` [E] says which
    class each listed row is of, in order of rows; stripes are one per width."""

    groups: HolderSets
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


def place_rows(
    profile: Profile, problem: Problem, draft: ClassPlacement, reserve_share: float = RESERVE_SHARE
) -> RowPlacement:
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
        listed = listed_by_table(classes, cuts, width_of_table == w)
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
    movable, charges = groups.take(swappable), Charges.of(topology)
    if problem.balance == "link":
        weight = classes.S * classes.R
        aims, seconds = charges.set_link_seconds(movable), before.link_seconds.ravel()
    else:
        aims, seconds = charges.set_seconds(movable), before.rank_seconds
    exchange = SwapSearch(part, weight, classes.width, aims, seconds.copy())
    exchange.run()
    counts[:, swappable] = part
    sums, cost = priced()
    return RowPlacement(
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
    raw, _, _ = expected_reads(
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
    counts: Ints, classes: Classes, groups: HolderSets, stripes: list[Stripes], shares: Floats
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
        dealt = split_evenly(more[some], shares, load, weight[some])
        counts[np.ix_(some, np.arange(ranks))] += dealt
    for c in np.flatnonzero(counts.sum(axis=1) > listed):
        single, replicas = counts[c, :ranks], counts[c, ranks:]
        kept = min(int(replicas.sum()), int(listed[c]))
        if kept < replicas.sum():
            counts[c, ranks:] = whole_rows(replicas.astype(np.float64), kept)
        counts[c, :ranks] = whole_rows(single.astype(np.float64), int(listed[c]) - kept)
    return counts
