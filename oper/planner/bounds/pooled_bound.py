"""A bound on T where tables are pooled, on homogeneous ranks: the mean over ranks of what any
placement takes.

In: a `Problem` whose classes are of one table each. Out: seconds. It is that of the best copies,
chosen table by table, with vectors as the concave function of a table's share that they are
(pooled_copies.py). Whole rows and uneven nodes are not looked at: certify.py does that.
"""

from oper.planner.class_placement.pooled_copies import least_mean_seconds
from oper.planner.problem.problem import Problem
from oper.topology.pooled_links import PooledTopology


def pooled_bound(problem: Problem) -> float:
    """The bound in seconds; 0 where the bags are not known, or ranks differ."""
    lengths, topology = problem.profile.bag_lengths, problem.topology
    assert isinstance(topology, PooledTopology)
    if lengths is None or not topology.unpooled.is_homogeneous(problem.capacity_bytes):
        return 0.0
    return least_mean_seconds(problem, lengths, problem.budget_bytes)
