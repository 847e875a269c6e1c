"""Classes: rows with equal width, accesses and containing samples are interchangeable.

A plan is then a matrix, rows of class c in group g, whatever the number of rows: 33.8 million
rows of Criteo-Kaggle sizes are about five thousand classes. The sums of §3.2 (equations 1-3)
are exact on classes; nothing is bucketed here.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.cost.expected_reads import expected_reads
from oper.cost.sums import Sums
from oper.cost.workload import Workload
from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile
from oper.tables.table import Table

_SLOT_BYTES = 8


@dataclass(frozen=True)
class Classes:
    """C classes, by accesses descending (then width, containing, ratio); vectors of shape [C]."""

    widths: tuple[tuple[int, int], ...]  # distinct (row bytes S, memory bytes m), ascending
    width: Ints  # index into `widths`
    accesses: Ints
    containing: Ints
    rows: Ints
    S: Floats
    m: Floats
    R: Floats  # expected reads by one rank per iteration
    D: Floats  # chance that one rank touches the row
    U: Floats  # chance that any rank does
    samples: int
    # Entry e: table `entry_table[e]` has `entry_rows[e]` rows of class `entry_class[e]`.
    entry_table: Ints
    entry_class: Ints
    entry_rows: Ints
    mailbox_bytes: float = 0.0  # expected of a rank: a slot and float32 values per touched row

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def total_bytes(self) -> int:
        """Memory of all tables with one copy of each row."""
        return int((self.rows * self.m.astype(np.int64)).sum())

    @cached_property
    def total_accesses(self) -> int:
        return int((self.rows * self.accesses).sum())

    @property
    def width_memory(self) -> list[int]:
        """m of each width, for the rounding of capacities."""
        return [m for _, m in self.widths]

    @cached_property
    def row_sums(self) -> Sums:
        """The sums of one row of each class, [C]."""
        accesses = self.accesses.astype(np.float64)
        return Sums.of_rows(self.S, self.m, accesses, self.R, self.D, self.U)

    def sums(self, counts: NDArray[np.generic]) -> Sums:
        """Sums of groups that hold `counts` rows of each class, [C, G] -> [G] each."""
        n = np.asarray(counts, dtype=np.float64).T
        return Sums(*(n @ getattr(self.row_sums, f.name) for f in fields(Sums)))

    def weight(self, workload: Workload) -> Floats:
        """Bytes per reader and iteration that a row with one owner moves: S·R, with S·D more for
        gradients in training. All of a single owner's terms in T are proportional to it."""
        return self.S * (self.R + self.D) if workload.training else self.S * self.R


def table_widths(tables: tuple[Table, ...], mode: str) -> tuple[list[tuple[int, int]], Ints]:
    """Distinct (S, m) of the tables, ascending, and each table's index among them."""
    pairs = [(table.row_bytes, table.memory_bytes(mode)) for table in tables]
    widths = sorted(set(pairs))
    return widths, np.array([widths.index(pair) for pair in pairs], dtype=np.int64)


def table_ratios(profile: Profile) -> tuple[Floats, Floats]:
    """Measured over expected distinct rows, per table, for a rank and for all ranks together."""
    if profile.distinct is None:
        ones = np.ones(len(profile.tables))
        return ones, ones
    return np.asarray(profile.distinct.rank_ratio), np.asarray(profile.distinct.union_ratio)


def classify(profile: Profile, workload: Workload, ranks: int) -> Classes:
    """The classes of all rows of a profile. One pass over its counters."""
    table, accesses, containing, rows = histogram(
        profile.accesses,
        profile.containing,
        profile.offsets,
        profile.containing_offsets,
    )
    return group(profile, workload, ranks, table, accesses, containing, rows)


def group(
    profile: Profile,
    workload: Workload,
    ranks: int,
    table: Ints,
    accesses: Ints,
    containing: Ints,
    rows: Ints,
) -> Classes:
    """Classes from entries: `rows[e]` rows of `table[e]` have those accesses and containing."""
    widths, width_of = table_widths(profile.tables, workload.mode)
    rank_ratio, union_ratio = table_ratios(profile)
    _, ratio_of = np.unique(
        np.stack([rank_ratio, union_ratio], axis=1), axis=0, return_inverse=True
    )
    ratio_of = ratio_of.ravel()
    entry_width, entry_ratio = width_of[table], ratio_of[table]
    order = np.lexsort((entry_ratio, -containing, entry_width, -accesses))
    keys = np.stack([accesses, entry_width, containing, entry_ratio], axis=1)[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    class_of = np.cumsum(new) - 1
    first = order[new]
    class_table = table[first]
    c_accesses, c_containing = accesses[first], containing[first]
    S = np.array([s for s, _ in widths], dtype=np.float64)[entry_width[first]]
    m = np.array([m for _, m in widths], dtype=np.float64)[entry_width[first]]
    R, D, U = expected_reads(
        c_accesses,
        c_containing,
        profile.samples,
        workload,
        ranks,
        rank_ratio[class_table],
        union_ratio[class_table],
    )
    values = np.array([t.dim for t in profile.tables], dtype=np.float64)[table[order]]
    return Classes(
        widths=tuple(widths),
        width=entry_width[first],
        accesses=c_accesses,
        containing=c_containing,
        rows=np.bincount(class_of, weights=rows[order], minlength=int(new.sum())).astype(np.int64),
        S=S,
        m=m,
        R=R,
        D=D,
        U=U,
        samples=profile.samples,
        entry_table=table[order],
        entry_class=class_of,
        entry_rows=rows[order],
        mailbox_bytes=float((rows[order] * D[class_of] * (_SLOT_BYTES + 4 * values)).sum()),
    )
