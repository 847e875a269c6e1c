"""Homes: the nodes on which pooled tables keep their rows with one owner, so that a bag has few.

In: a `Problem` whose classes are of one table each, on homogeneous ranks, and how many rows of each
have one owner. Out: `Homes`, the share of each table's rows on each node. A bag takes a vector of
each node that has any of its rows (oper/cost/vectors_per_bag.py), so that a table on one node takes
least; but nodes whose tables are read more have more to read for others. With W_t the time of the
rows of table t for the ranks of their node in an iteration, V_t the time of a vector of each of its
bags for a rank of another node, and x_t the share of its accesses that are to these rows, shares f
take node n

    Σ_t f[t][n]·W_t  +  Σ_{m≠n} Σ_t V_t·chance(x_t·f[t][m])

Tables go, most work first, to the node with least that has room for them whole; a node's own
vectors, which its ranks need not wait for, count as work of other sign. If none has room, the nodes
with most room share them. Room is memory, and work up to a limit: how uneven nodes may be is tried
out, from evenly filled ones to none but whole tables, and so are all tables on a number of nodes
each. The best of these is improved: parts of tables move between the slowest node and others, and
whole tables change places, while that helps. Rows of tables that are not pooled cost the ranks of
other nodes the same wherever they lie there: they begin in equal parts on all nodes, and parts of
them move as well.
"""

from dataclasses import dataclass

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.vectors_per_bag import VectorsPerBag
from oper.planner.class_placement.pooled_copies import (
    table_of_class,
    vector_seconds,
    without_vectors,
)
from oper.planner.problem.problem import Problem
from oper.tables.bag_lengths import BagLengths

# Most parts in which nodes share a table's rows: stripes repeat after this many rows a rank.
PARTS = 64
# Excess over the mean that the work of a node may have.
_UNEVEN = (0.0, 0.003, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, np.inf)


@dataclass(frozen=True)
class Homes:
    """Homes of pooled tables: `shares[t, n]` of the rows of table t with one owner lie on node n,
    [T, N]. seconds: time of the slowest node's ranks for all of these rows."""

    shares: Floats
    seconds: float

    def of_ranks(self, node_of: Ints) -> Floats:
        """Return the share of each rank, [T, M]: an equal part of its node's."""
        rank_shares: Floats = self.shares[:, node_of] / np.bincount(node_of)[node_of]
        return rank_shares


def choose_homes(
    problem: Problem, lengths: BagLengths, single: Ints, room: float, improve: bool = True
) -> Homes:
    """Return the homes with which the slowest node takes least; `single[c]` rows of each class have
    one owner, and each node has `room` bytes for them. Without `improve` they are a draft, which is
    enough to compare copies by."""
    nodes = problem.topology.nodes
    if not single.any():  # no row needs a home
        return Homes(np.full((lengths.tables, nodes), 1 / nodes), 0.0)
    work, away, memory, share = _of_tables(problem, lengths, single)
    vectors = vector_seconds(problem, lengths) * nodes / max(nodes - 1, 1)
    bags = VectorsPerBag(lengths)

    of_tables = _Tables(work, away, memory, share, vectors, bags)
    work = np.where(vectors > 0, work, 0.0)  # of the tables with homes

    whole = vectors * bags.chances(np.clip(share, 0.0, 1.0)[:, None])[:, 0]
    uneven_work = np.where(work > 0, np.maximum(np.abs(work - whole), 1e-3 * work), 0.0)
    tried = [np.full((lengths.tables, nodes), 1 / nodes)]
    for weight in (work, uneven_work):
        for uneven in _UNEVEN:
            most = weight.sum() / nodes * (1 + uneven) if uneven < np.inf else np.inf
            tried.append(_filled(weight, memory, nodes, most, room))
    spread = 2
    while spread < min(nodes, PARTS):
        tried.append(_spread(work, memory, nodes, spread, room))
        spread *= 2
    best = min(tried, key=of_tables.slowest)
    shares = _improved(of_tables, best, room) if improve else best
    return Homes(shares, of_tables.slowest(shares))


@dataclass(frozen=True)
class _Tables:
    """Figures of each table from `_of_tables`, and the seconds of vectors for all its bags, [T]."""

    work: Floats
    away: Floats
    memory: Floats
    share: Floats
    vectors: Floats
    bags: VectorsPerBag

    def vector_seconds(self, shares: Floats) -> Floats:
        """Return the seconds for vectors, or rows, from nodes with these shares of the tables'
        rows, [T, N]."""
        chances = self.bags.chances(np.clip(self.share[:, None] * shares, 0.0, 1.0))
        seconds: Floats = self.vectors[:, None] * chances + self.away[:, None] * shares
        return seconds

    def slowest(self, shares: Floats) -> float:
        """Return the seconds of the slowest node."""
        of_node = self.vector_seconds(shares).sum(axis=0)
        return float((dot(self.work, shares) + of_node.sum() - of_node).max())


def _of_tables(
    problem: Problem, lengths: BagLengths, single: Ints
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return four figures of each table's rows with one owner, [T]: their seconds for each rank of
    their node (the mean) and for each rank of other nodes, both without vectors; their bytes of
    memory; and their share of the accesses."""
    classes, topology = problem.classes, problem.topology
    table, tables = table_of_class(classes), lengths.tables
    mates = np.array(topology.node_of) == topology.node_of[0]
    seconds, away = np.zeros((2, len(classes)))
    for part in classes.traffic(without_vectors(topology), problem.workload).parts:
        paid = part.charges.owner_seconds[0]
        seconds += part.bytes * float(paid[mates].mean())
        away += part.bytes * float(paid[~mates].mean())
    accesses = np.bincount(table, single * classes.expected, minlength=tables)
    return (
        np.bincount(table, single * seconds, minlength=tables).astype(np.float64),
        np.bincount(table, single * away, minlength=tables).astype(np.float64),
        np.bincount(table, single * classes.m, minlength=tables).astype(np.float64),
        accesses / np.maximum(lengths.ids_of_tables, 1),
    )


def _filled(work: Floats, memory: Floats, nodes: int, most: float, room: float) -> Floats:
    """Return shares [T, N] with at most `most` work and `room` bytes a node, as far as nodes have
    room."""
    shares = np.zeros((len(work), nodes))
    load, held = np.zeros(nodes), np.zeros(nodes)
    for t in np.argsort(-work, kind="stable").tolist():
        if work[t] == 0:  # tables without a home, or never read
            shares[t] = _over_nodes(memory[t], np.maximum(room - held, 0.0))
            held += memory[t] * shares[t]
            continue
        fits = (load + work[t] <= most * (1 + 1e-12)) & (held + memory[t] <= room)
        left = PARTS
        if fits.any():
            shares[t, int(np.where(fits, load, np.inf).argmin())] = 1.0
            left = 0
        while left:
            parts = np.minimum((most - load) / work[t], (room - held) / max(memory[t], 1))
            parts = np.floor((parts - shares[t]) * PARTS + 1e-9)
            node = int(parts.argmax())
            take = int(min(parts[node], left))
            if take < 1:  # no room: a part at a time to the node with the least work
                full = held + memory[t] * shares[t] > room
                node, take = int(np.where(full, np.inf, load + work[t] * shares[t]).argmin()), 1
            shares[t, node] += take / PARTS
            left -= take
        load += work[t] * shares[t]
        held += memory[t] * shares[t]
    return shares


def _over_nodes(memory: float, room: Floats) -> Floats:
    """Return equal shares [N] of all nodes, or, if these do not fit, shares by the room of the
    nodes."""
    nodes = len(room)
    even: Floats = np.full(nodes, 1 / nodes)
    if (memory / nodes <= room).all() or not room.any():
        return even
    parts = np.floor(room / room.sum() * PARTS)
    parts[room.argmax()] += PARTS - parts.sum()
    shares: Floats = parts / PARTS
    return shares


def _spread(work: Floats, memory: Floats, nodes: int, spread: int, room: float) -> Floats:
    """Return shares [T, N] with each table on `spread` nodes, the ones with least work so far."""
    shares = np.zeros((len(work), nodes))
    load, held = np.zeros(nodes), np.zeros(nodes)
    for t in np.argsort(-work, kind="stable").tolist():
        part = memory[t] / spread
        fits = held + part <= room
        if work[t] == 0 or fits.sum() < spread:
            shares[t] = 1 / nodes
        else:
            shares[t, np.argsort(np.where(fits, load, np.inf), kind="stable")[:spread]] = 1 / spread
        load += work[t] * shares[t]
        held += memory[t] * shares[t]
    return shares


_STEPS = 200
_FRACTIONS = np.array([1 / PARTS, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0])
_GAIN = 1e-6  # relative, that a step must bring


def _improved(tables: _Tables, shares: Floats, room: float) -> Floats:
    """Return the shares [T, N] after moves of parts of tables and exchanges of whole ones."""
    shares = shares.copy()
    for _ in range(_STEPS):
        least = tables.slowest(shares) * (1 - _GAIN)
        best = min(
            (_best_move(tables, shares, room), _best_exchange(tables, shares, room)),
            key=lambda step: step[0],
        )
        if not best[0] < least:
            break
        shares = best[1]
    return shares


def _others(times: Floats, node: int) -> Floats:
    """Return the largest of `times` [N] without `node` and each other one, [N]."""
    rest = times.copy()
    rest[node] = -np.inf
    order = np.argsort(-rest, kind="stable")
    largest = np.full(len(times), rest[order[0]])
    largest[order[0]] = rest[order[1]] if len(times) > 1 else -np.inf
    return largest


def _best_move(tables: _Tables, shares: Floats, room: float) -> tuple[float, Floats]:
    """Return the best move of a part of a table from or to the slowest node: its slowest node's
    seconds, and the shares after it."""
    vectors = tables.vector_seconds(shares)
    net = dot(tables.work, shares) - vectors.sum(axis=0)  # T but for all vectors
    node, total = int(net.argmax()), float(vectors.sum())
    held = dot(tables.memory, shares)
    others = _others(net, node)
    least, best = np.inf, shares
    for sign in (-1, 1):
        from_ = shares[:, [node]] if sign < 0 else shares  # [T, 1 or N]
        for fraction in _FRACTIONS:
            part = np.minimum(np.broadcast_to(from_, shares.shape), fraction)
            here, there = shares[:, [node]] + sign * part, shares - sign * part
            some = (part > 0) & (tables.work > 0)[:, None]
            some[:, node] = False
            more_here = tables.vector_seconds(here) - vectors[:, [node]]
            more_there = tables.vector_seconds(there) - vectors
            work = sign * part * tables.work[:, None]
            at_here, at_there = net[node] + work - more_here, net - work - more_there
            slowest = np.maximum(np.maximum(at_here, at_there), others)
            slowest = slowest + total + more_here + more_there
            moved = sign * part * tables.memory[:, None]
            some &= (held[node] + moved <= room) | (moved <= 0)
            some &= (held - moved <= room) | (moved >= 0)
            slowest = np.where(some, slowest, np.inf)
            if slowest.min() < least:
                least = float(slowest.min())
                t, other = np.unravel_index(int(slowest.argmin()), slowest.shape)
                best = shares.copy()
                best[t, node] = here[t, other]
                best[t, other] = there[t, other]
    return least, best


def _best_exchange(tables: _Tables, shares: Floats, room: float) -> tuple[float, Floats]:
    """Return the best exchange of two whole tables, one of the slowest node: its slowest node's
    seconds, and the shares after it."""
    vectors = tables.vector_seconds(shares)
    net = dot(tables.work, shares) - vectors.sum(axis=0)
    node, total = int(net.argmax()), float(vectors.sum())
    home = np.where(shares.max(axis=1) == 1.0, shares.argmax(axis=1), -1)
    tables_here = np.flatnonzero((home == node) & (tables.work > 0))
    tables_elsewhere = np.flatnonzero((home >= 0) & (home != node) & (tables.work > 0))
    if not len(tables_here) or not len(tables_elsewhere):
        return np.inf, shares
    alone = tables.work - vectors.max(axis=1)  # of a whole table, to its node
    change = alone[tables_elsewhere] - alone[tables_here][:, None]
    held, memory = dot(tables.memory, shares), tables.memory
    slowest = np.maximum(net[node] + change, net[home[tables_elsewhere]] - change)
    slowest = np.maximum(slowest, _others(net, node)[home[tables_elsewhere]]) + total
    more = memory[tables_elsewhere] - memory[tables_here][:, None]
    fits = ((held[node] + more <= room) | (more <= 0)) & (
        (held[home[tables_elsewhere]] - more <= room) | (more >= 0)
    )
    slowest = np.where(fits, slowest, np.inf)
    first, second = np.unravel_index(int(slowest.argmin()), slowest.shape)
    best = shares.copy()
    best[[tables_here[first], tables_elsewhere[second]]] = shares[
        [tables_elsewhere[second], tables_here[first]]
    ]
    return float(slowest.min()), best
