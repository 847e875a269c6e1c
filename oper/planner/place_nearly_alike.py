"""A placement for nearly equal ranks: sought as if the ranks were equal, priced on the true links.

In: a `Topology`, and a function that places rows on one. Out: `Planned`. If links of a kind differ
by no more than measurements do (oper/topology/nearly_alike.py), a placement for the means of their
costs is nearly as good on the true links, while the methods for equal ranks fail there: homes of
pooled tables, knapsacks of copies, even loads. So

1. rows are placed on equal ranks, with the least of the capacities and, if capacities were given,
   with their mean too, after which the coldest rows leave ranks that exceed their capacity;
2. the rows are priced on the true links, and swapped while that lowers T there;
3. if few ranks fetch rows one by one, a linear programme places the rows for the true links too.

A placement takes the place of another if it has less T, and gains more T than it loses of the
predicted step.

If ranks are equal, or differ by more, there is one placement, for the true ranks.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import reduce

import numpy as np

from oper.base.errors import OperError
from oper.planner.bounds.certify import certify
from oper.planner.bounds.pooled_bound import pooled_bound
from oper.planner.class_placement.class_placement import MANY_RANKS
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import bound_seconds
from oper.planner.make_placement import Planned, check_limits
from oper.planner.place_pooled import with_own_vectors
from oper.planner.predict_step import predict_step_of
from oper.planner.problem.problem import Problem, with_limits
from oper.planner.row_placement.aim import aimed_seconds
from oper.planner.row_placement.capacity_repair import keep_capacity
from oper.planner.row_placement.row_placement import (
    RowPlacement,
    even_out,
    stripe_sums,
    with_counts,
)
from oper.planner.row_placement.rows_at_homes import swap_in_nodes
from oper.topology.host_tier import TierTopology
from oper.topology.nearly_alike import as_alike, bounding, with_mean_capacity
from oper.topology.pooled_links import PooledTopology, without_pooling
from oper.topology.relays import RelayedTopology, relayed, without_relays
from oper.topology.topology import Topology


def place_nearly_alike(topology: Topology, place: Callable[[Topology], Planned]) -> Planned:
    """Return the best of the placements that `place` makes for the topology.

    Raises the errors of `place` for the topology as it is.
    """
    alike = as_alike(topology)
    if alike is topology:
        return place(topology)
    placements = []
    for ranks in dict.fromkeys((with_mean_capacity(topology), alike)):
        # The least capacity may be too small for the tables.
        with suppress(OperError):
            placements.append(on_links(place(ranks), topology))
    if not placements:
        return place(topology)
    pooled = any(isinstance(each.problem.topology, PooledTopology) for each in placements)
    by_programme = None
    if topology.ranks <= MANY_RANKS and not pooled:
        with suppress(OperError):
            by_programme = place(topology)
            placements.append(by_programme)
    best = reduce(_better, placements)
    return best if best is by_programme else _certified(best, by_programme)


def _better(one: Planned, other: Planned) -> Planned:
    """Return the other placement if its objective is smaller and, for tables on devices, that gain
    is larger than its loss in the predicted step; else the one."""
    aimed = [aimed_seconds(each.problem, each.cost) for each in (one, other)]
    if aimed[1] >= aimed[0]:
        return one
    if one.problem.asked.balance == "link" or isinstance(one.problem.topology, TierTopology):
        return other
    steps = [predict_step_of(each.problem, each.row_placement).seconds for each in (one, other)]
    return other if aimed[1] * steps[1] < aimed[0] * steps[0] else one


def on_links(planned: Planned, topology: Topology) -> Planned:
    """Return the placement on the links of `topology`, with rows swapped there if that pays; its
    certificate is still that of the ranks it was made for.

    Raises InfeasibleError if capacities are exceeded there by more than can be repaired.
    """
    problem = problem_on_links(planned.problem, topology)
    kept = _within_capacities(problem, planned.row_placement)
    tried = kept, _swapped(problem, kept)
    better = _better(*(_priced(planned, problem, rows) for rows in tried))
    check_limits(better.problem, better.cost)
    return better


def _certified(found: Planned, other: Planned | None) -> Planned:
    """Return the placement with its certificate on its links: the bound of the `other` placement
    there if that has the same limits, because a programme's bound takes longer than its
    placement."""
    problem, seconds = found.problem, found.cost.objective_seconds
    if other is not None and _same_limits(problem, other.problem):
        return replace(found, certificate=other.certificate.of(seconds))
    certificate = certify(problem, seconds)
    if found.certificate.full_memory_bound_seconds is not None:
        full = _full_memory_bound(replace(problem, topology=bounding(problem.topology)))
        certificate = replace(certificate, full_memory_bound_seconds=full)
    return replace(found, certificate=certificate)


def _same_limits(one: Problem, other: Problem) -> bool:
    """Return whether the same placements keep the limits of both problems."""
    capacities = np.array_equal(one.capacity_bytes, other.capacity_bytes)
    return capacities and one.limits == other.limits and one.budget_bytes == other.budget_bytes


def problem_on_links(problem: Problem, topology: Topology) -> Problem:
    """Return the problem of a placement, its limits included, on the links and capacities of
    `topology`."""
    seen = problem.topology
    links = without_relays(without_pooling(topology))
    if links.capacity is None and isinstance(seen.capacity, tuple):  # the room of devices
        links = links.with_capacity_bytes([int(each) for each in seen.capacity])
    if isinstance(seen, PooledTopology):
        links = seen.on(links)
    elif isinstance(seen, RelayedTopology):
        links = relayed(links, distinct=True)
    return with_limits(problem, links, problem.limits)


def _within_capacities(problem: Problem, placement: RowPlacement) -> RowPlacement:
    """Return the placement after the coldest rows left ranks that exceed their capacity."""
    counts = placement.counts.copy()
    striped_bytes = stripe_sums(problem, placement.scan).memory_bytes
    keep_capacity(problem, placement.holder_sets, counts, striped_bytes)
    kept = with_counts(problem, placement, counts, 0)
    return replace(kept, cost_before_swaps=kept.cost)


def _swapped(problem: Problem, placement: RowPlacement) -> RowPlacement:
    """Return the placement after swaps; rows of pooled tables stay in their nodes, by which the
    vectors of bags are counted."""
    sets, counts, before = placement.holder_sets, placement.counts.copy(), placement.cost
    if not isinstance(problem.topology, PooledTopology):
        rounds = even_out(problem, sets, counts, before)
    elif problem.asked.balance == "link":
        rounds = 0
    else:
        rounds = swap_in_nodes(problem, sets, counts, before.rank_seconds.copy())
    return with_counts(problem, placement, counts, rounds)


def _priced(planned: Planned, problem: Problem, rows: RowPlacement) -> Planned:
    """Return the placement with these rows, in their problem, and with the vectors that bags of
    pooled tables need of them."""
    if isinstance(problem.topology, PooledTopology):
        problem, rows = with_own_vectors(problem, rows)
    return replace(planned, problem=problem, row_placement=rows)


def _full_memory_bound(problem: Problem) -> float:
    """Return a bound: no plan in all memory of the problem's devices has a smaller T, in
    seconds."""
    limits = DeviceLimits.of(problem)
    if isinstance(problem.topology, PooledTopology):
        return pooled_bound(limits.beside_most_replicas(limits.most_extra))
    return bound_seconds(limits, limits.most_extra)
