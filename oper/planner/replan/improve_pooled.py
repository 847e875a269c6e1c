"""Rows of pooled plans that are worth moving to, from those of an older plan.

In: `Problem` of the new counts, priced by the vectors of the plan's own bags; its rows by class and
holder set, those of a plan from scratch, the cost of moves. Out: `PricedCounts`, best first, as of
improve_placement.py.

A table's rows with one owner stay on the nodes where they are, as a vector is paid for each node
that has any row of a bag. Three starts are tried: the rows as they are; with the copies that pay
now, where one row fewer of a table on a node saves the slope of its bags' vectors there
(oper/cost/vectors_per_bag.py); and with the copies and nodes of the plan from scratch, each node's
rows staying on their ranks as far as there are as many. From each, rows are swapped between the
ranks of nodes while that pays; and between all ranks, where tables may be spread over all nodes.
Gains are those of the vectors that follow.
"""

from dataclasses import replace

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import HolderSets
from oper.cost.vectors_per_bag import VectorsPerBag
from oper.planner.class_placement.pooled_copies import table_of_class
from oper.planner.class_placement.rounding import split_evenly
from oper.planner.price_plan import price_counts, shares_of_nodes
from oper.planner.problem.problem import Problem
from oper.planner.replan.improve_placement import (
    PricedCounts,
    best_first,
    swap_rows,
    with_copies,
)
from oper.planner.replan.migration.migration_cost import MigrationCost
from oper.planner.replan.replica_changes import choose_replicas, mean_seconds
from oper.planner.row_placement.capacity_repair import keep_capacity
from oper.planner.row_placement.rows_at_homes import swap_in_nodes
from oper.topology.pooled_links import PooledTopology


def better_pooled_counts(
    problem: Problem,
    sets: HolderSets,
    now: PricedCounts,
    fresh: Ints,
    migration_cost: MigrationCost,
    horizon: int,
) -> list[PricedCounts]:
    """Counts that gain something in `horizon` iterations beyond the seconds of their copies over
    links, those that gain most first; `fresh` [C, K] are those of a plan from scratch."""
    price = migration_cost.seconds / problem.ranks / horizon
    of_swaps = np.array(problem.classes.width_memory)[:, None, None] * (price + price.T)
    homes = _shares_of_homes(problem, now.counts, fresh)
    starts = [
        now.counts,
        _with_copies_at_homes(problem, sets, now.counts, price, homes),
        with_copies(problem, sets, now.counts, price),
        _near(problem, now.counts, fresh),
    ]
    # Elsewhere all rows with one owner are on their tables' nodes, and swaps would spread them.
    may_be_spread = not (problem.topology.homogeneous and problem.workload.training)
    tried = []
    for start in starts:
        for in_nodes in (True, False) if may_be_spread else (True,):
            counts = start.copy()
            if not keep_capacity(problem, sets, counts):
                continue
            cost = price_counts(problem, sets, counts)
            if in_nodes:
                rounds = swap_in_nodes(problem, sets, counts, cost.rank_seconds.copy(), of_swaps)
            else:
                rounds = swap_rows(problem, sets, counts, cost, price)
            tried.append((1.0, PricedCounts(counts, price_counts(problem, sets, counts), rounds)))
    return best_first(problem, now, tried, migration_cost, horizon)


def _with_copies_at_homes(
    problem: Problem, sets: HolderSets, counts: Ints, price: Floats, homes: Floats
) -> Ints:
    """Counts with the copies that pay; rows given up as copies stay with those of their holders
    that are on the table's nodes, of which `homes` [T, N] are the shares."""
    if len(sets) == problem.ranks:
        return counts
    methods: tuple[Method, ...] = METHODS if problem.workload.training else ("none",)
    choices = [
        choose_replicas(
            problem, sets, _values(problem, sets, counts, method), counts, price, method
        )
        for method in methods
    ]
    changed, dropped = min(choices, key=lambda copies: copies.mean_seconds).apply(counts)
    classes, node_of = problem.classes, np.array(problem.topology.node_of)
    of_rank = homes[:, node_of][table_of_class(classes)]  # [C, M]
    traffic = classes.traffic_bytes(problem.workload)
    load = np.zeros(problem.ranks)
    for k in np.flatnonzero(dropped.any(axis=0)):
        given = np.flatnonzero(dropped[:, k])
        shares = of_rank[given] * sets.holds[k]
        shares = np.where(shares.any(axis=1, keepdims=True), shares, sets.holds[k])
        changed[given, : problem.ranks] += split_evenly(
            dropped[given, k], shares, load, traffic[given]
        )
    return changed


def _values(problem: Problem, sets: HolderSets, counts: Ints, method: Method) -> Floats:
    """What a row of each class adds to the mean T in each set, [C, K]: beside vectors, and the
    vectors that one row less or more makes."""
    topology, lengths = problem.topology, problem.profile.bag_lengths
    assert isinstance(topology, PooledTopology)
    assert lengths is not None
    without, with_rows = (
        mean_seconds(replace(problem, topology=topology.with_ratio(ratio, ratio)), sets, method)
        for ratio in (0.0, 1.0)
    )
    classes, tables = problem.classes, problem.profile.tables
    accesses = np.zeros((len(tables), len(sets)))
    table = table_of_class(classes)
    np.add.at(accesses, table, classes.expected[:, None] * counts)
    shares = np.clip(shares_of_nodes(problem, sets, accesses), 0.0, 1.0)
    slopes = VectorsPerBag(lengths).slopes(shares)
    weight = np.where(shares.any(axis=1, keepdims=True), shares, 1.0)
    slope = (slopes * weight).sum(axis=1) / weight.sum(axis=1)
    vectors = np.array([4.0 * each.dim for each in tables]) * lengths.bags_of_tables * slope
    rows = np.array([each.row_bytes for each in tables]) * np.maximum(lengths.ids_of_tables, 1)
    # Copies that training has no AllReduce for are infinite either way.
    added = np.zeros_like(without)
    np.subtract(with_rows, without, out=added, where=np.isfinite(without))
    return np.asarray(without + (vectors / rows)[table][:, None] * added)


def _shares_of_homes(problem: Problem, *counts: Ints) -> Floats:
    """The share of each table's rows with one owner that is on each node, [T, N], by the first of
    `counts` [C, K] in which it has any, by bytes; of others equal ones."""
    classes, node_of, ranks = problem.classes, np.array(problem.topology.node_of), problem.ranks
    nodes, table = problem.topology.nodes, table_of_class(problem.classes)
    found = np.full((len(problem.profile.tables), nodes), 1 / nodes)
    for rows in reversed(counts):
        held = np.zeros_like(found)
        of_class = (classes.m[:, None] * rows[:, :ranks]) @ np.equal.outer(node_of, range(nodes))
        np.add.at(held, table, of_class)
        some = held.any(axis=1)
        found[some] = held[some] / held[some].sum(axis=1, keepdims=True)
    return found


def _near(problem: Problem, now: Ints, wanted: Ints) -> Ints:
    """Counts [C, K] with as many rows of each class on each node, and as many copies, as `wanted`,
    on its ranks as far as `now` has them there."""
    found, traffic = wanted.copy(), problem.classes.traffic_bytes(problem.workload)
    node_of, load = np.array(problem.topology.node_of), np.zeros(problem.ranks)
    for node in range(problem.topology.nodes):
        mine = np.flatnonzero(node_of == node)
        old, rows = now[:, mine], wanted[:, mine].sum(axis=1)
        there = old.sum(axis=1)
        equal = np.full(old.shape, 1.0)
        stay = split_evenly(
            np.minimum(rows, there), np.where(there[:, None] > 0, old, equal), load[mine], traffic
        )
        stay = np.minimum(stay, old)  # shares that were rounded
        found[:, mine] = stay + split_evenly(rows - stay.sum(axis=1), equal, load[mine], traffic)
    return found
