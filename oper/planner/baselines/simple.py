"""The simple baselines (§6.4).

In: `Problem`. Out: `Baseline`.

    memory_greedy  all rows in table order, cut into M runs of equal memory
    access_greedy  rows one by one, most accessed first, to the rank with the fewest accesses so
                   far; memory is ignored. Rows without accesses, on which that rule is silent,
                   are spread evenly
    table_wise     whole tables in turn (table t to rank t mod M): equally many on each rank
    row_wise       every table in M contiguous ranges whose lengths differ by at most one row; the
                   longer ones go to the ranks in turn, so that they do not pile up on the first

Rows of a class are interchangeable, so a baseline is a list of cells: so many rows of a class on a
rank. The contiguous ones also say which rows exactly, as ranges.
"""

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from oper.planner.baselines.baseline import (
    Baseline,
    Cells,
    Pieces,
    piece_cells,
    single_owner_baseline,
)
from oper.planner.problem.problem import ClassProblem, Problem


def table_wise(problem: Problem) -> Baseline:
    """Whole tables to the ranks in turn, in table order."""
    classes, ranks = problem.classes, problem.ranks
    cells = Cells(classes.entry_class, classes.entry_table % ranks, classes.entry_rows)
    offsets = problem.profile.offsets
    pieces = Pieces(offsets, np.arange(len(offsets) - 1) % ranks)
    return single_owner_baseline("table_wise", problem, cells, pieces)


def memory_greedy(problem: Problem) -> Baseline:
    """All rows in table order, cut into M runs of equal memory."""
    pieces = memory_pieces(problem)
    return single_owner_baseline("memory_greedy", problem, piece_cells(problem, pieces), pieces)


def row_wise(problem: Problem) -> Baseline:
    """Every table in M contiguous ranges of equal length."""
    pieces = row_wise_pieces(problem)
    return single_owner_baseline("row_wise", problem, piece_cells(problem, pieces), pieces)


def access_greedy(problem: ClassProblem) -> Baseline:
    """Rows one by one, most accessed first, to the rank with the fewest accesses so far."""
    classes, ranks = problem.classes, problem.ranks
    least = [(0, rank) for rank in range(ranks)]  # a heap of (accesses so far, rank)
    class_of: list[int] = []
    rank_of: list[int] = []
    rows_of: list[int] = []

    def give(index: int, ranks: Iterable[int], rows: Iterable[int]) -> None:
        before = len(rank_of)
        rank_of.extend(ranks)
        rows_of.extend(rows)
        class_of.extend([index] * (len(rank_of) - before))

    for index, (rows, accesses) in enumerate(
        zip(classes.rows.tolist(), classes.accesses.tolist(), strict=True)
    ):
        if accesses == 0:
            share, rest = divmod(rows, ranks)
            give(index, range(ranks), (share + ((r - index) % ranks < rest) for r in range(ranks)))
        elif rows <= ranks:
            for _ in range(rows):
                held, rank = least[0]
                heapq.heapreplace(least, (held + accesses, rank))
                give(index, [rank], [1])
        else:
            load = [held for _, held in sorted((rank, held) for held, rank in least)]
            given = water_fill(load, rows, accesses)
            give(index, range(ranks), given)
            least = [(load[rank] + n * accesses, rank) for rank, n in enumerate(given)]
            heapq.heapify(least)
    columns = (np.array(values, dtype=np.int64) for values in (class_of, rank_of, rows_of))
    return single_owner_baseline("access_greedy", problem, Cells(*columns))


def water_fill(load: list[int], rows: int, size: int) -> list[int]:
    """How many of `rows` items of equal `size` > 0 each rank gets when one after the other goes to
    the rank with the least load, the lowest rank in ties. In O(M log M), whatever the rows.

    The k-th item of rank j comes at level load[j] + k·size; the `rows` items with the smallest
    levels are given. At the water level T (a rank below it is filled up to it), rank j
    gets ⌈(T - load[j]) / size⌉ items or one fewer: that fewer first, the rest by their levels.
    """
    given = [0] * len(load)
    if rows > len(load):
        poured = rows * size
        for below, held in enumerate(sorted(load)):
            if below and held * below >= poured:
                break
            poured += held
            level = poured // (below + 1)
        given = [max(-((held - level) // size) - 1, 0) for held in load]
    heap = [(held + n * size, rank) for rank, (held, n) in enumerate(zip(load, given, strict=True))]
    heapq.heapify(heap)
    for _ in range(rows - sum(given)):
        held, rank = heap[0]
        given[rank] += 1
        heapq.heapreplace(heap, (held + size, rank))
    return given


def memory_pieces(problem: Problem) -> Pieces:
    """Pieces of `memory_greedy`: cuts after the last row that ends within k/M of all memory."""
    tables, offsets, ranks = problem.profile.tables, problem.profile.offsets, problem.ranks
    memory = np.array([table.memory_bytes(problem.workload.mode) for table in tables])
    end_bytes = np.cumsum(np.diff(offsets) * memory)
    target = end_bytes[-1] * np.arange(1, ranks) // ranks
    table = np.searchsorted(end_bytes, target, side="right")
    start_bytes = end_bytes[table] - np.diff(offsets)[table] * memory[table]
    cuts = offsets[table] + (target - start_bytes) // memory[table]
    first = np.unique(np.concatenate([offsets, cuts]))
    return Pieces(first, np.searchsorted(cuts, first[:-1], side="right"))


def row_wise_pieces(problem: Problem) -> Pieces:
    """Pieces of `row_wise`; empty ranges, of tables with fewer rows than ranks, are left out."""
    tables, ranks = problem.profile.tables, problem.ranks
    turn: dict[tuple[int, int], int] = {}
    lengths: list[NDArray[np.int64]] = []
    for table in tables:
        share, rest = divmod(table.rows, ranks)
        # Longer ranges begin where those of the last table of this width stopped: even memory.
        width = table.row_bytes, table.memory_bytes(problem.workload.mode)
        begin = turn.get(width, 0)
        length = np.full(ranks, share, dtype=np.int64)
        length[(begin + np.arange(rest)) % ranks] += 1
        turn[width] = (begin + rest) % ranks
        lengths.append(length)
    length = np.concatenate(lengths)
    rank = np.tile(np.arange(ranks), len(tables))[length > 0]
    first = np.concatenate([[0], np.cumsum(length[length > 0])])
    return Pieces(first, rank)
