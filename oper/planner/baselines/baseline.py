"""Baseline: a number of rows of each class in each holder set, priced by the same cost as a plan.

In: `Problem`, ranges of rows. Out: `Baseline`, its `Cost`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets, Sums, single_owner_sets
from oper.cost.objective import Cost
from oper.cost.vectors_per_bag import PartAccesses
from oper.planner.problem.class_finder import TableEntries
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem, Problem
from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile


@dataclass(frozen=True)
class Cells:
    """Cell n: `rows[n]` rows of class `class_of[n]` are in holder set `group[n]`, in addition to
    those of other cells of the class there."""

    class_of: Ints
    group: Ints
    rows: Ints

    def dense(self, classes: int, sets: int) -> Ints:
        """Return the rows of each class in each holder set, [C, G]."""
        counts = np.zeros((classes, sets), dtype=np.int64)
        np.add.at(counts, (self.class_of, self.group), self.rows)
        return counts

    def sums(self, classes: Classes, sets: int) -> Sums:
        """Return the sums of the holder sets, without the dense matrix."""
        one = classes.row_sums

        def total(per_row: Floats) -> Floats:
            totals = self.rows * per_row[self.class_of]
            return np.bincount(self.group, totals, minlength=sets).astype(np.float64)

        return one.by_row(total)


@dataclass(frozen=True)
class ColumnCells:
    """Cells of a placement that splits rows; a cell has `share` [cells] of its rows' bytes."""

    cells: Cells
    share: Floats


@dataclass(frozen=True)
class Pieces:
    """Contiguous ranges of global row ids, covering all rows, none across two tables: piece p is
    rows `first[p]` to `first[p + 1]` and lies on rank `rank[p]`."""

    first: Ints
    rank: Ints

    def owners(self) -> NDArray[np.uint16]:
        """Return the owner of every row, [N]."""
        return np.repeat(self.rank.astype(np.uint16), np.diff(self.first))


class Status(StrEnum):
    """Outcome of a method."""

    OK = "ok"
    NOT_POOLED = "not_pooled"  # it knows no pooled tables, and all were to be pooled
    TIME_LIMIT = "time_limit"  # it was stopped, with the best placement until then or with none
    INFEASIBLE = "infeasible"  # it has no placement, or one that exceeds a capacity


# The batch that the paper's Batch_Size is read as.
BatchReading = Literal["rank", "all ranks"]


@dataclass(frozen=True)
class PaperNotes:
    """Result of the paper's procedure.

    threshold: of its partitions, after backtracking. batch: in training, the reading of
    Batch_Size with the shorter transfer time; None in inference, whose rule has no Batch_Size.
    """

    threshold: float
    partitions: int
    balance: float
    batch: BatchReading | None = None


@dataclass(frozen=True)
class PooledBytes:
    """Bytes between ranks in an iteration as TorchRec moves them, summed over the ranks."""

    DERIVED: ClassVar = ("total",)  # in JSON in addition to the fields

    ids: float
    outputs: float
    gradients: float
    allreduce: float

    @property
    def total(self) -> float:
        return self.ids + self.outputs + self.gradients + self.allreduce


@dataclass(frozen=True)
class TorchRecNotes:
    """Input and answer of TorchRec's planner, which got `capacity_factor` times the memory, the
    smallest tried with which it found a plan; `tables` are the numbers of tables by kind of
    sharding."""

    capacity_factor: float
    estimate_seconds: float  # of an iteration, by its own cost model
    plan_seconds: float
    tables: dict[str, int]
    pooled_bytes: PooledBytes


@dataclass(frozen=True)
class SolverNotes:
    """Results that the solver of whole partitions proved: no placement of them takes less than the
    bound, and the placement found takes longer than the best by at most the share `solver_gap`."""

    partitions: int
    solver_gap: float
    solver_bound_seconds: float


Notes = PaperNotes | TorchRecNotes | SolverNotes


@dataclass(frozen=True)
class Baseline:
    """A placement by another rule.

    cells: None if a row may be split; `column_cells` are its cells then. pieces: None unless the
    placement is of ranges of rows. notes: shown by `oper compare`. planning_seconds: time of
    planning that a method itself reports, because making its placement takes longer. parts,
    table_sums: of a placement without cells the accesses to pooled tables, and the sums of each
    table in turn, [T * G]. under: this very placement under the counts of another problem; None if
    a class's rows are not told apart, because nobody knows then which of them are read later.
    """

    name: str
    holder_sets: HolderSets
    sums: Sums
    cells: Cells | None = None
    column_cells: ColumnCells | None = None
    pieces: Pieces | None = None
    notes: Notes | None = None
    status: Status = Status.OK
    planning_seconds: float | None = None
    parts: tuple[PartAccesses, ...] = ()
    table_sums: Sums | None = None
    under: "Callable[[Problem], Baseline] | None" = None


class NoPlacementError(Exception):
    """A method came to no placement, within its time or at all, or to none that is priced as was
    asked; `planning_seconds` as in `Baseline`."""

    def __init__(
        self,
        status: Literal[Status.TIME_LIMIT, Status.INFEASIBLE, Status.NOT_POOLED],
        reason: str,
        planning_seconds: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.status, self.planning_seconds = status, planning_seconds


def price_baseline(problem: ClassProblem, baseline: Baseline) -> Cost:
    """Price the baseline; the cost is infeasible if the baseline exceeds the problem's
    capacities."""
    return problem.price(baseline.holder_sets, baseline.sums)


class PieceCounts(NamedTuple):
    """`rows[n]` rows of piece `piece[n]`, of class `class_of[n]`."""

    piece: Ints
    class_of: Ints
    rows: Ints


def piece_cells(problem: Problem, pieces: Pieces) -> Cells:
    """Return the cells of pieces, in one pass over the profile's counters."""
    counts = count_pieces(problem, pieces.first)
    return Cells(counts.class_of, pieces.rank[counts.piece], counts.rows)


def count_pieces(problem: Problem, first: Ints) -> PieceCounts:
    """Return the rows of each class in pieces that begin at rows `first` [P + 1]."""
    profile, table = problem.profile, piece_tables(problem.profile, first)
    bagged = np.asarray(profile.bagged)[table]
    samples_with_row_first = np.concatenate([[0], np.cumsum(np.where(bagged, np.diff(first), 0))])
    piece, accesses, samples_with_row, rows = histogram(
        profile.accesses, profile.samples_with_row, first, samples_with_row_first
    )
    tables = np.arange(len(profile.tables) + 1)
    class_of = TableEntries.of(problem.classes, len(profile.tables)).find(
        accesses.view(np.uint64),
        samples_with_row.view(np.uint64),
        np.searchsorted(table[piece], tables),
    )
    return PieceCounts(piece, class_of.astype(np.int64), rows)


def piece_tables(profile: Profile, first: Ints) -> Ints:
    """Return the table of each piece, [P]."""
    return np.searchsorted(profile.offsets, first[:-1], side="right") - 1


def single_owner_baseline(
    name: str, problem: ClassProblem, cells: Cells, pieces: Pieces | None = None
) -> Baseline:
    """Return a baseline without replicas: the holder sets of its cells are the ranks."""
    sets = single_owner_sets(problem.ranks)

    def under(other: Problem) -> Baseline:
        assert pieces is not None
        return single_owner_baseline(name, other, piece_cells(other, pieces), pieces)

    return Baseline(
        name,
        sets,
        cells.sums(problem.classes, len(sets)),
        cells,
        pieces=pieces,
        under=None if pieces is None else under,
    )
