"""The limits of plans that devices set: capacities in bytes, and the most extra memory.

In: a `Problem` whose topology has device memory. Out: `DeviceLimits`. A rank may hold

    device memory · (1 - reserve) - mailbox - AllReduce

in rows and optimizer state: the reserve is for the dense part of the model, the mailbox for the
gradients of a step, and the last term for the AllReduce of the plan's own replicas. More replicas
thus leave less room for rows. The most extra memory is that at which both fit.
"""

from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Context

from oper.base.errors import OperError
from oper.base.units import GB
from oper.cost.objective import cheapest_allreduce
from oper.plan.settings import Limits
from oper.planner.class_placement.place_classes import place_replicas
from oper.planner.problem.problem import RESERVE, Problem, with_limits
from oper.topology.capacity import device_capacities

_DIGITS = 3  # of a share of extra memory
_DOWN = Context(prec=_DIGITS, rounding=ROUND_DOWN)
_BISECTIONS = 7  # of the most extra memory, only where memory is short


@dataclass(frozen=True)
class DeviceLimits:
    """A problem under what its devices hold: `most_extra` is the largest share of extra memory,
    and `most_allreduce_bytes` what the AllReduce of a rank takes then."""

    problem: Problem
    reserve: float
    most_extra: float = 0.0
    most_allreduce_bytes: float = 0.0

    @staticmethod
    def of(problem: Problem) -> "DeviceLimits":
        """The limits of a problem whose topology says what its devices hold.

        Raises OperError, with the number of ranks that would be enough, where the devices cannot
        hold the tables.
        """
        reserve = RESERVE if problem.asked.reserve is None else problem.asked.reserve
        limits = DeviceLimits(problem, reserve)
        limits.within(0.0)
        high = tried = round_down(min(limits._room(0.0), problem.ranks - 1.0))
        for _ in range(_BISECTIONS):
            allreduce = limits._allreduce_bytes(tried)
            if limits._room(allreduce) >= tried:
                limits = replace(limits, most_extra=tried, most_allreduce_bytes=allreduce)
            else:
                high = tried
            if limits.most_extra == high:
                break
            tried = round_down((limits.most_extra + high) / 2)
        return limits

    def within(self, extra_memory: float) -> Problem:
        """The problem with this share of extra memory."""
        allreduce = self._allreduce_bytes(extra_memory)
        extra = round_down(max(min(extra_memory, self._room(allreduce)), 0.0))
        return self._problem(extra, allreduce)

    def beside_most_replicas(self, extra_memory: float) -> Problem:
        """The problem with this share of extra memory and the room that the AllReduce of the most
        replicas leaves, which is known without placing anything."""
        return self._problem(extra_memory, self.most_allreduce_bytes)

    def _problem(self, extra_memory: float, allreduce_bytes: float) -> Problem:
        problem = self.problem
        limits = Limits(extra_memory, self.reserve)
        capacity = self._capacities(allreduce_bytes)
        least = min(problem.topology.memory_for_plans or ())
        devices = (
            f"devices of {problem.topology.name} have {least / GB:,.4g} GB, of which "
            f"{self.reserve:.0%} (--reserve) and the gradients of a step are not for rows; "
            "--extra-memory plans whatever they have"
        )
        if min(capacity) < 1:
            raise OperError(f"device memory: nothing is left for rows; {devices}")
        try:
            return with_limits(problem, problem.topology.with_capacity_bytes(capacity), limits)
        except OperError as error:
            raise OperError(f"{error}; {devices}") from error

    def _capacities(self, allreduce_bytes: float) -> list[int]:
        memory = self.problem.topology.memory_for_plans
        assert memory is not None
        step_bytes = self.problem.mailbox_bytes + allreduce_bytes
        return device_capacities(memory, self.reserve, step_bytes)

    def _room(self, allreduce_bytes: float) -> float:
        """The share of extra memory that fits, with a row of each width to spare on each rank."""
        classes, ranks = self.problem.classes, self.problem.ranks
        spare = ranks * sum(classes.width_memory)
        capacity = self._capacities(allreduce_bytes)
        room = sum(capacity) - classes.total_bytes - spare
        return room / max(classes.total_bytes, 1) if min(capacity) > 0 else 0.0

    def _allreduce_bytes(self, extra_memory: float) -> float:
        """Bytes of a rank for the AllReduce of the replicas that so much extra memory is used
        for."""
        if not self.problem.workload.training or extra_memory == 0:
            return 0.0
        problem = self._problem(extra_memory, 0.0)
        sets, replicas = place_replicas(problem)
        sums = problem.classes.sums(replicas)
        copied = sums.total(sets.copies > 1)
        if not copied.rows:
            return 0.0
        return cheapest_allreduce(problem.topology, copied).memory_bytes(copied, problem.ranks)


def round_down(share: float) -> float:
    """The largest share of three digits that is not above; 0 for shares below 0."""
    if share <= 0:
        return 0.0
    nearest = float(f"{share:.{_DIGITS}g}")  # 0.29 is a little below what is written so
    return nearest if nearest <= share else float(_DOWN.create_decimal_from_float(share))
