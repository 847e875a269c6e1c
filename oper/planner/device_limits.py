"""The limits of plans that devices set: capacities in bytes, and the most extra memory.

In: a `Problem` whose topology has device memory. Out: `DeviceLimits`. A rank may hold

    device memory · (1 - reserve) - step - AllReduce

in rows and optimizer state: the reserve is for the dense part of the model, and the last two terms
are the memory of a step in addition to rows (oper/cost/step_memory.py), the last of them for the
AllReduce of the plan's own replicas. More replicas thus leave less room for rows. The most extra
memory is the amount at which both fit.
"""

from dataclasses import dataclass, replace

import numpy as np

from oper.base.errors import OperError
from oper.base.portable_math import dot
from oper.base.spoken import option
from oper.base.units import GB
from oper.cost.holder_sets import Sums
from oper.cost.objective import cheapest_allreduce
from oper.cost.step_memory import StepMemory
from oper.plan.settings import Limits, PlanSettings
from oper.planner.class_placement.place_classes import by_programme, place_replicas
from oper.planner.problem.problem import RESERVE, Problem, round_down, with_limits
from oper.topology.capacity import device_capacities
from oper.topology.topology import Topology
from oper.topology.transports import Transport

_BISECTIONS = 7  # of the most extra memory, only if memory is short


@dataclass(frozen=True)
class DeviceRoom:
    """Memory for rows of devices with `memory_bytes` [M]: all but the share `reserve`, and without
    the memory that a `step` takes on each device."""

    memory_bytes: tuple[int, ...]
    reserve: float
    step: StepMemory
    transport: Transport | None = None

    @staticmethod
    def of(topology: Topology, asked: PlanSettings, step: StepMemory) -> "DeviceRoom":
        """Return the room on the devices of a topology that states their memory."""
        assert topology.memory_for_plans is not None
        reserve = RESERVE if asked.reserve is None else asked.reserve
        return DeviceRoom(topology.memory_for_plans, reserve, step, topology.transport)

    def capacities(self, allreduce_bytes: float) -> list[int]:
        """Return the bytes for rows, [M], if the AllReduce takes `allreduce_bytes` of each device;
        negative if there are too few."""
        step_bytes = self.step.batch_bytes + allreduce_bytes
        return device_capacities(self.memory_bytes, self.reserve, step_bytes, self.transport)


@dataclass(frozen=True)
class DeviceLimits:
    """A problem within the memory of its devices: `most_extra` is the largest share of extra
    memory, and `most_allreduce_bytes` the memory of a rank's AllReduce then."""

    problem: Problem
    room: DeviceRoom
    most_extra: float = 0.0
    most_allreduce_bytes: float = 0.0

    @staticmethod
    def of(problem: Problem) -> "DeviceLimits":
        """Return the limits of a problem whose topology states the memory of its devices.

        Raises OperError, with the number of ranks that would be enough, if the devices cannot hold
        the tables.
        """
        room = DeviceRoom.of(problem.topology, problem.asked, problem.step_memory)
        limits = DeviceLimits(problem, room)
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

    def free_share(self, part: float) -> float:
        """Return the share of extra memory that takes `part` of the memory left free by rows
        without copies."""
        return round_down(min(part * self._room(0.0), self.problem.ranks - 1.0))

    def within(self, extra_memory: float) -> Problem:
        """Return the problem with this share of extra memory."""
        allreduce = self._allreduce_bytes(extra_memory)
        extra = round_down(max(min(extra_memory, self._room(allreduce)), 0.0))
        return self._problem(extra, allreduce)

    def beside_most_replicas(self, extra_memory: float) -> Problem:
        """Return the problem with this share of extra memory and the room that the AllReduce of the
        most replicas leaves, which is known without placing anything."""
        return self._problem(extra_memory, self.most_allreduce_bytes)

    def _problem(self, extra_memory: float, allreduce_bytes: float) -> Problem:
        problem, room = self.problem, self.room
        limits = Limits(extra_memory, room.reserve)
        capacity = room.capacities(allreduce_bytes)
        step_bytes = room.step.batch_bytes + allreduce_bytes
        devices = (
            f"devices of {problem.topology.name} have {min(room.memory_bytes) / GB:,.4g} GB, of "
            f"which {room.reserve:.0%} ({option('--reserve')}) and {step_bytes / GB:,.3g} GB that "
            f"a step takes are not for rows; {option('--extra-memory')} plans whatever they have"
        )
        if min(capacity) < 1:
            raise OperError(f"device memory: nothing is left for rows; {devices}")
        try:
            return with_limits(problem, problem.topology.with_capacity_bytes(capacity), limits)
        except OperError as error:
            raise OperError(f"{error}; {devices}") from error

    def _room(self, allreduce_bytes: float) -> float:
        """Return the share of extra memory that fits, with a row of each width to spare on each
        rank."""
        classes, ranks = self.problem.classes, self.problem.ranks
        spare = ranks * sum(classes.width_memory)
        capacity = self.room.capacities(allreduce_bytes)
        room = sum(capacity) - classes.total_bytes - spare
        return room / max(classes.total_bytes, 1) if min(capacity) > 0 else 0.0

    def _allreduce_bytes(self, extra_memory: float) -> float:
        """Return the bytes of a rank for the AllReduce of replicas that use so much extra
        memory."""
        if not self.problem.workload.training or extra_memory == 0:
            return 0.0
        problem = self._problem(extra_memory, 0.0)
        if problem.topology.of_devices and by_programme(problem):
            # A programme copies rows that nobody reads as well, in whatever room there is for rows,
            # and devices have room for the gradients of those too.
            copied = _most_replicas(problem)
        else:
            sets, replicas = place_replicas(problem)
            copied = problem.classes.sums(replicas).total(sets.copies > 1)
        if not copied.rows:
            return 0.0
        method = cheapest_allreduce(problem.topology, copied)
        return self.room.step.allreduce_bytes(method, copied)


def _most_replicas(problem: Problem) -> Sums:
    """Return sums, in rows and their bytes, that no replicas within the extra memory exceed; the
    other sums are zero."""
    classes, widths = problem.classes, problem.classes.widths
    memory_bytes = problem.budget_bytes / max(problem.ranks - 1, 1)  # of one copy of each
    rows = memory_bytes / min(classes.width_memory)
    row_bytes = memory_bytes * max(width.row_bytes / width.memory_bytes for width in widths)
    return replace(
        Sums.zeros(1),
        rows=np.minimum(rows, classes.rows.sum()),
        row_bytes=np.minimum(row_bytes, dot(classes.rows, classes.S)),
    )
