"""From a class placement to a placement of rows: the listed rows, the striped rows, and their
ranks.

In: `Problem`, `ClassPlacement`. Out: `RowPlacement`, with its cost.

1. Each table gets a cut: rows accessed more often are listed one by one, the others are striped; a
   quota lists some of the rows with exactly as many accesses.
2. Stripes take the memory that each rank has left. The rows of rounding are evened out by moving
   the coldest listed rows, so that memory is even to one row of each width.
3. One pass over the counters (`list_hot_rows.py`) finds the listed rows and sums the stripes.
4. Swaps (`swaps.py`) even out T against these exact sums; and, if all ranks share one memory, the
   rows that ranks serve, as far as that leaves T unchanged.

If a read costs its reader the same wherever the row is, T depends on gradients alone, in inference
on nothing. Rows of equal width and equal gradients are then interchangeable, and are swapped while
that evens out the reads that ranks serve: a tie that the objective leaves open. In training a rank
may own too few rows whose gradients are equal, such as those touched in every batch, and serve
several times as many reads as another, or a fraction.
"""

from dataclasses import dataclass, replace

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.expected_reads import expected_reads
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.objective import Cost
from oper.cost.traffic import Direction
from oper.cost.vectors_per_bag import pooled_of
from oper.planner.class_placement.class_placement import ClassPlacement, replica_bytes
from oper.planner.class_placement.greedy import memory_left
from oper.planner.class_placement.rounding import split_evenly, whole_rows
from oper.planner.problem.classes import Classes, table_widths
from oper.planner.problem.problem import Problem
from oper.planner.row_placement.aim import aimed_at, aimed_directions
from oper.planner.row_placement.capacity_repair import keep_capacity, memory_bytes
from oper.planner.row_placement.even_many_ranks import even_many_ranks
from oper.planner.row_placement.list_hot_rows import (
    Cuts,
    RowScan,
    StripeOrders,
    listed_by_table,
    make_cuts,
    scan_by_cuts,
)
from oper.planner.row_placement.striping import Stripes, make_stripes
from oper.planner.row_placement.swaps import SwapSearch, set_by_set

_FEW_CLASSES = 64  # the coldest, tried first to even memory out
RESERVE_SHARE = 1 / 256  # 0.016 bytes a row in the address map (list_hot_rows.py)


@dataclass(frozen=True)
class RowPlacement:
    """A placement of all rows: C classes, G holder sets, E listed rows."""

    holder_sets: HolderSets
    counts: Ints  # [C, G] listed rows
    stripes: list[Stripes]  # one a pattern
    pattern_of: Ints  # [T] each table's among `stripes`
    scan: RowScan
    sums: Sums  # of the rows of each holder set, striped ones too
    cost: Cost
    cost_before_swaps: Cost
    swaps: int


def place_rows(
    problem: Problem,
    placement: ClassPlacement,
    reserve_share: float = RESERVE_SHARE,
    even: bool = True,
) -> RowPlacement:
    """Place every row of the profile as the class placement says.

    At least `reserve_share` of all rows are listed with one owner, to even out the ranks with: by
    swaps of them, unless not `even`.
    """
    classes, ranks = problem.classes, problem.ranks
    traffic = classes.traffic_bytes(problem.workload)
    # Holder sets without rows are left out, but for the single owners.
    used = np.r_[np.ones(ranks, dtype=bool), placement.counts[:, ranks:].any(axis=0)]
    sets = placement.holder_sets.take(used)
    counts = np.compress(used, placement.counts, axis=1)

    width_of_table = table_widths(problem.profile.tables, problem.workload.mode).of_table
    replicas = counts[:, ranks:].sum(axis=1)
    cuts = make_cuts(classes, width_of_table, counts.sum(axis=1), replicas, reserve_share)
    list_exactly(counts, cuts.listed, placement.shares, traffic)
    stripes = _make_stripes(problem, placement, sets, counts, cuts, width_of_table)
    orders = StripeOrders.of(stripes, width_of_table)
    scan = scan_by_cuts(problem.profile, cuts.cut, cuts.quota, orders, classes)
    list_exactly(counts, scan.listed_of_classes, placement.shares, traffic)
    even_memory(counts, classes, sets, stripes, placement.shares)
    striped_sums = stripe_sums(problem, scan)
    keep_capacity(problem, sets, counts, striped_sums.memory_bytes)
    striped_sums = striped_sums.append(Sums.zeros(len(sets) - ranks, classes.D_of_node.shape[1]))

    before = problem.price(sets, classes.sums(counts) + striped_sums)
    swaps = even_out(problem, sets, counts, before) if even else 0
    sums = classes.sums(counts) + striped_sums
    cost = problem.price(sets, sums)
    return RowPlacement(sets, counts, stripes, width_of_table, scan, sums, cost, before, swaps)


def with_counts(
    problem: Problem, placement: RowPlacement, counts: Ints, swaps: int
) -> RowPlacement:
    """Return the placement with other `counts` [C, G] of its listed rows, after so many more rounds
    of swaps."""
    striped = stripe_sums(problem, placement.scan)
    more = len(placement.holder_sets) - problem.ranks
    sums = problem.classes.sums(counts) + striped.append(
        Sums.zeros(more, problem.classes.D_of_node.shape[1])
    )
    cost = problem.price(placement.holder_sets, sums)
    return replace(placement, counts=counts, sums=sums, cost=cost, swaps=placement.swaps + swaps)


def _make_stripes(
    problem: Problem,
    placement: ClassPlacement,
    sets: HolderSets,
    counts: Ints,
    cuts: Cuts,
    width_of_table: Ints,
) -> list[Stripes]:
    """Return the stripes of each width, in proportion to the memory that each rank has left."""
    classes, ranks = problem.classes, problem.ranks
    replicas = replica_bytes(classes, sets, counts[:, ranks:])
    striped = classes.rows - cuts.listed
    left = memory_left(classes, counts[:, :ranks], striped, replicas, placement.shares)
    stripes = []
    for w in range(len(classes.widths)):
        table_rows = np.zeros(len(width_of_table), dtype=np.int64)
        of_width = classes.width[classes.entry_class] == w
        np.add.at(table_rows, classes.entry_table[of_width], classes.entry_rows[of_width])
        listed = listed_by_table(classes, cuts, width_of_table == w)
        stripes.append(make_stripes(left, table_rows - listed))
    return stripes


def even_out(problem: Problem, sets: HolderSets, counts: Ints, before: Cost) -> int:
    """Swap rows of `counts` [C, G], in place, while that lowers T, or the slowest link if links are
    to be even, and return the number of rounds."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    movable = slice(problem.ranks if workload.training else len(sets))
    part = set_by_set(counts[:, movable])
    able = sets.take(movable)
    directions = aimed_directions(problem, able)
    search = SwapSearch(part, directions, classes.width, aimed_at(problem, before).copy())
    if problem.asked.balance == "time":
        even_many_ranks(search, topology)
    search.run()
    rounds = search.rounds_made
    if problem.topology.is_one_memory and problem.asked.balance == "time":
        served = before.lookups + dot(dot(classes.R, part - counts[:, movable]), able.readers)
        rounds += even_rows_served(classes, able, directions, part, served)
    counts[:, movable] = part
    return rounds


def stripe_sums(problem: Problem, scan: RowScan) -> Sums:
    """Return the sums of the striped rows on each rank, [M], from the scan.

    R is linear in the accesses that are expected when fetches are raw or pooled, and is D
    otherwise, so both follow from Σ expected accesses and Σ D per table and rank; the rows that
    nodes touch follow from Σ D of a node.
    """
    profile, ranks = problem.profile, problem.ranks
    S = np.array([table.row_bytes for table in profile.tables], dtype=np.float64)[:, None]
    m = np.array(
        [table.memory_bytes(problem.workload.mode) for table in profile.tables], dtype=np.float64
    )[:, None]
    rows = scan.striped_rows.astype(np.float64)
    accesses = scan.striped_accesses.astype(np.float64)
    touched = scan.striped_touched
    expected = scan.striped_expected
    workload = replace(problem.workload, fetch="raw")
    raw, _, _ = expected_reads(expected, np.zeros_like(expected), profile.samples, workload, ranks)
    pooled = pooled_of(problem.topology, profile.tables)[:, None]
    once = (problem.workload.fetch == "distinct") & ~pooled
    reads = np.where(once, touched, raw)
    none = np.zeros(ranks)
    of_nodes = scan.striped_of_nodes * ~pooled
    return Sums(
        rows=rows.sum(axis=0),
        memory_bytes=(m * rows).sum(axis=0),
        row_bytes=(S * rows).sum(axis=0),
        accesses=accesses.sum(axis=0),
        read_rows=reads.sum(axis=0),
        read_bytes=(S * reads).sum(axis=0),
        gradient_bytes=(S * touched).sum(axis=0),
        union_bytes=none,  # of replicas alone, which are never striped
        gather_bytes=none,
        node_rows=of_nodes.sum(axis=1).T,
        node_bytes=(S * of_nodes).sum(axis=1).T,
        pooled_read_rows=(reads * pooled).sum(axis=0),
        pooled_read_bytes=(S * reads * pooled).sum(axis=0),
        pooled_gradient_bytes=(S * touched * pooled).sum(axis=0),
    )


def even_memory(
    counts: Ints, classes: Classes, sets: HolderSets, stripes: list[Stripes], shares: Floats
) -> None:
    """Move the coldest listed rows with one owner, in place, until memory follows `shares` [M] to
    one row of each width. If a rank has too few such rows, others get fewer."""
    ranks = len(shares)
    memory = memory_bytes(classes, sets, counts)
    for width, made in zip(classes.widths, stripes, strict=True):
        memory += made.rows.sum(axis=0) * float(width.memory_bytes)
    target = memory.sum() * shares / shares.sum()
    for w in classes.widest_first():
        row_bytes = float(classes.widths[w].memory_bytes)
        surplus = (memory - target) / row_bytes
        rows = np.floor(surplus + 1e-9).astype(np.int64)
        # Whole rows that sum to none: the largest fractions are rounded up.
        short = -int(rows.sum())
        if short > 0:
            rows[np.argsort(rows - surplus, kind="stable")[: min(short, ranks)]] += 1
        if rows.sum() != 0 or not rows.any():
            continue
        coldest = np.flatnonzero(classes.width == w)[::-1]
        givers, takers = np.flatnonzero(rows > 0), np.flatnonzero(rows < 0)
        # The fewest of the coldest classes in which all givers find enough rows.
        few = _FEW_CLASSES
        while (
            few < len(coldest)
            and (counts[np.ix_(coldest[:few], givers)].sum(axis=0) < rows[givers]).any()
        ):
            few *= 4
        looked_at = coldest[:few]
        held = counts[np.ix_(looked_at, givers)]
        give = np.clip(rows[givers] - (np.cumsum(held, axis=0) - held), 0, held)
        counts[np.ix_(looked_at, givers)] = held - give
        memory[givers] -= give.sum(axis=0) * row_bytes
        # Each taker takes the coldest of what those before it have left.
        moving = give.sum(axis=1)
        until = np.minimum(np.cumsum(-rows[takers]), moving.sum())
        since = np.concatenate([[0], until[:-1]])
        end = np.cumsum(moving)[:, None]
        take = np.minimum(end, until) - np.maximum(end - moving[:, None], since)
        counts[np.ix_(looked_at, takers)] += np.maximum(take, 0)
        memory[takers] += (until - since) * row_bytes


def list_exactly(counts: Ints, listed: Ints, shares: Floats, traffic: Floats) -> None:
    """Bring `counts` [C, G], in place, to `listed[c]` rows of each class: further ones go to single
    owners, and if there are fewer, single owners lose rows in proportion, and holders of replicas
    last."""
    ranks = len(shares)
    more = listed - counts.sum(axis=1)
    some = np.flatnonzero(more > 0)
    if len(some):
        load = dot(traffic, counts[:, :ranks])
        counts[some, :ranks] += split_evenly(more[some], shares, load, traffic[some])
    for c in np.flatnonzero(more < 0):
        single, replicas = counts[c, :ranks], counts[c, ranks:]
        kept = min(int(replicas.sum()), int(listed[c]))
        if kept < replicas.sum():
            counts[c, ranks:] = whole_rows(replicas.astype(np.float64), kept)
        counts[c, :ranks] = whole_rows(single.astype(np.float64), int(listed[c]) - kept)


_ROUNDING = 1e-12  # of sums of seconds
_ALIKE = 1e-9  # gradients that differ by less, relative to the largest, are equal


def even_rows_served(
    classes: Classes,
    sets: HolderSets,
    directions: tuple[Direction, ...],
    counts: Ints,
    rows_served: Floats,
) -> int:
    """Swap rows of `counts` [C, G], in place, and return the number of rounds. `directions` are
    those of reads and, in training, of gradients; `rows_served` [M] is by each rank, changed in
    place."""
    reads, *gradients = directions
    if (np.ptp(reads.columns, axis=0) > _ROUNDING * reads.columns.max(axis=0)).any():
        return 0
    alike = [np.rint(bytes / (bytes.max() or 1.0) / _ALIKE) for bytes, _ in gradients]
    _, kind = np.unique(np.stack([classes.width, *alike]), axis=1, return_inverse=True)
    kind = kind.ravel()
    some = np.flatnonzero(np.bincount(kind)[kind] > 1)
    if not len(some):
        return 0
    served = Direction(classes.R[some], sets.readers.astype(np.float64))
    part = set_by_set(counts[some])
    search = SwapSearch(part, (served,), kind[some], rows_served)
    search.run()
    counts[some] = part
    return search.rounds_made
