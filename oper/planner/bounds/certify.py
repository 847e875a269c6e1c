"""The certificate of a placement, by the bounds on every placement for its problem.

In: `ClassProblem`, an objective in seconds. Out: `Certificate`. The bound is that of
`lagrangian_bound.py`. If that leaves a gap and single rows are hot, the bound of
`hot_rows_bound.py` is tried too, which takes longer and knows that rows cannot be split. If tables
are pooled, that of `pooled_bound.py` knows the least of their vectors.

For nearly equal ranks the bounds of equal ranks are tried as well, with the least cost of each kind
of link and the greatest capacity: no placement takes less on the links as they are.
"""

from dataclasses import replace

import numpy as np

from oper.plan.certificate import Certificate
from oper.planner.bounds.hot_rows_bound import hot_rows_bound
from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.bounds.pooled_bound import pooled_bound
from oper.planner.class_placement.class_placement import MANY_RANKS
from oper.planner.class_placement.pooled_copies import may_copy_to_nodes
from oper.planner.problem.problem import ClassProblem, Problem
from oper.topology.nearly_alike import as_alike, bounding
from oper.topology.pooled_links import PooledTopology

# Above this gap the bound with whole hot rows is tried; a smaller one is good enough.
HOT_ROWS_FROM_GAP = 1e-3


def certify(problem: ClassProblem, objective_seconds: float) -> Certificate:
    """Bound the objective of every plan for the problem, and compare a plan's with that."""
    if as_alike(problem.topology) is problem.topology:
        return _certify(problem, objective_seconds)
    capacity = np.full(problem.ranks, problem.capacity_bytes.max())
    ranks = replace(problem, topology=bounding(problem.topology), capacity_bytes=capacity)
    certificate = _certify(ranks, objective_seconds)
    # The linear programme takes long with many ranks, and knows little of pooled tables.
    if problem.ranks > MANY_RANKS or isinstance(problem.topology, PooledTopology):
        return certificate
    as_they_are = _certify(problem, objective_seconds)
    return max(as_they_are, certificate, key=lambda candidate: candidate.lower_bound_seconds)


def _certify(problem: ClassProblem, objective_seconds: float) -> Certificate:
    """Return the certificate by the links and capacities of the problem."""
    classes = problem.classes
    topology = problem.topology
    known = 0.0
    if isinstance(topology, PooledTopology):
        if isinstance(problem, Problem):
            known = pooled_bound(problem)
        topology = topology.bounding
        mixed = not problem.workload.training and not np.all(classes.pooled)
        copied_to_nodes = problem.workload.training and may_copy_to_nodes(topology)
        if isinstance(problem, Problem) and (mixed or copied_to_nodes):
            # A linear bound in inference has one cost for a byte of any row, and in training it
            # knows no copies on each node, which pooled tables have.
            return Certificate(objective_seconds, known, None, None)
    limits = (topology, problem.workload, problem.capacity_bytes, problem.budget_bytes)
    bound = lower_bound(classes, *limits)
    if objective_seconds > max(bound.seconds, known) * (1 + HOT_ROWS_FROM_GAP):
        tried = hot_rows_bound(classes, *limits, split=bound)
        bound = replace(max(bound, tried, key=lambda candidate: candidate.seconds), note=tried.note)
    if known > bound.seconds:
        return Certificate(objective_seconds, known, None, None)
    share = None
    if bound.hot_class is not None:
        share = float(classes.accesses[bound.hot_class] / max(classes.total_accesses, 1))
    return Certificate(objective_seconds, bound.seconds, share, bound.note)
