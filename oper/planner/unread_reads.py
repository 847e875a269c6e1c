"""The step of a plan if some reads go to rows that its log never read.

In: `Planned`. Out: seconds. Nobody knows the share of such reads without later data, so a plan that
is not priced on later data states its step for a tenth. In each table with unread rows that share
of the reads goes to these, evenly, and the reads of the other rows shrink in proportion.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from oper.base.arrays import Floats
from oper.base.portable_math import expm1, log1p
from oper.cost.expected_reads import expected_reads, node_touches
from oper.planner.make_placement import Planned
from oper.planner.predict_step import predict_step
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import Problem
from oper.topology.pooled_links import without_pooling
from oper.topology.relays import relayed_sizes

UNREAD_SHARE = 0.1  # of the reads of each table
_LEAST_TIMES = 1e-300  # least factor by which reads of a row change, so that powers are defined


def unread_step_seconds(planned: Planned, share: float = UNREAD_SHARE) -> float | None:
    """Return the predicted step of a placement if a `share` of the reads goes to rows that its log
    never read; None if it read all rows."""
    problem, placement = planned.problem, planned.row_placement
    classes, sets = problem.classes, placement.holder_sets
    supposed = reading_unread(problem, share)
    if supposed is None:
        return None
    counts = placement.counts.astype(np.float64)
    striped, of_rank = classes.rows - counts.sum(axis=1), placement.scan.striped_rows.sum(axis=0)
    counts[:, : problem.ranks] += np.outer(striped, of_rank / max(int(of_rank.sum()), 1))
    return predict_step(supposed, sets, counts, placement.cost.allreduce_method).seconds


def reading_unread(problem: Problem, share: float) -> Problem | None:
    """Return the problem after rows that the log never read took a `share` of each table's reads;
    None if it read all rows, or none."""
    unread = problem.classes.accesses == 0
    if not unread.any() or unread.all():
        return None
    return replace(problem, classes=with_unread_reads(problem, share))


def with_unread_reads(problem: Problem, share: float) -> Classes:
    """Return the classes of a problem after unread rows took `share` of each table's reads."""
    classes, workload, topology = problem.classes, problem.workload, problem.topology
    tables = len(problem.profile.tables)
    unread = classes.accesses == 0
    of_entry = unread[classes.entry_class]
    expected = classes.expected[classes.entry_class]

    def per_table(values: Floats) -> Floats:
        weights = classes.entry_rows * values
        return np.bincount(classes.entry_table, weights, minlength=tables).astype(np.float64)

    rows, reads = per_table(of_entry * 1.0), per_table(expected)
    moved = np.where(rows > 0, share * reads, 0.0)
    others = per_table(np.where(of_entry, 0.0, expected))
    moved = np.where(others > 0, moved, 0.0)
    kept = (reads - moved) / np.where(others > 0, others, 1.0)
    entry_reads = np.where(
        of_entry,
        (moved / np.maximum(rows, 1))[classes.entry_table],
        expected * kept[classes.entry_table],
    )
    # A class with rows of several tables has their mean.
    total = np.bincount(
        classes.entry_class, classes.entry_rows * entry_reads, minlength=len(classes)
    )
    supposed = total / np.maximum(classes.rows, 1)
    before = np.where(classes.expected > 0, classes.expected, 1.0)
    times = np.maximum(supposed / before, _LEAST_TIMES)
    size = topology.ranks
    pooled = np.broadcast_to(classes.pooled, len(classes))
    new = expected_reads(supposed, supposed, classes.samples, workload, size, pooled=pooled)
    sizes = relayed_sizes(without_pooling(topology))
    of_nodes = node_touches(supposed, classes.samples, workload, size, sizes)

    def touched(chance: Floats, of_unread: Floats) -> Floats:
        """Return the chance of a touch by `times` as many samples: 1 - (1 - D)^times."""
        exponent = times.reshape(-1, *[1] * (chance.ndim - 1))
        with np.errstate(divide="ignore"):
            again: Any = -expm1(exponent * log1p(-np.minimum(chance, 1.0)))
        return np.where(unread.reshape(exponent.shape), of_unread, again)

    once = workload.known_fetch == "distinct"
    read_once = touched(classes.R, new[0])
    read_each = np.where(unread, new[0], classes.R * times)
    return replace(
        classes,
        expected=supposed,
        R=np.where(once & ~pooled, read_once, read_each),
        D=touched(classes.D, new[1]),
        U=touched(classes.U, new[2]),
        D_of_node=touched(classes.D_of_node, of_nodes),
    )
