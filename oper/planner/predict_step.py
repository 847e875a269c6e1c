"""What a step of a placement is predicted to take: its classes of rows as the phases need them.

In: a `Problem` and how many rows of each class lie in each holder set. Out: `StepTime`.
"""

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.cost.allreduce import Method
from oper.cost.holder_sets import HolderSets
from oper.cost.step_time import Amount, Bags, BatchRows, StepTime, step_time
from oper.planner.problem.classes import table_widths
from oper.planner.problem.problem import Problem
from oper.planner.row_placement.row_placement import RowPlacement


def predict_step(
    problem: Problem, sets: HolderSets, counts: NDArray[np.integer], method: Method
) -> StepTime:
    """The step of a placement with `counts` [C, G] rows of each class in the holder sets."""
    return _step(problem, sets, rows_of_classes(problem).figures @ counts, method)


def predict_step_of(problem: Problem, placement: RowPlacement) -> StepTime:
    """The step of a placement of rows, of which some are striped: of each width in proportion to
    the touches of the ranks' stripes."""
    classes, counts, ranks = problem.classes, placement.counts, problem.ranks
    width_of_table = table_widths(problem.profile.tables, problem.workload.mode).of_table
    of_row = rows_of_classes(problem).figures
    figures = of_row @ counts
    striped = classes.rows - counts.sum(axis=1)
    for w in range(len(classes.widths)):
        of_width = classes.width == w
        touched = placement.scan.striped_touched[width_of_table == w].sum(axis=0)
        if touched.any():
            of_stripes = of_row[:, of_width] @ striped[of_width]
            figures[:, :ranks] += np.outer(of_stripes, touched / touched.sum())
    return _step(problem, placement.holder_sets, figures, placement.cost.allreduce_method)


def _step(problem: Problem, sets: HolderSets, figures: Floats, method: Method) -> StepTime:
    rows, widths = BatchRows.of_figures(figures), len(problem.classes.widths)
    return step_time(
        problem.topology, problem.workload, widths, sets, rows, bags_of_rank(problem), method
    )


def bags_of_rank(problem: Problem) -> Bags:
    """A rank's bags, of as many features as tables have where the profile does not know them."""
    profile, tables = problem.profile, problem.profile.tables
    samples = problem.workload.batch_size / problem.ranks
    lengths = profile.bag_lengths
    if lengths is None:
        a_sample = np.array([len(table.columns) for table in tables], dtype=np.float64)
    else:
        a_sample = lengths.bags_of_tables / max(profile.samples, 1)
    dims = np.array([table.dim for table in tables], dtype=np.float64)
    sizes = np.array([table.row_bytes for table in tables], dtype=np.float64)
    accesses = profile.accesses_of_tables
    read = float(accesses @ sizes)
    ratio = 4 * float(accesses @ dims) / read if read else 1.0
    number = samples * float(a_sample.sum())
    return Bags(number, 4 * samples * float(a_sample @ dims), ratio)


def rows_of_classes(problem: Problem) -> BatchRows:
    """What is expected of one row of each class, [C] each."""
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
        of_node=amount(by(problem.ranks / topology.nodes)),
        of_position=amount(by(topology.nodes)),
        of_any=amount(classes.U),
        updates=2 * written * classes.U,  # read, and written
    )


def touched_together(D: Floats, together: float, drawn: float, ranks: int, samples: int) -> Floats:
    """The chance that one of so many ranks touches a row that each, of its `drawn` samples, touches
    with chance D: 1 - (1 - D)^ranks; where the batch is a part of the log no sample is drawn twice,
    so that the exponent is a little larger (expected_reads.py)."""
    power = together
    if drawn * ranks < samples:
        power = np.log1p(-together * drawn / samples) / np.log1p(-drawn / samples)
    with np.errstate(divide="ignore"):
        found: Floats = -np.expm1(power * np.log1p(-np.minimum(D, 1.0)))
    return found
