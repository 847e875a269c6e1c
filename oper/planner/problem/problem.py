"""The planning problem: what is asked for, the classes of rows, and the limits of a plan.

`make_problem` makes it from a profile, a topology, a workload and `Settings`. Placing classes and
bounding the objective need classes alone, a `ClassProblem`; placing rows needs the profile too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.base.units import finite_number
from oper.cost.workload import Workload
from oper.planner.problem.classes import Classes, classify
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

# The extra memory of plans for ranks whose memory is not known: the paper's (§6.1).
UNKNOWN_DEVICES = 0.05
# The share of a device's memory for the dense part of the model.
RESERVE = 0.2


@dataclass(frozen=True)
class Settings:
    """What is asked of a plan.

    extra_memory: bytes of extra copies, as a share of one copy of all tables; None leaves it to the
    devices' memory (oper/planner/memory/), of which `reserve` is the share for the rest of the
    model, or is UNKNOWN_DEVICES where they have none. threshold: the share of all bytes or accesses
    at which a partition is closed (§4.1). dob: the degree of balance that backtracking aims at
    (§4.2). balance: what is minimised, the slowest rank's "time" or the slowest "link". tier: the
    names of the tables that lie in the hosts' memory, or "all".

    Raises OperError where a value is out of range.
    """

    extra_memory: float | None = None
    threshold: float = 0.001
    dob: float = 0.999
    balance: str = "time"
    reserve: float | None = None  # None: RESERVE, where there is a device memory
    tier: Sequence[str] | Literal["all"] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields of `asked` in `oper plan --json`; the reserve where it had an effect. Which
        tables the tier has is no part of it: a plan says so itself."""
        content = asdict(self)
        del content["tier"]
        if self.reserve is None:
            del content["reserve"]
        return content

    def __post_init__(self) -> None:
        for name in ("extra_memory", "threshold", "dob", "reserve"):
            given = getattr(self, name)
            if given is not None or name not in ("extra_memory", "reserve"):
                object.__setattr__(self, name, finite_number(given, name.replace("_", " ")))
        if self.extra_memory is not None and not 0 <= self.extra_memory <= 1e6:
            raise OperError(f"extra memory {self.extra_memory}: a share of at least 0 was needed")
        if not 0 < self.threshold <= 1:
            raise OperError(f"threshold {self.threshold}: a share above 0, at most 1, was needed")
        if not 0 < self.dob <= 1:
            raise OperError(f"dob {self.dob}: a share above 0, at most 1, was needed")
        if self.reserve is not None and not 0 <= self.reserve < 1:
            raise OperError(f"reserve {self.reserve}: a share of at least 0, below 1, was needed")
        if self.balance not in ("time", "link"):
            raise OperError(f"balance {self.balance!r}: 'time' or 'link' was needed")
        if self.tier != "all":
            object.__setattr__(self, "tier", _table_names(self.tier))


def _table_names(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise OperError(f"tier {given!r}: a list of tables' names was needed, or 'all'")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str) or not name:
            raise OperError(f"tier: {name!r} among its tables, and a table's name was needed")
        if names.count(name) > 1:
            raise OperError(f"tier: table {name!r} is named twice; name each once")
    return names


@dataclass(frozen=True)
class ClassProblem:
    """The problem as far as classes of rows go, for M ranks."""

    settings: Settings
    classes: Classes
    topology: Topology
    workload: Workload
    capacity_bytes: Floats  # [M]
    budget_bytes: float  # of extra copies

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @property
    def mailbox_bytes(self) -> float:
        """Expected of a rank, for the gradients of a step: none in inference."""
        return self.classes.mailbox_bytes if self.workload.training else 0.0

    @property
    def shares(self) -> Floats:
        """The share of all memory that each rank should hold, [M]."""
        return np.asarray(self.capacity_bytes / self.capacity_bytes.sum())


@dataclass(frozen=True)
class Problem(ClassProblem):
    """The whole problem: with the profile whose rows are to be placed."""

    profile: Profile


def make_problem(
    profile: Profile, topology: Topology, workload: Workload, settings: Settings
) -> Problem:
    """The classes of the profile and the limits of every plan for it.

    Raises OperError where the batch has fewer samples than there are ranks, or where the capacities
    cannot hold the tables.
    """
    if settings.tier:
        raise OperError(
            "tier: only a plan's folder can have one (oper plan, oper.make_plan): here all tables "
            "are placed on devices; leave the tier out"
        )
    if workload.batch_size < topology.ranks:
        raise OperError(
            f"batch size {workload.batch_size} for {topology.ranks} ranks: at least a sample a "
            "rank was needed; it is the global batch, over all ranks"
        )
    if settings.extra_memory is None:
        settings = replace(settings, extra_memory=UNKNOWN_DEVICES)
    workload = workload.on(topology.nodes)
    classes = classify(profile, workload, topology.ranks)
    capacity, budget = _limits(classes, topology, workload, settings)
    return Problem(
        settings=settings,
        classes=classes,
        topology=topology,
        workload=workload,
        capacity_bytes=capacity,
        budget_bytes=budget,
        profile=profile,
    )


def with_limits(problem: Problem, topology: Topology, settings: Settings) -> Problem:
    """The same rows and workload under the capacities of `topology` and the extra memory of
    `settings`. Raises OperError where those cannot hold the tables."""
    capacity, budget = _limits(problem.classes, topology, problem.workload, settings)
    return replace(
        problem,
        topology=topology,
        settings=settings,
        capacity_bytes=capacity,
        budget_bytes=budget,
    )


def _limits(
    classes: Classes, topology: Topology, workload: Workload, settings: Settings
) -> tuple[Floats, float]:
    """The capacities, [M], and the budget of extra copies, in bytes."""
    assert settings.extra_memory is not None
    total = classes.total_bytes
    capacity = np.asarray(
        topology.capacities(total, settings.extra_memory, classes.width_memory), dtype=np.float64
    )
    budget = min(settings.extra_memory * total, float(capacity.sum()) - total)
    # Copies are whole, and in training a row has one or all: a smaller rest cannot be used.
    step = math.gcd(*classes.width_memory) * (topology.ranks - 1 if workload.training else 1)
    # The product of a share may lie just below whole steps (0.29 · 100): those count.
    budget = budget * (1 + 1e-14) // max(step, 1) * step
    return capacity, max(budget, 0.0)
