"""Memories of a plan: the ranks' devices, and their hosts if some tables lie there.

Each memory has its own tables, figures and certificate; no row is in two. An iteration reads all
memories, so the times of a rank add up.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from oper.base.arrays import WholePerRank
from oper.cost.objective import Balance, Cost
from oper.plan.certificate import Certificate

DEVICE: Final = "device"
HOST: Final = "host"


class ThresholdReason(StrEnum):
    """Reason for which the threshold of the partitions was halved no further (§4.2)."""

    BALANCED = "balanced"  # the requested degree of balance was reached
    NO_GAIN = "no gain"  # halving it again no longer helped
    MOST_HALVINGS = "most halvings"  # the smallest threshold that is tried was reached
    NOT_PLACED_BY_PARTITIONS = "not placed by partitions"


@dataclass(frozen=True)
class GreedyBalance:
    """Degrees of balance after greedy placement, before partitions are split."""

    memory: float
    lookups: float


@dataclass(frozen=True)
class ReplanRecord:
    """Changes that `oper replan` made to the previous plan."""

    old_plan: str  # digest of its plan.json
    horizon: int  # iterations
    old_objective_seconds: float  # of the old plan, under the new counts
    changed_rows: int
    moved_rows: int
    moved_bytes: float


@dataclass(frozen=True)
class PlanningRecord:
    """Record of the placement of a memory's rows: the steps and their results."""

    threshold: float  # of the partitions, after backtracking
    step: str  # that placed the rows
    threshold_reason: ThresholdReason
    greedy_dob: GreedyBalance | None  # None if rows were not placed greedily
    dob_before_swaps: Balance
    swaps: int  # rounds
    replan: ReplanRecord | None = None


@dataclass(frozen=True)
class PartitionSummary:
    """Numbers of partitions that were closed by their accesses and by their bytes, and the shares
    of all bytes and accesses in the former (§4.1)."""

    threshold: float
    access_bounded: int
    memory_bounded: int
    access_bounded_bytes: float
    access_bounded_accesses: float


@dataclass(frozen=True)
class Memory:
    """Tables of a plan in one memory of every rank: its device's or its host's.

    `tables` are their numbers, ascending. `owner_accesses` [M] are the accesses in the profile to
    rows with one holder, by that rank, and `replica_accesses` the rest. Plans that were assembled
    by hand have no certificate and no partitions, and memories without tables have no record.
    """

    name: Literal["device", "host"]
    tables: tuple[int, ...]
    cost: Cost
    owner_accesses: WholePerRank
    replica_accesses: int = 0
    record: PlanningRecord | None = None
    certificate: Certificate | None = None
    partitions: PartitionSummary | None = None
