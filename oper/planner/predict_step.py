"""Predicted step of a placement: its classes of rows as the phases need them.

In: a `Problem` and the number of rows of each class in each holder set. Out: `StepTime`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.base.portable_math import dot, expm1, log1p
from oper.cost.allreduce import Method
from oper.cost.holder_sets import HolderSets
from oper.cost.step_time import Amount, Bags, BatchRows, Part, StepTime, step_time
from oper.cost.vectors_per_bag import pooled_of
from oper.planner.baselines.baseline import Cells
from oper.planner.problem.classes import Classes, table_widths
from oper.planner.problem.problem import Problem
from oper.planner.row_placement.list_hot_rows import RowScan
from oper.planner.row_placement.row_placement import RowPlacement


def predict_step(
    problem: Problem, sets: HolderSets, counts: NDArray[Any], method: Method
) -> StepTime:
    """Predict the step of a placement with `counts` [C, G] rows of each class in holder sets."""
    of_row, pooled = rows_of_classes(problem).figures, _pooled_classes(problem)
    figures = [dot(of_row[:, part], counts[part]) for part in (~pooled, pooled)]
    return _step(problem, sets, figures, method)


def predict_step_of(problem: Problem, placement: RowPlacement) -> StepTime:
    """Predict the step of a placement of rows, of which some are striped. Rows, reads and touches
    of the stripes are counted rank by rank; the touches by several ranks, of each width, are
    divided in proportion to those by one."""
    classes, counts, ranks = problem.classes, placement.counts, problem.ranks
    tables, pooled = problem.profile.tables, _pooled_classes(problem)
    width_of_table = table_widths(tables, problem.workload.mode).of_table
    pooled_table = pooled_of(problem.topology, tables)
    of_row = rows_of_classes(problem).figures
    striped = classes.rows - counts.sum(axis=1)
    table_figures: list[Floats] = []
    for part, of_tables in ((~pooled, ~pooled_table), (pooled, pooled_table)):
        figures = dot(of_row[:, part], counts[part])
        for w in range(len(classes.widths)):
            of_width = part & (classes.width == w)
            shares = _shares_of_stripes(placement.scan, of_tables & (width_of_table == w))
            of_all = dot(of_row[:, of_width], striped[of_width])
            figures[:, :ranks] += of_all[:, None] * shares
        table_figures.append(figures)
    return _step(problem, placement.holder_sets, table_figures, placement.cost.allreduce_method)


def _shares_of_stripes(scan: RowScan, tables: NDArray[np.bool_]) -> Floats:
    """Return each rank's share of the figures of the striped rows of some tables, [13, M]."""

    def share(of: NDArray[Any]) -> Floats:
        of_ranks = of[tables].sum(axis=0).astype(np.float64)
        shares: Floats = of_ranks / max(float(of_ranks.sum()), np.finfo(float).tiny)
        return shares

    touched = share(scan.striped_touched)
    of_node = share(scan.striped_of_nodes.mean(axis=0)) if len(scan.striped_of_nodes) else touched
    counted = [share(scan.striped_rows), share(scan.striped_expected), touched, of_node]
    by_amount = np.repeat([*counted, touched, touched], 2, axis=0)
    return np.concatenate([by_amount, touched[None]])


def predict_step_of_cells(
    problem: Problem, sets: HolderSets, cells: Cells, method: Method, share: Floats | None = None
) -> StepTime:
    """Predict the step of a placement of cells, each with `share` [cells] of its rows' bytes, or
    all of them. Kernels of further widths, for tables that are split by columns, are left out."""
    figures, is_bytes = rows_of_classes(problem).figures, BatchRows.is_bytes().tolist()
    pooled = _pooled_classes(problem)[cells.class_of]

    def of_part(part: NDArray[np.bool_]) -> Floats:
        if not part.any():
            return np.zeros((len(figures), len(sets)))
        some: Any = slice(None) if part.all() else part
        class_of, group, rows = cells.class_of[some], cells.group[some], cells.rows[some]
        sums = []
        for of_row, in_bytes in zip(figures, is_bytes, strict=True):
            of = of_row[class_of] * rows
            if share is not None and in_bytes:
                of = of * share[some]
            sums.append(np.bincount(group, of, minlength=len(sets)))
        return np.stack(sums)

    return _step(problem, sets, [of_part(~pooled), of_part(pooled)], method)


def _step(
    problem: Problem, sets: HolderSets, figures: Sequence[Floats], method: Method
) -> StepTime:
    """Return the step by the figures of tables that are not pooled, and of those that are."""
    pooled = pooled_of(problem.topology, problem.profile.tables)
    width = table_widths(problem.profile.tables, problem.workload.mode).of_table
    fetched, added_up = (
        Part(len(np.unique(width[tables])), BatchRows.of_figures(of), bags_of_rank(problem, tables))
        for of, tables in zip(figures, (~pooled, pooled), strict=True)
    )
    return step_time(problem.topology, problem.workload, sets, fetched, added_up, method)


def _pooled_classes(problem: Problem) -> NDArray[np.bool_]:
    """Return a mask of the classes of pooled tables, [C]."""
    return np.broadcast_to(problem.classes.pooled, len(problem.classes))


def bags_of_rank(problem: Problem, of: NDArray[np.bool_]) -> Bags:
    """Return a rank's bags of the tables `of`, a mask [T]; one per column and sample if the profile
    does not know the bags."""
    profile, tables = problem.profile, problem.profile.tables
    samples = problem.workload.batch_size / problem.ranks
    lengths = profile.bag_lengths
    if lengths is None:
        a_sample = np.array([len(table.columns) for table in tables], dtype=np.float64)
    else:
        a_sample = lengths.bags_of_tables / max(profile.samples, 1)
    a_sample = np.where(of, a_sample, 0.0)
    dims = np.array([table.dim for table in tables], dtype=np.float64)
    sizes = np.array([table.row_bytes for table in tables], dtype=np.float64)
    accesses = np.where(of, problem.accesses_of_tables, 0.0)
    read = float(dot(accesses, sizes))
    ratio = 4 * float(dot(accesses, dims)) / read if read else 1.0
    number = samples * float(a_sample.sum())
    return Bags(number, 4 * samples * float(dot(a_sample, dims)), ratio)


def rows_of_classes(problem: Problem) -> BatchRows:
    """Return the expected amounts of one row of each class, [C] each."""
    classes, topology = problem.classes, problem.topology
    a_rank = problem.workload.batch_size / problem.ranks
    accesses = classes.expected / max(classes.samples, 1) * a_rank

    def amount(rows: Floats) -> Amount:
        return Amount(rows, rows * classes.S)

    def by(ranks: float) -> Floats:
        return touched_together(classes.D, ranks, a_rank, problem.ranks, classes.samples)

    written = classes.m if problem.workload.training else classes.S
    return BatchRows(
        all=amount(np.ones(len(classes))),
        read=amount(accesses),
        of_rank=amount(classes.D),
        of_node=amount(_of_node(classes, by(problem.ranks / topology.nodes))),
        of_position=amount(np.minimum(by(topology.nodes), classes.U)),
        of_any=amount(classes.U),
        updates=2 * written * classes.U,  # read, and written
    )


def _of_node(classes: Classes, unmeasured: Floats) -> Floats:
    """Return the chance that any rank of a node touches a row: with relays the priced one, the mean
    over the sizes of nodes; else `unmeasured`."""
    return classes.D_of_node.mean(axis=1) if classes.D_of_node.shape[1] else unmeasured


def touched_together(D: Floats, together: float, drawn: float, ranks: int, samples: int) -> Floats:
    """Return the chance that one of `together` ranks touches a row that each rank, with its `drawn`
    samples, touches with chance D: 1 - (1 - D)^ranks. If the batch is a part of the log no sample
    is drawn twice, so the exponent is a little larger (expected_reads.py)."""
    power = together
    if drawn * ranks < samples:
        power = float(log1p(-together * drawn / samples) / log1p(-drawn / samples))
    with np.errstate(divide="ignore"):
        chance: Floats = -expm1(power * log1p(-np.minimum(D, 1.0)))
    return chance
