"""The planning problem: the settings, the classes of rows, and the limits of a plan.

`make_problem` makes it from a profile, a topology, a workload and `PlanSettings`. Placing classes
and bounding the objective need classes alone, a `ClassProblem`; placing rows needs the profile too.
"""

import math
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Context

import numpy as np

from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.objective import Cost, evaluate
from oper.cost.step_memory import DeviceStep, ProcessorStep, StepMemory
from oper.cost.vectors_per_bag import pooled_of
from oper.cost.workload import Workload
from oper.plan.settings import Limits, PlanSettings
from oper.planner.problem.classes import Classes, classify
from oper.profiling.profile import Profile
from oper.topology.pooled_links import without_pooling
from oper.topology.relays import relayed, relayed_sizes
from oper.topology.topology import Topology
from oper.topology.transports import NVSHMEM

# The extra memory of plans for ranks whose memory is not known: the paper's (§6.1).
UNKNOWN_DEVICES = 0.05
# The share of a device's memory for the dense part of the model.
RESERVE = 0.2

_DIGITS = 3  # of a share of extra memory
_DOWN = Context(prec=_DIGITS, rounding=ROUND_DOWN)


@dataclass(frozen=True)
class ClassProblem:
    """The problem as far as classes of rows go, for M ranks."""

    asked: PlanSettings
    limits: Limits
    classes: Classes
    topology: Topology
    workload: Workload
    capacity_bytes: Floats  # [M]
    budget_bytes: float  # of extra copies

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @property
    def step_memory(self) -> StepMemory:
        """Expected memory of a step on each rank, in addition to its rows."""
        classes, training = self.classes, self.workload.training
        if not self.topology.of_devices:
            return ProcessorStep(classes.mailbox_bytes if training else 0.0, self.ranks)
        fetches = self.workload.known_fetch == "distinct" and self.topology.transport == NVSHMEM
        a_sample = float(dot(classes.rows, classes.expected)) / max(classes.samples, 1)
        return DeviceStep(
            accesses=a_sample * self.workload.batch_size / self.ranks,
            dim=classes.dim,
            ranks=self.ranks,
            training=training,
            gradient_ratio=classes.gradient_ratio,
            fetched_row_bytes=max(classes.width_memory) if fetches else 0.0,
            sent_bytes=self._sent_bytes,
            nodes=self.topology.nodes,
        )

    @property
    def _sent_bytes(self) -> float:
        """Slots and gradients of the rows of other nodes that a device's batch reads, if these are
        sent; at most these if bags are pooled there. Raw rows come by kernels alone."""
        raw, training = self.workload.known_fetch == "raw", self.workload.training
        by_kernels = raw or self.topology.transport == NVSHMEM
        if by_kernels and not training:
            return 0.0
        return self.classes.mailbox_bytes * (1 - 1 / self.topology.nodes)

    def price(self, sets: HolderSets, sums: Sums) -> Cost:
        """Price a placement, given by its holder sets and their sums."""
        return evaluate(
            self.topology,
            self.workload,
            sets,
            sums,
            self.capacity_bytes,
            step=self.step_memory,
        )

    @property
    def shares(self) -> Floats:
        """The share of all memory that each rank should hold, [M]."""
        return np.asarray(self.capacity_bytes / self.capacity_bytes.sum())


@dataclass(frozen=True)
class Problem(ClassProblem):
    """The whole problem: with the profile whose rows are to be placed."""

    profile: Profile

    @property
    def accesses_of_tables(self) -> Floats:
        """Accesses of each table in the log, [T], without a pass over the profile's counters."""
        classes = self.classes
        accesses = classes.accesses[classes.entry_class] * classes.entry_rows
        totals = np.bincount(classes.entry_table, accesses, minlength=len(self.profile.tables))
        return totals.astype(np.float64)


def make_problem(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    limits: Limits | None = None,
    as_counted: bool = False,
    by_table: bool = False,
) -> Problem:
    """Return the classes of the profile and the limits of every plan for it: `limits`, or those
    that follow from the settings. `as_counted`: plans are priced by the counts, and not by the
    expected reads of further samples (classes.py). `by_table`: rows of different tables are of
    different classes.

    Raises OperError if the batch has fewer samples than there are ranks, or the capacities cannot
    hold the tables.
    """
    if asked.tier:
        raise OperError(
            "tier: only a plan's folder can have one (oper plan, oper.make_plan): here all tables "
            "are placed on devices; leave the tier out"
        )
    if workload.batch_size < topology.ranks:
        raise OperError(
            f"batch size: expected at least a sample for each of {topology.ranks} ranks, got "
            f"{workload.batch_size}; give the global batch, over all ranks"
        )
    workload = workload.on(topology.nodes)
    topology = relayed(topology, workload.fetch == "distinct")
    sizes = relayed_sizes(without_pooling(topology))
    pooled = pooled_of(topology, profile.tables)
    classes = classify(profile, workload, topology.ranks, as_counted, by_table, sizes, pooled)
    if limits is None:
        limits = Limits(_extra_memory(asked, classes, topology, workload), asked.reserve)
    capacity, budget = _bytes(classes, topology, workload, limits)
    return Problem(
        asked=asked,
        limits=limits,
        classes=classes,
        topology=topology,
        workload=workload,
        capacity_bytes=capacity,
        budget_bytes=budget,
        profile=profile,
    )


def copies_cost_memory_alone(topology: Topology, workload: Workload) -> bool:
    """Return whether a copy saves time whenever its row is read and takes nothing but memory: in
    inference, unless all ranks read one memory."""
    return not workload.training and not topology.is_one_memory


def _extra_memory(
    asked: PlanSettings, classes: Classes, topology: Topology, workload: Workload
) -> float:
    """Return the share of extra memory: as asked; if nothing is asked and copies cost memory alone,
    all that given capacities hold."""
    if asked.extra_memory is not None:
        return asked.extra_memory
    if topology.capacity is None or not copies_cost_memory_alone(topology, workload):
        return UNKNOWN_DEVICES
    total = classes.total_bytes
    capacity = topology.capacities(total, 0.0, classes.width_memory)
    spare = topology.ranks * sum(classes.width_memory)  # ranks are filled with whole rows
    room = (int(np.minimum(capacity, total).sum()) - total - spare) / max(total, 1)
    return round_down(min(room, topology.ranks - 1.0))


def round_down(share: float) -> float:
    """Return the largest share of three digits that is not above; 0 for shares below 0."""
    if share <= 0:
        return 0.0
    nearest = float(f"{share:.{_DIGITS}g}")  # the double 0.29 is a little below 0.29
    return nearest if nearest <= share else float(_DOWN.create_decimal_from_float(share))


def with_limits(problem: Problem, topology: Topology, limits: Limits) -> Problem:
    """Return a problem's rows and workload under the capacities of `topology` and other limits.
    Raise OperError if the capacities cannot hold the tables."""
    capacity, budget = _bytes(problem.classes, topology, problem.workload, limits)
    return replace(
        problem,
        topology=topology,
        limits=limits,
        capacity_bytes=capacity,
        budget_bytes=budget,
    )


def _bytes(
    classes: Classes, topology: Topology, workload: Workload, limits: Limits
) -> tuple[Floats, float]:
    """Return the capacities, [M], and the budget of extra copies, in bytes."""
    total = classes.total_bytes
    capacity = np.asarray(
        topology.capacities(total, limits.extra_memory, classes.width_memory), dtype=np.float64
    )
    budget = min(limits.extra_memory * total, float(capacity.sum()) - total)
    # Copies are whole, and in training a row has one or all: a smaller rest cannot be used.
    step = math.gcd(*classes.width_memory) * (topology.ranks - 1 if workload.training else 1)
    # The product of a share may lie just below whole steps (0.29 · 100): those count.
    budget = budget * (1 + 1e-14) // max(step, 1) * step
    return capacity, max(budget, 0.0)
