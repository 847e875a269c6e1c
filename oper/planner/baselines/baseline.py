"""What a baseline is: so many rows of each class on each rank, priced by the same cost."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets, single_owner_sets
from oper.cost.objective import Cost, evaluate
from oper.cost.sums import Sums
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import Problem
from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile


@dataclass(frozen=True)
class Cells:
    """Cell n: `rows[n]` rows of class `class_of[n]` are in group `group[n]`."""

    class_of: Ints
    group: Ints
    rows: Ints

    def dense(self, classes: int, groups: int) -> Ints:
        """Rows of each class in each group, [C, G]."""
        counts = np.zeros((classes, groups), dtype=np.int64)
        np.add.at(counts, (self.class_of, self.group), self.rows)
        return counts

    def sums(self, classes: Classes, groups: int) -> Sums:
        """Sums of the groups, without the dense matrix."""
        one = classes.row_sums

        def total(per_row: Floats) -> Floats:
            weights = self.rows * per_row[self.class_of]
            return np.bincount(self.group, weights, minlength=groups).astype(np.float64)

        return Sums(*(total(getattr(one, f.name)) for f in fields(Sums)))


@dataclass(frozen=True)
class Pieces:
    """Contiguous ranges of global row ids, covering all rows, none across two tables: piece p is
    rows `first[p]` to `first[p + 1]` and lies on rank `rank[p]`."""

    first: Ints
    rank: Ints

    def owners(self) -> NDArray[np.uint16]:
        """The owner of every row, [N]."""
        return np.repeat(self.rank.astype(np.uint16), np.diff(self.first))


@dataclass(frozen=True)
class Baseline:
    """A placement by another rule. `cells` and `pieces` are None where it has no such form."""

    name: str
    groups: HolderSets
    sums: Sums
    cells: Cells | None = None
    pieces: Pieces | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class NoPlacementError(Exception):
    """A method came to no placement: `status` is "time_limit" or "infeasible"."""

    def __init__(self, status: Literal["time_limit", "infeasible"], reason: str) -> None:
        super().__init__(reason)
        self.status = status


def price_baseline(problem: Problem, baseline: Baseline) -> Cost:
    """What the baseline costs; infeasible where it holds more than the problem's capacities."""
    return evaluate(
        problem.topology,
        problem.workload,
        baseline.groups,
        baseline.sums,
        problem.capacity_bytes,
    )


def piece_cells(problem: Problem, profile: Profile, pieces: Pieces) -> Cells:
    """The cells of pieces, by rank. One pass over the profile's counters."""
    classes, ranks = problem.classes, problem.topology.ranks
    piece, accesses, containing, rows = piece_histogram(profile, pieces.first)
    table = piece_tables(profile, pieces.first)[piece]
    found = find_classes(classes, table, accesses, containing)
    cell, at = np.unique(found * ranks + pieces.rank[piece], return_inverse=True)
    total = np.bincount(at, rows).astype(np.int64)
    return Cells(cell // ranks, cell % ranks, total)


def piece_histogram(profile: Profile, first: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(piece, accesses, containing, rows) of pieces that begin at rows `first` [P + 1]."""
    bagged = np.asarray(profile.bagged)[piece_tables(profile, first)]
    containing_first = np.concatenate([[0], np.cumsum(np.where(bagged, np.diff(first), 0))])
    return histogram(profile.accesses, profile.containing, first, containing_first)


def piece_tables(profile: Profile, first: Ints) -> Ints:
    """The table of each piece, [P]."""
    return np.searchsorted(profile.offsets, first[:-1], side="right") - 1


def find_classes(classes: Classes, table: Ints, accesses: Ints, containing: Ints) -> Ints:
    """The class of rows with these counts in these tables; all of them must occur."""
    known = classes.entry_class
    distinct_accesses = np.unique(classes.accesses)
    distinct_containing = np.unique(classes.containing)

    def key(table: Ints, accesses: Ints, containing: Ints) -> Ints:
        # Ranks of the counts among those that occur: the product stays below 2^63.
        code = table * len(distinct_accesses) + np.searchsorted(distinct_accesses, accesses)
        code = code * len(distinct_containing)
        return np.asarray(code + np.searchsorted(distinct_containing, containing))

    of_entry = key(classes.entry_table, classes.accesses[known], classes.containing[known])
    order = np.argsort(of_entry)
    at = np.searchsorted(of_entry, key(table, accesses, containing), sorter=order)
    return known[order[at]]


def single_owner_baseline(
    name: str, problem: Problem, cells: Cells, pieces: Pieces | None = None
) -> Baseline:
    groups = single_owner_sets(problem.topology.ranks)
    return Baseline(name, groups, cells.sums(problem.classes, len(groups)), cells, pieces)
