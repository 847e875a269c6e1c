"""A bound on T if tables are pooled: a lower bound on the mean over ranks of any placement.

In: a `Problem` whose classes are of one table each. Out: seconds. It is that of the best copies,
chosen table by table, with vectors as the concave function of a table's share that they are
(pooled_copies.py). If links differ, each kind has the least cost of its links, at which no
placement takes longer. Whole rows and uneven nodes are not looked at: certify.py does that.
"""

from dataclasses import replace

from oper.planner.class_placement.pooled_copies import least_mean_seconds
from oper.planner.problem.problem import Problem
from oper.topology.nearly_alike import bounding
from oper.topology.pooled_links import PooledTopology


def pooled_bound(problem: Problem) -> float:
    """Return the bound in seconds; 0 if the bags are not known, or nodes differ in their number of
    ranks or their kind of memory."""
    lengths, topology = problem.profile.bag_lengths, problem.topology
    assert isinstance(topology, PooledTopology)
    if not topology.unpooled.homogeneous:
        topology = bounding(topology)
        assert isinstance(topology, PooledTopology)
    if lengths is None or not topology.unpooled.homogeneous:
        return 0.0
    problem = replace(problem, topology=topology)
    return least_mean_seconds(problem, lengths, problem.budget_bytes)
