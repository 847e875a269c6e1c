"""A few copies of rows that are too hot for one rank: inference on many homogeneous ranks.

In: `ClassProblem`. Out: the number of copies of the hottest rows, and their ranks. Copies of a row
save the reads from other nodes, which are the mean of T. But one holder of a row serves all M ranks
from its memory, and if that takes long, it decides T however even the others are. A second copy
halves it, and needs no copy on every node.

On N nodes of G ranks T_r = a·W_r - b·V_n + far·W (`bounds/node_loads_bound.py`): a rank that serves
a hot row gets faster with all that its node has. So hot rows come in blocks of G, one on each rank
of a node, and all of a block have copies on the same nodes: h copies of a row of weight w, in a
block of weight V, take a·w/h - b·V more than far·W. Copies against the largest of these and copies
for the mean, which go to the hottest rows, once a node, compete for the budget. The limit on the
largest is tried from the time of even ranks upwards: rows get as many copies as they need, and the
rest of the budget goes to the hottest as if there were no such need.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets
from oper.cost.read_charges import Charges, PairSeconds
from oper.planner.class_placement.class_placement import MANY_RANKS
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import RelayedTopology

_STEP = 1.05  # from one largest time that is tried to the next
_TURNS = 3
_HOT_ROWS = 4096  # that are looked at, at most


class FewCopies(NamedTuple):
    """Holder sets of single rows, [K], which class each is of, and the weight that every rank
    serves of them, [M]: that of a row with one owner is served by it whole."""

    sets: HolderSets
    class_of: Ints
    load: Floats


def copies_needed(problem: ClassProblem) -> Ints:
    """Return the least number of copies of a row of each class, [C]: 1 except for rows that are too
    hot for the ranks; at most the number of nodes."""
    classes, topology, ranks = problem.classes, problem.topology, problem.ranks
    nodes = topology.nodes
    one = np.ones(len(classes), dtype=np.int64)
    if problem.workload.training or nodes == 1 or ranks <= MANY_RANKS or not topology.near_first:
        return one
    # To relays and proxies an owner serves one rank of each other node.
    if isinstance(topology, RelayedTopology | PooledTopology):
        return one
    weight = classes.traffic_bytes(problem.workload)
    total = float(dot(weight, classes.rows))
    paid, masks = Charges.of(topology).owner_seconds, topology.masks().values()
    own, mate, far = (float(paid[mask].mean()) if mask.any() else 0.0 for mask in masks)
    a, b = own - mate, far - mate
    even = (a / ranks - b / nodes) * total
    hottest = a * float(weight.max(initial=0.0))
    if hottest <= even or even <= 0:  # no row is hot; or a node of hot rows is as fast as others
        return one
    saved = PairSeconds.of(topology).saved_by_further_node(ranks // nodes) / ranks
    mean = Charges.of(topology).mean_owner_seconds * total
    copies = _with_rest(classes, weight, one, nodes, problem.budget_bytes)
    left = np.where(copies >= nodes, 0.0, weight) if copies is not None else weight
    if a * float(left.max()) <= even:  # the hottest have a copy on every node anyway
        return one
    best, needed = np.inf, one
    largest = max(even, hottest / ranks)
    while largest < hottest * _STEP:
        once_a_node = np.zeros(len(classes), dtype=bool)
        for _ in range(_TURNS):  # rows with a copy on every node are in no block
            blocks = _blocks(classes, weight, ranks // nodes, ~once_a_node)
            tried = np.ceil(a * blocks.hottest / (largest + b * blocks.weight))
            tried = np.where(once_a_node, 1, np.clip(tried, 1, nodes)).astype(np.int64)
            copies = _with_rest(classes, weight, tried, nodes, problem.budget_bytes)
            if copies is None:
                break
            once_a_node = copies >= nodes
        largest *= _STEP
        if copies is None:
            continue
        holders = np.where(once_a_node, a * weight / nodes, a * weight / tried - b * blocks.weight)
        near = b * float((weight * classes.rows)[once_a_node].sum())
        gained = saved * float(dot(weight, classes.rows * (copies - 1)))
        seconds = max(mean - gained, far * total - near + float(holders.max()))
        if seconds < best:
            best, needed = seconds, tried
    return needed


class _Blocks(NamedTuple):
    """The block that the hottest row of each class is in: the weight of its hottest row and of all
    its rows, [C]. Rows that are in none are one by themselves."""

    hottest: Floats
    weight: Floats


def _blocks(
    classes: Classes, weight: Floats, ranks_per_node: int, in_blocks: NDArray[np.bool_]
) -> _Blocks:
    order = np.flatnonzero(in_blocks)
    order = order[np.argsort(-weight[order], kind="stable")]
    before = np.cumsum(classes.rows[order]) - classes.rows[order]
    order, before = order[before < _HOT_ROWS], before[before < _HOT_ROWS]
    rows = np.repeat(weight[order], np.minimum(classes.rows[order], _HOT_ROWS))[:_HOT_ROWS]
    first = np.arange(0, len(rows), ranks_per_node)
    hottest, of_block = weight.copy(), weight.copy()
    hottest[order] = rows[first][before // ranks_per_node]
    of_block[order] = np.add.reduceat(rows, first)[before // ranks_per_node]
    return _Blocks(hottest, of_block)


def _with_rest(
    classes: Classes, weight: Floats, needed: Ints, nodes: int, budget_bytes: float
) -> Floats | None:
    """Return the mean copies of the rows of each class if all have the copies they need, and the
    hottest have one on every node as far as the budget lasts; None if it does not last for the
    needed copies."""
    left = budget_bytes - float(dot((needed - 1) * classes.rows, classes.m))
    if left < 0:
        return None
    order = np.argsort(-weight / classes.m, kind="stable")
    price = ((nodes - needed) * classes.rows * classes.m)[order]
    before = np.cumsum(price) - price
    share = np.empty(len(order))
    share[order] = np.clip((left - before) / np.maximum(price, 1e-300), 0.0, 1.0)
    return np.asarray(needed + (nodes - needed) * share)


def few_copies(problem: ClassProblem, rows: Ints, copies: Ints) -> FewCopies:
    """Return the ranks for `copies[c]` copies of each of `rows[c]` rows, hottest first: blocks of
    as many rows as a node has ranks, on the nodes that serve least so far. A node with a copy reads
    that copy, and the ranks of all other nodes are shared out evenly."""
    topology, ranks = problem.topology, problem.ranks
    weight = problem.classes.traffic_bytes(problem.workload)
    of_node = np.argsort(topology.node_of, kind="stable").reshape(topology.nodes, -1)
    size = of_node.shape[1]
    load = np.zeros(ranks)
    hottest = np.flatnonzero(rows)
    hottest = hottest[np.argsort(-weight[hottest], kind="stable")]
    class_of = np.repeat(hottest, rows[hottest])
    source = np.empty((len(class_of), ranks), dtype=np.uint16)
    holds = np.zeros((len(class_of), ranks), dtype=bool)
    for n, c in enumerate(class_of.tolist()):
        if n % size == 0:
            idlest = np.argsort(load[of_node].sum(axis=1), kind="stable")
        near, far = idlest[: copies[c]], idlest[copies[c] :]
        holders, readers = of_node[near, n % size], of_node[far].ravel()
        source[n, of_node[near]] = holders[:, None]
        source[n, readers] = holders[np.arange(len(readers)) % len(holders)]
        holds[n, holders] = True
        load += weight[c] * np.bincount(source[n], minlength=ranks) / ranks
    return FewCopies(HolderSets(source, holds), class_of, load)
