"""The paper's procedure as printed (§4), with the slips of its text put right.

In: `ClassProblem`. Out: `Baseline`.

1. Partitions of the rows in order of access frequency, bounded in bytes and in accesses (§4.1).
2. Access-bounded ones, by accesses descending, to the rank with the least lookup work E; the
   memory-bounded ones, whole, to the rank with the least memory (§4.2). While the degree of
   balance of memory or of lookups is below the target, the threshold is halved and 1 and 2 are
   done again, until the target is reached, or the limit of rounds, or a round gains nothing.
3. Inference: Algorithm 1 (§4.3). In turn, every rank copies the hottest partition per byte that it
   reads over its slowest link, and ranks of its node to which the copy is nearer read it there.
   Training: partitions read more often than f > BW_p2p / (B · BW_allreduce) per sample go to all
   ranks, hottest first (§4.3). The text does not say whether its Batch_Size, B, is that of a rank
   or of all ranks. With the second the rule adds up all ranks' fetches and compares them with one
   rank's AllReduce. Both placements are made, and the one with the shorter transfer time is taken.

Copies stay within every rank's capacity and within the extra memory. Whole partitions are placed;
OPER itself goes on to single rows.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import published_replication_frequency
from oper.cost.holder_sets import HolderSets, cheapest_holder_sets, single_owner_sets
from oper.cost.objective import degree_of_balance
from oper.cost.read_charges import Charges
from oper.planner.baselines.baseline import (
    Baseline,
    BatchReading,
    Cells,
    PaperNotes,
    price_baseline,
)
from oper.planner.class_placement.partitions import Partitions, partitions
from oper.planner.problem.problem import ClassProblem
from oper.topology.relays import RelayedTopology, without_relays

ROUNDS = 8  # halvings of the threshold: 0.1 % becomes 0.0004 %
MAX_PARTITIONS = 20_000  # with more, a round gains at most 0.05 % of balance
BATCHES: tuple[BatchReading, ...] = ("rank", "all ranks")


@dataclass(frozen=True)
class Placed:
    """A round's result: the owner of each partition, and the balance of memory and lookups."""

    partitions: Partitions
    owner: Ints
    balance: float


def paper(problem: ClassProblem) -> Baseline:
    """Place rows by the whole procedure; halving begins at the problem's threshold and aims at its
    balance."""
    placed = backtrack(problem)
    parts = placed.partitions
    traffic = partition_totals(parts, problem.classes.S * problem.classes.R)
    if not problem.workload.training:
        source = replicate_inference(problem, parts.bytes, traffic, placed.owner)
        return _baseline(problem, placed, source, None)
    baselines = [
        _baseline(problem, placed, replicate_training(problem, parts, placed.owner, batch), batch)
        for batch in BATCHES
    ]
    costs = [price_baseline(problem, baseline) for baseline in baselines]
    order = [(not cost.feasible, cost.objective_seconds) for cost in costs]
    return baselines[order.index(min(order))]


def _baseline(
    problem: ClassProblem, placed: Placed, source: Ints, batch: BatchReading | None
) -> Baseline:
    """Return the placement whose partitions the ranks read from `source` [P, M]."""
    parts = placed.partitions
    sets, group_of = sets_by_source(source)
    if isinstance(problem.topology, RelayedTopology):
        # Its holders, from which ranks read through relays.
        sets = cheapest_holder_sets(sets.holds, Charges.of(problem.topology).read_seconds)
    cells = Cells(parts.run_class, group_of[parts.run_partition], parts.run_rows)
    notes = PaperNotes(parts.threshold, len(parts), placed.balance, batch)
    return Baseline("paper", sets, cells.sums(problem.classes, len(sets)), cells, notes=notes)


def sets_by_source(source: Ints) -> tuple[HolderSets, Ints]:
    """Return the holder sets, single owners first, and that of each partition, [P], from the ranks
    that each rank reads it from, `source` [P, M]."""
    ranks = source.shape[1]
    several = (source != source[:, :1]).any(axis=1)
    copied, at = np.unique(source[several], axis=0, return_inverse=True)
    group_of = source[:, 0].copy()
    group_of[several] = ranks + at.ravel()
    copies = HolderSets(copied.astype(np.uint16), copied == np.arange(ranks))
    return single_owner_sets(ranks) + copies, group_of


def partition_totals(parts: Partitions, per_row: Floats) -> Floats:
    """Return Σ over the rows of each partition, [P], of a quantity of the rows of each class,
    [C]."""
    totals = parts.run_rows * per_row[parts.run_class]
    return np.bincount(parts.run_partition, totals, minlength=len(parts)).astype(np.float64)


def backtrack(problem: ClassProblem) -> Placed:
    """Halve the threshold until the balance is reached, and return the best round (§4.2)."""
    threshold = problem.asked.threshold
    best = place(problem, partitions(problem.classes, threshold))
    for _ in range(ROUNDS):
        threshold /= 2
        if best.balance >= problem.asked.dob or 2 * len(best.partitions) > MAX_PARTITIONS:
            break
        finer = place(problem, partitions(problem.classes, threshold))
        if finer.balance <= best.balance:
            break
        best = finer
    return best


def place(problem: ClassProblem, parts: Partitions) -> Placed:
    """Place access-bounded partitions by the least lookup work, the others by the least memory."""
    classes, ranks = problem.classes, problem.topology.ranks
    local = Charges.of(problem.topology).memory_seconds.tolist()
    work = partition_totals(parts, classes.S * classes.R).tolist()
    owner = np.zeros(len(parts), dtype=np.int64)
    memory = [0] * ranks
    lookups = [0.0] * ranks
    by_accesses = np.argsort(-parts.accesses, kind="stable")
    least = [(0.0, rank) for rank in range(ranks)]
    for p in by_accesses[parts.access_bounded[by_accesses]].tolist():
        rank = least[0][1]
        lookups[rank] += work[p] * local[rank]
        heapq.heapreplace(least, (lookups[rank], rank))
        memory[rank] += int(parts.bytes[p])
        owner[p] = rank
    lightest = [(held, rank) for rank, held in enumerate(memory)]
    heapq.heapify(lightest)
    for p in np.flatnonzero(~parts.access_bounded).tolist():
        held, rank = lightest[0]
        heapq.heapreplace(lightest, (held + int(parts.bytes[p]), rank))
        lookups[rank] += work[p] * local[rank]
        memory[rank] += int(parts.bytes[p])
        owner[p] = rank
    balance = min(degree_of_balance(np.array(values, dtype=float)) for values in (memory, lookups))
    return Placed(parts, owner, balance)


def memory_left(problem: ClassProblem, size_bytes: Ints, owner: Ints) -> list[int]:
    """Return the bytes that each rank has left, [M], with every partition on its owner."""
    held = np.zeros(problem.topology.ranks, dtype=np.int64)
    np.add.at(held, owner, size_bytes)
    return [int(left) for left in problem.capacity_bytes - held]


def replicate_training(
    problem: ClassProblem, parts: Partitions, owner: Ints, batch: BatchReading
) -> Ints:
    """Return the rank that each rank reads a partition from, [P, M], by the printed rule with the
    `batch` of one rank or of all: hottest first, partitions go to all ranks or stay with one."""
    topology, ranks = problem.topology, problem.topology.ranks
    source = np.repeat(owner[:, None], ranks, axis=1)
    if ranks == 1:
        return source
    samples = problem.workload.batch_size / (ranks if batch == "rank" else 1)
    least = published_replication_frequency(topology, samples)
    rows = partition_totals(parts, np.ones(len(problem.classes)))
    frequency = parts.accesses / rows / max(problem.classes.samples, 1)
    free = memory_left(problem, parts.bytes, owner)
    budget = problem.budget_bytes
    for p in np.flatnonzero(frequency > least).tolist():  # in order of frequency already
        size = int(parts.bytes[p])
        others = [rank for rank in range(ranks) if rank != owner[p]]
        if (ranks - 1) * size > budget or any(free[rank] < size for rank in others):
            continue
        budget -= (ranks - 1) * size
        for rank in others:
            free[rank] -= size
        source[p] = np.arange(ranks)
    return source


def replicate_inference(
    problem: ClassProblem, size_bytes: Ints, traffic_bytes: Floats, owner: Ints
) -> Ints:
    """Return the rank that each rank reads a partition from, [P, M], by Algorithm 1: a rank stops
    when its slowest link has no candidate left.

    The candidates that rank g reads from rank t are a heap, hottest per byte first. A partition
    that does not fit will not fit later either and leaves the heap; so does one that g reads from
    elsewhere by now.
    """
    ranks = problem.topology.ranks
    link = Charges.of(without_relays(problem.topology)).reader_seconds.tolist()
    source = np.repeat(owner[:, None], ranks, axis=1).tolist()
    size, traffic = size_bytes.tolist(), traffic_bytes.tolist()
    free, budget = memory_left(problem, size_bytes, owner), problem.budget_bytes
    order = np.argsort(-(traffic_bytes / size_bytes), kind="stable")
    position = np.argsort(order, kind="stable").tolist()  # of each partition in `order`
    served = np.bincount(owner, traffic_bytes, minlength=ranks).tolist()
    # An array, whose largest entry is found fast; that of a rank's own rows is never the largest.
    cost = np.array([[served[j] * link[i][j] for j in range(ranks)] for i in range(ranks)])
    np.fill_diagonal(cost, -np.inf)
    owned = [np.flatnonzero(owner[order] == rank).tolist() for rank in range(ranks)]
    order = order.tolist()
    waiting = [[list(owned[t]) for t in range(ranks)] for _ in range(ranks)]
    # Ranks to which g may be nearer than what they read from now.
    nearer = [
        [i for i in range(ranks) if i != g and link[i][g] < max(link[i])] for g in range(ranks)
    ]

    def hottest(g: int, t: int) -> int | None:
        heap = waiting[g][t]
        while heap:
            p: int = order[heap[0]]
            if source[p][g] == t and size[p] <= min(free[g], budget):
                return p
            heapq.heappop(heap)
        return None

    def read_from(i: int, p: int, new: int) -> None:
        cost[i, source[p][i]] -= traffic[p] * link[i][source[p][i]]
        cost[i, new] += traffic[p] * link[i][new]
        source[p][i] = new

    active = list(range(ranks)) if ranks > 1 else []
    while active:
        for g in list(active):
            t = int(cost[g].argmax())
            candidate = hottest(g, t)
            if candidate is None:
                active.remove(g)
                continue
            read_from(g, candidate, g)
            free[g] -= size[candidate]
            budget -= size[candidate]
            for i in nearer[g]:
                old = source[candidate][i]
                if old != i and link[i][g] < link[i][old]:
                    read_from(i, candidate, g)
                    heapq.heappush(waiting[i][g], position[candidate])
    return np.array(source, dtype=np.int64)
