"""The certificate of a placement, by the bounds on every placement for its problem.

In: `ClassProblem`, an objective in seconds. Out: `Certificate`. The bound is that of
`lagrangian_bound.py`. Where that leaves a gap and single rows are hot, the bound of
`hot_rows_bound.py` is tried too, which takes longer and knows that rows cannot be split.
"""

from dataclasses import replace

from oper.plan.certificate import Certificate
from oper.planner.bounds.hot_rows_bound import hot_rows_bound
from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.problem.problem import ClassProblem
from oper.topology.pooled_links import PooledTopology

# Above this gap the bound with whole hot rows is tried; a smaller one is good enough.
HOT_ROWS_FROM_GAP = 1e-3


def certify(problem: ClassProblem, objective_seconds: float) -> Certificate:
    """Bound the objective of every plan for the problem, and compare a plan's with that."""
    classes = problem.classes
    topology = problem.topology
    if isinstance(topology, PooledTopology):
        topology = topology.bounding
    limits = (topology, problem.workload, problem.capacity_bytes, problem.budget_bytes)
    bound = lower_bound(classes, *limits)
    if objective_seconds > bound.seconds * (1 + HOT_ROWS_FROM_GAP):
        tried = hot_rows_bound(classes, *limits)
        bound = replace(max(bound, tried, key=lambda found: found.seconds), note=tried.note)
    share = None
    if bound.hot_class is not None:
        share = float(classes.accesses[bound.hot_class] / max(classes.total_accesses, 1))
    return Certificate(objective_seconds, bound.seconds, share, bound.note)
