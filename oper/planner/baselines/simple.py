"""Baselines: placements that others use, priced by the same cost model (§6.4).

    memory_greedy  all rows in table order, cut into M runs of equal memory
    access_greedy  rows one by one, most accessed first, to the rank with the fewest accesses so
                   far; memory is ignored. Rows without accesses, on which that rule is silent,
                   are spread evenly
    table_wise     whole tables in turn (table t to rank t mod M): equally many on each rank
    row_wise       every table in M contiguous ranges whose lengths differ by at most one row; the
                   longer ones go to the ranks in turn, so that they do not pile up on the first

The paper's own procedure is in `paper_procedure.py`, TorchRec's planner in `sharding_planner.py`.
Rows of a class are interchangeable, so a baseline is a list of cells, so many rows of a class in a
group; the contiguous ones also say which rows exactly, as ranges.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from oper.planner.baselines.baseline import (
    Baseline,
    Cells,
    Pieces,
    piece_cells,
    single_owner_baseline,
)
from oper.planner.problem.problem import Problem
from oper.profiling.profile import Profile


def table_wise(problem: Problem, profile: Profile) -> Baseline:
    """Whole tables to the ranks in turn, in table order."""
    classes, ranks = problem.classes, problem.topology.ranks
    cells = Cells(classes.entry_class, classes.entry_table % ranks, classes.entry_rows)
    offsets = profile.offsets
    pieces = Pieces(offsets, np.arange(len(offsets) - 1) % ranks)
    return single_owner_baseline("table_wise", problem, cells, pieces)


def memory_greedy(problem: Problem, profile: Profile) -> Baseline:
    """All rows in table order, cut into M runs of equal memory."""
    pieces = memory_pieces(problem, profile)
    return single_owner_baseline(
        "memory_greedy", problem, piece_cells(problem, profile, pieces), pieces
    )


def row_wise(problem: Problem, profile: Profile) -> Baseline:
    """Every table in M contiguous ranges of equal length."""
    pieces = row_wise_pieces(problem, profile)
    return single_owner_baseline("row_wise", problem, piece_cells(problem, profile, pieces), pieces)


def access_greedy(problem: Problem, profile: Profile) -> Baseline:
    """Rows one by one, most accessed first, to the rank with the fewest accesses so far."""
    classes, ranks = problem.classes, problem.topology.ranks
    least = [(0, rank) for rank in range(ranks)]  # a heap of loads
    cells: list[tuple[int, int, int]] = []
    for index, (rows, accesses) in enumerate(
        zip(classes.rows.tolist(), classes.accesses.tolist(), strict=True)
    ):
        if accesses == 0:
            share, rest = divmod(rows, ranks)
            cells += [(index, r, share + ((r - index) % ranks < rest)) for r in range(ranks)]
        elif rows <= ranks:
            for _ in range(rows):
                held, rank = least[0]
                heapq.heapreplace(least, (held + accesses, rank))
                cells.append((index, rank, 1))
        else:
            load = [held for _, held in sorted((rank, held) for held, rank in least)]
            dealt = water_fill(load, rows, accesses)
            cells += [(index, rank, n) for rank, n in enumerate(dealt)]
            least = [(load[rank] + n * accesses, rank) for rank, n in enumerate(dealt)]
            heapq.heapify(least)
    class_of, group, rows_of = np.array(cells, dtype=np.int64).reshape(-1, 3).T
    return single_owner_baseline("access_greedy", problem, Cells(class_of, group, rows_of))


def water_fill(load: list[int], rows: int, size: int) -> list[int]:
    """How many of `rows` items of equal `size` > 0 each rank gets when one after the other goes to
    the rank with the least load, the lowest rank in ties. In O(M log M), whatever the rows.

    The k-th item of rank j comes at load[j] + k·size; the items with the `rows` smallest such
    levels are the ones dealt. At the water level T (a rank below it is filled up to it), rank j
    gets ⌈(T - load[j]) / size⌉ items or one fewer: that fewer first, the rest by their levels.
    """
    dealt = [0] * len(load)
    if rows > len(load):
        poured = rows * size
        for below, held in enumerate(sorted(load)):
            if below and held * below >= poured:
                break
            poured += held
            level = poured // (below + 1)
        dealt = [max(-((held - level) // size) - 1, 0) for held in load]
    heap = [(held + n * size, rank) for rank, (held, n) in enumerate(zip(load, dealt, strict=True))]
    heapq.heapify(heap)
    for _ in range(rows - sum(dealt)):
        held, rank = heap[0]
        dealt[rank] += 1
        heapq.heapreplace(heap, (held + size, rank))
    return dealt


def memory_pieces(problem: Problem, profile: Profile) -> Pieces:
    """Pieces of `memory_greedy`: cuts after the last row that ends within k/M of all memory."""
    offsets, ranks = profile.offsets, problem.topology.ranks
    memory = np.array([table.memory_bytes(problem.workload.mode) for table in profile.tables])
    end_bytes = np.cumsum(np.diff(offsets) * memory)
    target = end_bytes[-1] * np.arange(1, ranks) // ranks
    table = np.searchsorted(end_bytes, target, side="right")
    start_bytes = end_bytes[table] - np.diff(offsets)[table] * memory[table]
    cuts = offsets[table] + (target - start_bytes) // memory[table]
    first = np.unique(np.concatenate([offsets, cuts]))
    return Pieces(first, np.searchsorted(cuts, first[:-1], side="right"))


def row_wise_pieces(problem: Problem, profile: Profile) -> Pieces:
    """Pieces of `row_wise`; empty ranges, of tables with fewer rows than ranks, are left out."""
    ranks = problem.topology.ranks
    turn: dict[tuple[int, int], int] = {}
    lengths: list[NDArray[np.int64]] = []
    for table in profile.tables:
        share, rest = divmod(table.rows, ranks)
        # Remainders go on where the last table of this width left off: memory stays even.
        width = table.row_bytes, table.memory_bytes(problem.workload.mode)
        begin = turn.get(width, 0)
        length = np.full(ranks, share, dtype=np.int64)
        length[(begin + np.arange(rest)) % ranks] += 1
        turn[width] = (begin + rest) % ranks
        lengths.append(length)
    length = np.concatenate(lengths)
    rank = np.tile(np.arange(ranks), len(profile.tables))[length > 0]
    first = np.concatenate([[0], np.cumsum(length[length > 0])])
    return Pieces(first, rank)
