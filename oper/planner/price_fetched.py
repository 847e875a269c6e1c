"""Costs of other methods' placements if tables are pooled: the same rows on the same ranks.

In: `Problem`, `Baseline`. Out: `Baseline`, `Cost`, and which tables are cheaper pooled. Methods
know nothing of pooling and place rows as without it. Their rows then travel as the problem says,
and vectors are counted by the nodes of each table's rows, as in a plan (price_plan.py).
"""

from dataclasses import replace

import numpy as np

from oper.base.arrays import Floats
from oper.base.portable_math import dot
from oper.cost.objective import Cost
from oper.cost.step_time import StepTime
from oper.cost.traffic import Traffic
from oper.cost.vectors_per_bag import PartAccesses, VectorsPerBag
from oper.planner.baselines.baseline import Baseline, Cells, price_baseline
from oper.planner.class_placement.pooled_copies import (
    table_of_class,
    vector_seconds,
    without_vectors,
)
from oper.planner.predict_step import predict_step_of_cells
from oper.planner.price_plan import clipped_shares, with_vectors_of_parts
from oper.planner.problem.problem import Problem
from oper.topology.pooled_links import PooledTopology


def refetched(problem: Problem, baseline: Baseline) -> Baseline:
    """Return a placement as it counts in a problem of the same counts with another fetch, both of
    whose classes are of one table each: so they are the same."""
    if baseline.cells is None:
        assert baseline.under is not None
        return baseline.under(problem)
    sums = baseline.cells.sums(problem.classes, len(baseline.holder_sets))
    return replace(baseline, sums=sums)


def price_fetched(problem: Problem, baseline: Baseline) -> Cost:
    """Price a placement, with the vectors that bags of pooled tables need of it."""
    return price_baseline(_with_vectors(problem, baseline), baseline)


def predict_fetched(problem: Problem, baseline: Baseline) -> tuple[Cost, StepTime]:
    """Price a placement as `price_fetched` does, and predict its step."""
    problem = _with_vectors(problem, baseline)
    cost = price_baseline(problem, baseline)
    cells, share = baseline.cells, None
    if cells is None:
        assert baseline.column_cells is not None
        cells, share = baseline.column_cells.cells, baseline.column_cells.share
    sets, method = baseline.holder_sets, cost.allreduce_method
    return cost, predict_step_of_cells(problem, sets, cells, method, share)


def _with_vectors(problem: Problem, baseline: Baseline) -> Problem:
    """Return the problem with the vectors that bags of pooled tables need of the placement."""
    if not isinstance(problem.topology, PooledTopology):
        return problem
    parts = _parts(problem, baseline)
    return with_vectors_of_parts(problem, baseline.holder_sets, parts, baseline.sums)


def cheaper_pooled_of(unpooled: Problem, pooled: Problem, baseline: Baseline) -> frozenset[str]:
    """Return the tables, by name, that take less of the mean rank in this very placement if they
    are pooled than if they are not, on equal ranks."""
    before, after = (
        _table_seconds(problem, refetched(problem, baseline)) for problem in (unpooled, pooled)
    )
    tables = unpooled.profile.tables
    return frozenset(tables[t].name for t in np.flatnonzero(after < before).tolist())


def _table_seconds(problem: Problem, baseline: Baseline) -> Floats:
    """Return the mean rank's seconds of each table, [T], without the part of copies on all ranks
    that is independent of how tables are fetched: all but their reads."""
    sets, tables, topology = baseline.holder_sets, problem.profile.tables, problem.topology
    seconds = np.zeros(len(tables))
    if isinstance(topology, PooledTopology):
        lengths = problem.profile.bag_lengths
        assert lengths is not None
        bags, dims = VectorsPerBag(lengths), np.array([table.dim for table in tables])
        for tables_of_part, accesses in _parts(problem, baseline):
            vectors = bags.chances(clipped_shares(problem, sets, accesses)).sum(axis=1)
            seconds += vectors * np.array([table.dim for table in tables_of_part]) / dims
        seconds *= vector_seconds(problem, lengths)
        topology = without_vectors(topology)
    sums = baseline.table_sums
    if baseline.cells is not None:
        cells, classes = baseline.cells, problem.classes
        group = table_of_class(classes)[cells.class_of] * len(sets) + cells.group
        of_tables = Cells(cells.class_of, group, cells.rows)
        sums = of_tables.sums(classes, len(tables) * len(sets))
    assert sums is not None
    training = problem.workload.training
    traffic = Traffic.of(
        topology,
        training,
        sums.read_bytes + sums.gradient_bytes if training else sums.read_bytes,
        sums.read_bytes,
        sums.gradient_bytes,
        sums.node_bytes,
        sums.pooled_read_bytes,
        sums.pooled_gradient_bytes,
    )
    for part in traffic.parts:
        mean = part.charges.set_seconds(sets).sum(axis=1) / problem.ranks
        seconds += dot(part.bytes.reshape(len(tables), len(sets)), mean)
    return seconds


def _parts(problem: Problem, baseline: Baseline) -> tuple[PartAccesses, ...]:
    """Return the accesses to each table, by cells of whole rows if there are any."""
    if baseline.cells is None:
        return baseline.parts
    cells, classes, tables = baseline.cells, problem.classes, problem.profile.tables
    accesses = np.zeros((len(tables), len(baseline.holder_sets)))
    place = table_of_class(classes)[cells.class_of], cells.group
    np.add.at(accesses, place, classes.expected[cells.class_of] * cells.rows)
    return (PartAccesses(tables, accesses),)
