"""Classes: rows with equal width, accesses and samples with the row are interchangeable.

In: a profile's counters. Out: `Classes`. A placement is then a matrix, rows of class c in holder
set g, whatever the number of rows: 33.8 million rows of Criteo-Kaggle sizes are about five thousand
classes. The sums of §3.2 (equations 1-3) are exact on classes; nothing is bucketed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.expected_counts import as_many, expected_counts
from oper.cost.expected_reads import expected_reads, node_touches
from oper.cost.holder_sets import Sums
from oper.cost.step_memory import SLOT_BYTES
from oper.cost.traffic import Traffic
from oper.cost.workload import Workload
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.topology import Topology


class Width(NamedTuple):
    """Bytes of a row, S, and of the memory it takes with its optimizer state, m."""

    row_bytes: int
    memory_bytes: int


class TableWidths(NamedTuple):
    """The distinct widths of the tables, ascending, and each table's index among them, [T]."""

    widths: tuple[Width, ...]
    of_table: Ints


class DistinctRatios(NamedTuple):
    """Measured over expected distinct rows of each table, [T]; 1 if not measured."""

    of_rank: Floats
    of_all_ranks: Floats


@dataclass(frozen=True, eq=False)
class Classes:
    """C classes, by accesses descending (then width, samples with the row, ratio of distinct rows).

    All vectors are of shape [C] unless they say otherwise; bytes are of one row.
    """

    widths: tuple[Width, ...]  # distinct, ascending
    width: Ints  # index into `widths`
    accesses: Ints
    samples_with_row: Ints
    rows: Ints
    S: Floats  # bytes of a row
    m: Floats  # bytes of memory: the row and, in training, its optimizer state
    expected: Floats  # accesses of a row in as many further samples (expected_counts.py)
    R: Floats  # expected reads by one rank per iteration
    D: Floats  # chance that one rank touches the row
    U: Floats  # chance that any rank does
    samples: int
    # Chance that any rank of a node does, [C, K], by the size of nodes that have relays
    D_of_node: Floats
    # Entry e: table `entry_table[e]` has `entry_rows[e]` rows of class `entry_class[e]`.
    entry_table: Ints
    entry_class: Ints
    entry_rows: Ints
    # Expected of a rank in training: a slot number and float32 gradients for each row it touches.
    mailbox_bytes: float = 0.0
    dim: int = 0  # values of the widest row
    gradient_ratio: float = 1.0  # the most bytes of a row's float32 gradient over the row's
    pooled: NDArray[np.bool_] | bool = False  # whether the rows of each class are of pooled tables

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
        return [width.memory_bytes for width in self.widths]

    def widest_first(self) -> list[int]:
        """Return the indices of `widths`, most memory first."""
        memory = self.width_memory
        return sorted(range(len(memory)), key=lambda w: -memory[w])

    @cached_property
    def row_sums(self) -> Sums:
        """The sums of one row of each class, [C]."""
        accesses = self.accesses.astype(np.float64)
        of_nodes = self.D_of_node
        return Sums.of_rows(self.S, self.m, accesses, self.R, self.D, self.U, of_nodes, self.pooled)

    def sums(self, counts: NDArray[np.generic]) -> Sums:
        """Return the sums of holder sets with `counts` rows of each class: [C, G] -> [G] each."""
        figures, columns = self._row_figures
        totals = dot(np.ascontiguousarray(counts.T, dtype=np.float64), figures)
        return Sums(*(np.ascontiguousarray(totals[:, of]) for of in columns))

    @cached_property
    def _row_figures(self) -> tuple[Floats, list[int | slice]]:
        """`row_sums` as one matrix, so that `sums` takes one product, and the columns of each."""
        figures = [getattr(self.row_sums, f.name) for f in fields(Sums)]
        columns: list[int | slice] = []
        width = 0
        for of in figures:
            columns.append(width if of.ndim == 1 else slice(width, width + of.shape[1]))
            width += 1 if of.ndim == 1 else of.shape[1]
        return np.column_stack(figures), columns

    def memory_of(self, counts: Ints) -> Floats:
        """Return the memory of holder sets with `counts` rows of each class: [C, G] -> [G]. Exact
        in whatever order rows are added, because bytes and rows are whole numbers."""
        memory = np.zeros(counts.shape[1])
        for w, width in enumerate(self.widths):
            of_width = counts if len(self.widths) == 1 else counts[self.width == w]
            memory += of_width.sum(axis=0) * float(width.memory_bytes)
        return memory

    def traffic_bytes(self, workload: Workload) -> Floats:
        """Return the bytes that one rank moves in an iteration for a row with one owner, [C]: S·R,
        and S·D more for its gradient in training."""
        return self.S * (self.R + self.D) if workload.training else self.S * self.R

    def traffic(self, topology: Topology, workload: Workload) -> Traffic:
        """Return the bytes of `traffic_bytes` with who pays for them: all terms in T of a row with
        one owner."""
        return Traffic.of(
            topology,
            workload.training,
            self.traffic_bytes(workload),
            self.S * self.R,
            self.S * self.D,
            self.row_sums.node_bytes,
            self.S * self.R * self.pooled,
            self.S * self.D * self.pooled,
        )


def table_widths(tables: tuple[Table, ...], mode: str) -> TableWidths:
    """Return the widths of the tables; `mode` says whether optimizer state counts as memory."""
    of_tables = [Width(table.row_bytes, table.memory_bytes(mode)) for table in tables]
    widths = tuple(sorted(set(of_tables)))
    return TableWidths(widths, np.array([widths.index(w) for w in of_tables], dtype=np.int64))


def distinct_ratios(profile: Profile) -> DistinctRatios:
    """Return the ratios that a profile measured."""
    if profile.distinct is None:
        ones = np.ones(len(profile.tables))
        return DistinctRatios(ones, ones)
    distinct = profile.distinct
    return DistinctRatios(np.asarray(distinct.rank_ratio), np.asarray(distinct.union_ratio))


def measured_ratios(profile: Profile) -> Floats | None:
    """Return the ratios that a profile measured, [T, 2]: of a rank, of all ranks. None if it did
    not."""
    return None if profile.distinct is None else np.stack(distinct_ratios(profile), axis=1)


def classify(
    profile: Profile,
    workload: Workload,
    ranks: int,
    as_counted: bool = False,
    by_table: bool = False,
    node_sizes: Sequence[int] = (),
    pooled: NDArray[np.bool_] | None = None,
) -> Classes:
    """Return the classes of all rows of a profile; `as_counted`, `by_table`, `node_sizes` and
    `pooled` as for `group`."""
    entries = profile.rows_by_counts
    return group(profile, workload, ranks, *entries, as_counted, by_table, node_sizes, pooled)


def group(
    profile: Profile,
    workload: Workload,
    ranks: int,
    table: Ints,
    accesses: Ints,
    samples_with_row: Ints,
    rows: Ints,
    as_counted: bool = False,
    by_table: bool = False,
    node_sizes: Sequence[int] = (),
    pooled: NDArray[np.bool_] | None = None,
) -> Classes:
    """Return the classes from entries: `rows[e]` rows of `table[e]` have `accesses[e]` accesses and
    occur in `samples_with_row[e]` samples.

    The reads of an iteration are expected of further samples, or, `as_counted`, of the log's own.
    `by_table`: rows of different tables are of different classes, each of which is then one entry.
    `node_sizes`: those of the nodes whose ranks read rows of others through relays. `pooled[t]`:
    whether table t is pooled (none are); rows of such are of classes of their own.
    """
    widths, width_of = table_widths(profile.tables, workload.mode)
    ratios = distinct_ratios(profile)
    _, ratio_of = np.unique(np.stack(ratios, axis=1), axis=0, return_inverse=True)
    ratio_of = ratio_of.ravel()
    entry_width, entry_ratio = width_of[table], ratio_of[table]
    estimated = not (as_counted or workload.training)
    expected = (
        expected_counts(table, accesses, samples_with_row, rows, profile.turnover)
        if estimated
        else as_many(accesses, samples_with_row)
    )
    # Rows that were seldom read are told apart by their expected reads, by table.
    _, entry_expected = np.unique(expected.accesses, return_inverse=True)
    entry_expected = np.where(expected.differs, entry_expected.ravel(), 0)
    of_tables = np.zeros(len(profile.tables), dtype=bool) if pooled is None else pooled
    kept_apart = table if by_table else of_tables[table].astype(np.int64)
    by = (kept_apart, entry_ratio, -samples_with_row, -entry_expected, entry_width, -accesses)
    order = np.lexsort(by)
    keys = np.stack(by, axis=1)[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    class_of = np.cumsum(new) - 1
    first = order[new]
    class_table = table[first]
    c_accesses, c_samples = accesses[first], samples_with_row[first]
    S = np.array([w.row_bytes for w in widths], dtype=np.float64)[entry_width[first]]
    m = np.array([w.memory_bytes for w in widths], dtype=np.float64)[entry_width[first]]
    alive = expected.alive[first]
    each = expected.samples_with_row[first] / alive
    R, D, U = expected_reads(
        expected.accesses[first] / alive,
        each,
        profile.samples,
        workload,
        ranks,
        ratios.of_rank[class_table],
        ratios.of_all_ranks[class_table],
        of_tables[class_table],
    )
    D_of_node = node_touches(
        each,
        profile.samples,
        workload,
        ranks,
        node_sizes,
        ratios.of_rank[class_table],
        ratios.of_all_ranks[class_table],
    )
    values = np.array([t.dim for t in profile.tables], dtype=np.float64)[table[order]]
    return Classes(
        widths=widths,
        width=entry_width[first],
        accesses=c_accesses,
        samples_with_row=c_samples,
        rows=np.bincount(class_of, weights=rows[order], minlength=int(new.sum())).astype(np.int64),
        S=S,
        m=m,
        expected=expected.accesses[first],
        R=R * alive,
        D=D * alive,
        U=U * alive,
        samples=profile.samples,
        D_of_node=D_of_node * alive[:, None],
        entry_table=table[order],
        entry_class=class_of,
        entry_rows=rows[order],
        mailbox_bytes=float(
            (rows[order] * (D * alive)[class_of] * (SLOT_BYTES + 4 * values)).sum()
        ),
        dim=max((t.dim for t in profile.tables), default=0),
        gradient_ratio=max((4 * t.dim / t.row_bytes for t in profile.tables), default=1.0),
        pooled=of_tables[class_table],
    )
