"""A placement for pooled fetches: rows of other nodes are added up there, and travel as vectors.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`. What a row of another node
costs depends on how many rows of its bag are there: the more rows are replicated, the fewer are
left in a bag to be added up, and the more of a vector each of them costs. So the placement and the
bytes of vectors for a byte of rows (oper/cost/vectors_per_bag.py) are found in turns, from both
ends: a bag's rows all elsewhere, and each of them a vector of its own; and the placement with the
shorter iteration is taken. The certificate is for every placement: it takes each row of a table to
be on one node, whose vector all of a bag share.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.cost.vectors_per_bag import vector_ratios
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.bounds.certify import certify
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import bound_seconds, place_in_memory
from oper.planner.make_placement import Planned
from oper.planner.problem.problem import make_problem
from oper.profiling.profile import Profile
from oper.tables.bag_lengths import BagLengths
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology

_TURNS = 4
_SETTLED = 1e-3  # relative: ratios that differ by less are one


def place_pooled(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
) -> Planned:
    """Plan for all rows of `profile`, all tables pooled; `report` is called with the name of each
    step as it begins.

    Raises OperError where the profile does not know the lengths of bags, or the ranks cannot hold
    the tables.
    """
    best = place_in_turns(
        profile,
        topology,
        workload,
        lambda ranks: place_in_memory(profile, ranks, workload, asked, report),
    )
    if best.certificate.full_memory_bound_seconds is None:
        return best
    # With all memory that the devices have, too, the least that any placement can cost.
    ranks = best.problem.topology
    assert isinstance(ranks, PooledTopology)
    bounding = PooledTopology.of(topology, ranks.least_ratio, ranks.least_ratio, ranks.training)
    limits = DeviceLimits.of(make_problem(profile, bounding, workload, asked))
    full = bound_seconds(limits, limits.most_extra)
    return replace(best, certificate=replace(best.certificate, full_memory_bound_seconds=full))


def place_in_turns(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    place: Callable[[PooledTopology], Planned],
) -> Planned:
    """The placement with the shortest iteration that `place` comes to, priced by the vectors of its
    own bags: it is given `topology` with the link costs of pooled tables' rows, in turns.

    Raises OperError where the profile does not know the lengths of bags, and what `place` does.
    """
    lengths, nodes = profile.bag_lengths, topology.nodes
    if lengths is None:
        raise OperError(
            "fetch pooled: the profile does not say how long bags are, as older ones do not; "
            "profile the log again"
        )

    def pooled(local_shares: Floats) -> PooledTopology:
        ratios = vector_ratios(lengths, profile.tables, nodes, local_shares)
        return PooledTopology.of(topology, ratios.even, ratios.least, workload.training)

    found: list[Planned] = []
    tables = len(profile.tables)
    for start in (np.zeros(tables), np.ones(tables)):
        ranks = pooled(start)
        for _ in range(_TURNS):
            planned = place(ranks)
            settled = ranks.vector_ratio
            ranks = pooled(local_shares(planned, lengths))
            if abs(ranks.vector_ratio - settled) <= _SETTLED * settled:
                break
        found.append(priced(planned, ranks))
    return min(found, key=lambda each: each.cost.objective_seconds)


def priced(planned: Planned, ranks: PooledTopology) -> Planned:
    """A placement priced by the vectors of its own bags, and certified for these costs."""
    of_placement = planned.problem.topology
    assert isinstance(of_placement, PooledTopology)
    problem = replace(planned.problem, topology=ranks.on(of_placement.unpooled))
    rows = planned.row_placement
    cost = problem.price(rows.holder_sets, rows.sums)
    made = replace(rows, cost=cost)
    full = planned.certificate.full_memory_bound_seconds
    certificate = certify(problem, cost.objective_seconds)
    return replace(
        planned,
        problem=problem,
        row_placement=made,
        certificate=replace(certificate, full_memory_bound_seconds=full),
    )


def local_shares(planned: Planned, lengths: BagLengths) -> Floats:
    """The share of each table's accesses that are to rows with a copy on every rank, or in every
    node, [T]. Tables share the replicas of a class as they share its rows."""
    problem, placement = planned.problem, planned.row_placement
    classes, sets = problem.classes, placement.holder_sets
    node_of = np.array(problem.topology.node_of)
    holds = np.stack(
        [sets.holds[:, node_of == n].any(axis=1) for n in range(problem.topology.nodes)]
    )
    near = holds.all(axis=0)
    replicated = placement.counts[:, near].sum(axis=1) / np.maximum(classes.rows, 1)
    entry = classes.entry_class
    accesses = (classes.accesses * replicated)[entry] * classes.entry_rows
    of_tables = np.bincount(classes.entry_table, accesses, minlength=lengths.tables)
    shares: Floats = np.clip(of_tables / np.maximum(lengths.ids_of_tables, 1), 0.0, 1.0)
    return shares
