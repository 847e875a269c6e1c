"""Rows on the devices and in the tier placed together: no rank has much to do in both.

In: the placements of both memories, each the best by itself. Out: `Together`. T of a rank is the
sum of its times for both, so a rank that a hot row on the devices keeps busy is to have less of the
tier, and one whose host link is fast for its device more. In this order, each only while the
certificate (bounds/tier_bound.py) leaves room for something better:

1. Rows of both memories are swapped at once (row_placement/swap_together.py).
2. Both are placed anew by one linear programme, hot rows whole
   (class_placement/heterogeneous.py), and swapped.
3. Of few rows on few ranks one integer programme places them all (exact_placement.py).

With even links as the aim only the first is done, because certificates are of times.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from oper.plan.certificate import Certificate
from oper.planner.bounds.tier_bound import Certified, certify_together
from oper.planner.class_placement import heterogeneous
from oper.planner.class_placement.class_placement import MANY_RANKS, ClassPlacement
from oper.planner.class_placement.place_classes import LISTED_SHARE
from oper.planner.exact_placement import place_exactly
from oper.planner.make_placement import Planned, Watch, place, within_limits
from oper.planner.place_nearly_alike import place_nearly_alike
from oper.planner.place_pooled import place_pooled
from oper.planner.problem.problem import Problem, with_limits
from oper.planner.row_placement.aim import aimed_of_all
from oper.planner.row_placement.row_placement import RowPlacement, place_rows, with_counts
from oper.planner.row_placement.swap_together import Swappable, swap_together
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import without_relays
from oper.topology.topology import Topology

# The programme places the rows anew above these gaps, with this share of all rows listed, like
# the programme for one memory (make_placement.py).
PROGRAMMES = ((1e-4, LISTED_SHARE), (1e-3, 1.0))
# With a gap above this a small problem is solved as an integer programme. The gap of one
# memory may be a hundred times larger (make_placement.py): the gaps that remain add up.
EXACT_FROM_GAP = 1e-5


class Together(NamedTuple):
    """Placements of both memories, and the certificate of the two together."""

    devices: Planned
    tier: Planned
    certificate: Certificate

    @property
    def aimed_seconds(self) -> float:
        """Objective of both memories, in seconds; infinite if a limit is exceeded."""
        both = self.devices, self.tier
        if not all(within_limits(part.problem, part.cost) for part in both):
            return np.inf
        return aimed_of_all([part.cost for part in both], self.devices.problem.asked.balance)

    def better_of(self, devices: Planned, tier: Planned) -> "Together":
        """Return these placements or the other ones, whichever take less."""
        seconds = float((devices.cost.rank_seconds + tier.cost.rank_seconds).max())
        other = Together(devices, tier, self.certificate.of(seconds))
        return other if other.aimed_seconds < self.aimed_seconds else self


def place_together(devices: Planned, tier: Planned, watch: Watch) -> Together:
    """Return the best placements of both that are found."""
    with watch("both memories"):
        swapped = _swapped(devices, tier)
        seconds = (swapped[0].cost.rank_seconds + swapped[1].cost.rank_seconds).max()
        certificate = certify_together(
            Certified(devices.problem, devices.certificate),
            Certified(tier.problem, tier.certificate),
            float(seconds),
        )
        best = Together(*swapped, certificate)
    if devices.problem.asked.balance == "link":
        return best
    for gap, share in PROGRAMMES if devices.problem.ranks <= MANY_RANKS else ():
        if best.certificate.is_within(gap):
            break
        with watch("both memories"):
            placed = heterogeneous.place_together((devices.problem, tier.problem), share)
            best = best.better_of(*_swapped(*_with_rows(best, placed, share)))
    if best.certificate.is_within(EXACT_FROM_GAP):
        return best
    with watch("integer programme"):
        return _exact(best)


def place_memories(problems: Sequence[Problem]) -> tuple[list[Planned], Certificate]:
    """Return the placement of the rows of one memory, or those of both together, and its
    certificate."""
    watch = Watch(lambda step: None)
    placed = [place_alone(problem, watch) for problem in problems]
    if len(placed) == 1:
        return placed, placed[0].certificate
    devices, tier, certificate = place_together(placed[0], placed[1], watch)
    return [devices, tier], certificate


def place_alone(problem: Problem, watch: Watch) -> Planned:
    """Return the placement of one memory; pooled tables find their homes, and the cost of vectors,
    anew."""

    def placed(ranks: Topology) -> Planned:
        if not isinstance(ranks, PooledTopology):
            same = ranks is problem.topology
            return place(problem if same else with_limits(problem, ranks, problem.limits), watch)
        links, tables = without_relays(ranks.unpooled), ranks.tables
        asked = replace(problem.asked, extra_memory=problem.limits.extra_memory)
        return place_pooled(problem.profile, links, problem.workload, asked, tables=tables)

    return place_nearly_alike(problem.topology, placed)


def _exact(best: Together) -> Together:
    """Return the better of the placements and those of the integer programme, if the problem is
    small enough, with the better of both bounds."""
    seconds = best.certificate.objective_seconds
    exact = place_exactly([best.devices.problem, best.tier.problem], seconds, seconds)
    if exact is None:
        return best
    if exact.placements is not None:
        best = best.better_of(*_with_rows(best, exact.placements, 1.0))
    return best._replace(certificate=best.certificate.at_least(exact.bound_seconds))


def _with_rows(
    of: Together, placed: tuple[ClassPlacement, ...], reserve_share: float
) -> tuple[Planned, Planned]:
    """Return the class placements of both memories with their rows, not evened out one by one."""
    devices, tier = (
        _with(
            replace(planned, class_placement=classes),
            place_rows(planned.problem, classes, reserve_share, even=False),
        )
        for planned, classes in zip((of.devices, of.tier), placed, strict=True)
    )
    return devices, tier


def _swapped(*memories: Planned) -> tuple[Planned, Planned]:
    """Return the placements after swaps of rows in all memories."""
    rows = [planned.row_placement for planned in memories]
    swapped = swap_together(
        [
            Swappable(planned.problem, of.holder_sets, of.counts, of.cost)
            for planned, of in zip(memories, rows, strict=True)
        ]
    )
    devices, tier = (
        _with(planned, with_counts(planned.problem, of, counts, swapped.rounds))
        for planned, of, counts in zip(memories, rows, swapped.counts, strict=True)
    )
    return devices, tier


def _with(planned: Planned, rows: RowPlacement) -> Planned:
    """Return the placement with these rows, which one memory alone might have better."""
    certificate = planned.certificate.of(rows.cost.objective_seconds)
    return replace(planned, row_placement=rows, certificate=certificate)
