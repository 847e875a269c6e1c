"""The simple baselines (§6.4).

In: `Problem`. Out: `Baseline`.

    memory_greedy  all rows in table order, cut into M runs of equal memory
    access_greedy  rows one by one, most accessed first, to the rank with the fewest accesses so
                   far; memory is ignored. Rows without accesses, on which that rule is silent,
                   are spread evenly
    table_wise     whole tables in turn (table t to rank t mod M): equally many on each rank
    full_copies    a copy of each row on each rank
    row_wise       every table in M contiguous ranges whose lengths differ by at most one row; the
                   longer ones go to the ranks in turn, so that they do not pile up on the first

Rows of a class are interchangeable, so a baseline is a list of cells: so many rows of a class on a
rank. The contiguous ones also say which rows exactly, as ranges.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import as_int64
from oper.cost.holder_sets import everywhere_set
from oper.planner.baselines.baseline import (
    Baseline,
    Cells,
    Pieces,
    piece_cells,
    single_owner_baseline,
)
from oper.planner.problem.problem import ClassProblem, Problem


def table_wise(problem: Problem) -> Baseline:
    """Place whole tables on the ranks in turn, in table order."""
    classes, ranks = problem.classes, problem.ranks
    cells = Cells(classes.entry_class, classes.entry_table % ranks, classes.entry_rows)
    offsets = problem.profile.offsets
    pieces = Pieces(offsets, np.arange(len(offsets) - 1) % ranks)
    return single_owner_baseline("table_wise", problem, cells, pieces)


def full_copies(problem: Problem) -> Baseline:
    """Place a copy of each row on each rank."""
    classes = np.arange(len(problem.classes))
    cells = Cells(classes, np.zeros_like(classes), problem.classes.rows)
    sums = cells.sums(problem.classes, 1)
    return Baseline("full_copies", everywhere_set(problem.ranks), sums, cells)


def memory_greedy(problem: Problem) -> Baseline:
    """Place all rows in table order, cut into M runs of equal memory."""
    pieces = memory_pieces(problem)
    return single_owner_baseline("memory_greedy", problem, piece_cells(problem, pieces), pieces)


def row_wise(problem: Problem) -> Baseline:
    """Place every table in M contiguous ranges of equal length."""
    pieces = row_wise_pieces(problem)
    return single_owner_baseline("row_wise", problem, piece_cells(problem, pieces), pieces)


def access_greedy(problem: ClassProblem) -> Baseline:
    """Place rows one by one, most accessed first, on the rank with the fewest accesses so far."""
    classes = problem.classes
    cells: Any = native.ops().rows_to_least_loaded(
        as_int64(classes.rows), as_int64(classes.accesses), problem.ranks
    )
    return single_owner_baseline("access_greedy", problem, Cells(*cells.numpy()))


def memory_pieces(problem: Problem) -> Pieces:
    """Return the pieces of `memory_greedy`: cuts after the last row that ends within k/M of all
    memory."""
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
    """Return the pieces of `row_wise`; empty ranges, of tables with fewer rows than ranks, are left
    out."""
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
