"""Rows of pooled tables at their homes: from how many rows of each class have copies, and the nodes
of each table, to a placement of rows.

In: a `Problem` whose classes are of one table each, copies, `Homes`. Out: `RowPlacement`. As in
row_placement.py rows above a cut of each table are listed and the others striped, by a pattern for
each home; and the rows with one owner are even over the ranks of a home's nodes. Rows of tables
that are not pooled are swapped between all ranks; then swaps even out the ranks of each node among
themselves, because the vectors of a pooled table's bags follow from its share of a node. The homes
already decided how even nodes are beyond that.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.traffic import Direction
from oper.planner.class_placement.homes import Homes
from oper.planner.class_placement.homogeneous import HOT_SHARE
from oper.planner.class_placement.pooled_copies import table_of_class
from oper.planner.class_placement.rounding import split_evenly
from oper.planner.problem.problem import ClassProblem, Problem
from oper.planner.row_placement.capacity_repair import keep_capacity
from oper.planner.row_placement.list_hot_rows import (
    StripeOrders,
    listed_by_table,
    make_cuts,
    scan_by_cuts,
)
from oper.planner.row_placement.row_placement import (
    RowPlacement,
    list_exactly,
    stripe_sums,
)
from oper.planner.row_placement.striping import make_stripes
from oper.planner.row_placement.swaps import SwapSearch, set_by_set


def place_at_homes(
    problem: Problem, sets: HolderSets, replicas: Ints, homes: Homes, reserve_share: float
) -> RowPlacement:
    """Place every row: `replicas` [C, G - M] of each class in the `sets` after the M single owners,
    the others on their tables' homes, at least `reserve_share` of them listed."""
    classes, ranks, tables = problem.classes, problem.ranks, problem.profile.tables
    traffic, table = classes.traffic_bytes(problem.workload), table_of_class(classes)
    shares = homes.of_ranks(np.array(problem.topology.node_of))
    copied = replicas.sum(axis=1)
    hot = traffic * ranks > HOT_SHARE * float(dot(traffic, classes.rows))
    wanted = np.where(hot, classes.rows, copied)
    by_table = replace(
        classes,
        width=table,
        widths=tuple(classes.widths[w] for w in _width_of_tables(problem)),
    )
    number = np.arange(len(tables))
    cuts = make_cuts(by_table, number, wanted, copied, reserve_share)
    listed = listed_by_table(classes, cuts, np.ones(len(tables), dtype=bool))

    rows = np.array([each.rows for each in tables], dtype=np.int64)
    patterns, pattern_of = np.unique(shares, axis=0, return_inverse=True)
    pattern_of = pattern_of.ravel()
    stripes = [
        make_stripes(pattern, np.where(pattern_of == p, rows - listed, 0))
        for p, pattern in enumerate(patterns)
    ]
    orders = StripeOrders.of(stripes, pattern_of)
    scan = scan_by_cuts(problem.profile, cuts.cut, cuts.quota, orders, classes)
    listed_rows = scan.listed_of_classes

    none = np.zeros((len(classes), ranks), dtype=np.int64)
    counts = np.concatenate([none, replicas], axis=1)
    equal = np.full(ranks, 1 / ranks)
    list_exactly(counts, np.minimum(listed_rows, copied), equal, traffic)
    single = listed_rows - counts.sum(axis=1)
    counts[:, :ranks] += _split(single, shares[table], traffic, hot)
    striped_sums = stripe_sums(problem, scan)
    keep_capacity(problem, sets, counts, striped_sums.memory_bytes)
    striped_sums = striped_sums.append(Sums.zeros(len(sets) - ranks, classes.D_of_node.shape[1]))

    before = problem.price(sets, classes.sums(counts) + striped_sums)
    seconds = before.rank_seconds.copy()
    swaps = _swap_fetched(problem, sets, counts, seconds)
    swaps += swap_in_nodes(problem, sets, counts, seconds)
    sums = classes.sums(counts) + striped_sums
    cost = problem.price(sets, sums)
    return RowPlacement(sets, counts, stripes, pattern_of, scan, sums, cost, before, swaps)


def _width_of_tables(problem: Problem) -> Ints:
    """Return the index of each table's width, [T]."""
    classes = problem.classes
    width = np.zeros(len(problem.profile.tables), dtype=np.int64)
    width[classes.entry_table] = classes.width[classes.entry_class]
    return width


def _split(rows: Ints, shares: Floats, traffic: Floats, hot: NDArray[np.bool_]) -> Ints:
    """Return the rows of each class on each rank, [C, M], by `shares` [C, M]: whole rows that are
    hot go one by one to the rank with least traffic for its share, most first."""
    counts = np.zeros(shares.shape, dtype=np.int64)
    load = np.zeros(shares.shape[1])
    hottest = np.flatnonzero(hot & (rows > 0))
    for c in hottest[np.argsort(-traffic[hottest], kind="stable")].tolist():
        ranks = np.flatnonzero(shares[c])
        for _ in range(int(rows[c])):
            rank = ranks[((load[ranks] + traffic[c]) / shares[c, ranks]).argmin()]
            counts[c, rank] += 1
            load[rank] += traffic[c]
    cold = np.flatnonzero(~hot & (rows > 0))
    counts[cold] = split_evenly(rows[cold], shares[cold], load, traffic[cold])
    return counts


def _swap_fetched(problem: Problem, sets: HolderSets, counts: Ints, seconds: Floats) -> int:
    """Swap rows with one owner that are not pooled between all ranks, in place, while that lowers
    the largest of the ranks' `seconds` [M], which follow; the number of rounds."""
    classes, ranks = problem.classes, problem.ranks
    fetched = np.flatnonzero(np.logical_not(classes.pooled))
    able = sets.take(np.arange(ranks))
    directions = classes.traffic(problem.topology, problem.workload).directions(able)
    part = np.asfortranarray(counts[fetched, :ranks])
    those = tuple(Direction(bytes[fetched], columns) for bytes, columns in directions)
    moving = tuple(each for each in those if each.bytes.any())
    if not moving:  # none is fetched, or none of them is read
        return 0
    search = SwapSearch(part, moving, classes.width[fetched], seconds)
    search.run()
    counts[fetched, :ranks] = part
    return search.rounds_made


def swap_in_nodes(
    problem: ClassProblem,
    sets: HolderSets,
    counts: Ints,
    seconds: Floats,
    price: Floats | None = None,
) -> int:
    """Swap rows with one owner between the ranks of each node, in place, while that lowers the
    largest of their `seconds` there; the number of rounds. `price` as for `SwapSearch`."""
    classes, topology, ranks = problem.classes, problem.topology, problem.ranks
    able = sets.take(np.arange(ranks))
    directions = classes.traffic(topology, problem.workload).directions(able)
    rounds = 0
    for node in range(topology.nodes):
        node_ranks = np.flatnonzero(np.array(topology.node_of) == node)
        if len(node_ranks) == 1:
            continue
        part = set_by_set(counts[:, node_ranks])
        inside = tuple(
            Direction(bytes, columns[np.ix_(node_ranks, node_ranks)])
            for bytes, columns in directions
        )
        of_pairs = None if price is None else price[:, node_ranks[:, None], node_ranks]
        search = SwapSearch(part, inside, classes.width, seconds[node_ranks], of_pairs)
        search.run()
        rounds += search.rounds_made
        counts[:, node_ranks] = part
    return rounds
