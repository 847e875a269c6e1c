"""Facts of a plan: its fit, the reason that it has no more copies, its limits, the use of links.

In: `Plan`. Out: typed facts. Displays put them into words.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from oper.base.arrays import Ints
from oper.cost.cache_replay import CacheReplay
from oper.cost.read_charges import Charges
from oper.plan.memories import ThresholdReason
from oper.plan.plan import Plan
from oper.plan.plan_file import to_json
from oper.plan.rows_by_kind import RowsByKind, rows_by_kind

# Unused share of the extra memory allowed that is worth a remark.
_UNUSED = 0.01
# Links whose costs differ by less are as fast, and loads that differ by less are even.
_ALIKE = 0.05


@dataclass(frozen=True)
class PlanFigures:
    """A plan with the rows of each table and the bytes of each rank by kind, and the tables'
    accesses [T] in the profile, if it is known."""

    plan: Plan
    kinds: RowsByKind
    accesses: Ints | None = None

    @staticmethod
    def of(plan: Plan, accesses: Ints | None = None) -> "PlanFigures":
        """Return the figures of a plan; counts the rows of each kind."""
        return PlanFigures(plan, rows_by_kind(plan), accesses)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `oper plan` and `oper plan show`, without the folder."""
        plan, replay = self.plan, cache_replay(self.plan)
        return {
            **plan.to_json(),
            "partitions": to_json(plan.main.partitions),
            "owner_accesses": plan.owner_accesses.tolist(),
            "replica_accesses": plan.replica_accesses,
            "listed_rows": plan.layout.listed,
            "address_map_bytes_per_row": plan.layout.bitmap_bytes_per_row(),
            "cache_replay": None if replay is None else asdict(replay),
            **self.kinds.to_json(plan.tables, self.accesses),
        }


@dataclass(frozen=True)
class Fit:
    """Memory of the ranks, and whether it suffices: `held_bytes` of `room_bytes` on the fullest
    rank, of the devices, or of the hosts if these have all tables; `over_bytes` on the rank that
    exceeds its capacity most, 0 if none does."""

    fits: bool
    held_bytes: int
    room_bytes: int
    over_bytes: int
    over_rank: int


def fit(plan: Plan) -> Fit:
    """Return whether a plan fits, in all memories."""
    cost = plan.main.cost
    fullest = int(cost.memory_bytes.argmax())
    over = max((memory.cost for memory in plan.memories), key=lambda c: int(_over(c).max()))
    return Fit(
        plan.feasible,
        int(cost.memory_bytes[fullest]),
        int(cost.capacity_bytes[fullest]),
        max(int(_over(over).max()), 0),
        int(_over(over).argmax()),
    )


def _over(cost: Any) -> Ints:
    return np.asarray(cost.memory_bytes - cost.capacity_bytes)


class CopiesLimit(StrEnum):
    """Reasons for which a plan has no more copies of rows."""

    ONE_RANK = "one rank"
    IN_HOSTS = "all tables are in the hosts' memory"  # with each row on one rank
    LEAST_MEMORY = "the least memory that comes close to the fastest plan"
    NOT_KNOWN = "not known"
    ALL_USED = "all that was allowed is used"
    NONE_ALLOWED = "no copies were allowed"
    NONE_PAYS = "another copy would cost more than it saves, or not fit"


@dataclass(frozen=True)
class Copies:
    """Bytes of copies, as shares of one copy of all tables on devices, and the reason that there
    are no more.

    saved_share: of the transfer time, at most, with all memory that plans may use; None: unknown.
    """

    used_share: float
    allowed_share: float | None
    limit: CopiesLimit
    saved_share: float | None = None


def copies(plan: Plan) -> Copies:
    """Return the memory of a plan's copies, and the reason for no more copies."""
    limits, certificate = plan.limits, plan.memories[0].certificate
    cost = plan.memories[0].cost
    used = cost.extra_memory_ratio
    allowed = None if limits is None or limits.by_devices else limits.extra_memory
    if plan.ranks == 1:
        return Copies(used, allowed, CopiesLimit.ONE_RANK)
    if not plan.memories[0].tables:
        return Copies(used, allowed, CopiesLimit.IN_HOSTS)
    full = None if certificate is None else certificate.full_memory_bound_seconds
    if full is not None:
        seconds = cost.objective_seconds
        saved = max(1 - full / seconds, 0.0) if seconds else 0.0
        return Copies(used, allowed, CopiesLimit.LEAST_MEMORY, saved)
    if allowed is None:
        return Copies(used, allowed, CopiesLimit.NOT_KNOWN)
    if used < allowed * (1 - _UNUSED):
        return Copies(used, allowed, CopiesLimit.NONE_PAYS)
    return Copies(used, allowed, CopiesLimit.ALL_USED if used else CopiesLimit.NONE_ALLOWED)


@dataclass(frozen=True)
class Threshold:
    """Share at which partitions are closed, as asked and as it ended, and the reason for the
    latter."""

    asked: float
    used: float
    reason: ThresholdReason
    balance: float  # that was asked for

    @property
    def halved(self) -> bool:
        return self.used != self.asked


def threshold(plan: Plan) -> Threshold | None:
    """Return the threshold of a plan; None if the plan was put together by hand."""
    record = plan.record
    if record is None:
        return None
    return Threshold(
        plan.asked.threshold, record.threshold, record.threshold_reason, plan.asked.dob
    )


def cache_room_bytes(plan: Plan) -> int | None:
    """Return the bytes of the fullest device that are left for caches of rows in the hosts' memory;
    None if there are no such rows, or devices do not decide how much a plan may use."""
    host = plan.host
    if host is None or plan.limits is None or not plan.limits.by_devices:
        return None
    devices = plan.memories[0]
    free = int((devices.cost.capacity_bytes - devices.cost.memory_bytes).min())
    # If no tables are on devices, the gradients of a step are subtracted already.
    return max(free - (host.cost.mailbox_bytes if devices.tables else 0), 0)


def cache_replay(plan: Plan) -> CacheReplay | None:
    """Return the memory of each rank's host to replay all caches, on demand and LRU, if every rank
    cached all rows of the tier; None without a tier or in inference."""
    if plan.host is None or not plan.workload.training:
        return None
    rows = sum(plan.tables[t].rows for t in plan.tier)
    return CacheReplay.of(plan.ranks, rows, rows)


class LinkLoad(StrEnum):
    """Uses of a plan's links, if the links or their loads differ."""

    UNEVEN = "equal links, used unevenly"
    SLOW_LESS = "slower links carry less"
    SLOW_MORE = "slower links carry more"
    ALIKE = "slower links carry as much"


@dataclass(frozen=True)
class LinkUse:
    """Links or loads that differ. `slow_share` of the links are `slower` times as slow as the
    fastest; bytes are of a pair of ranks, on average; `even` is min/max of the ranks' times."""

    load: LinkLoad
    balance: float
    even: float
    slow_share: float = 0.0
    slower: float = 1.0
    fast_bytes: float = 0.0
    slow_bytes: float = 0.0


def link_use(plan: Plan) -> LinkUse | None:
    """Return the use of links; None if there is nothing to explain, or if a plan has tables in the
    hosts' memory, whose rows come over two kinds of links."""
    cost, topology = plan.cost, plan.topology
    if plan.ranks == 1 or plan.host is not None:
        return None
    links = Charges.of(plan.cost_topology).links
    moved, link_cost = cost.link_bytes[links], topology.link_cost[links]
    balance = cost.dob.link_cost
    if not moved.any() or balance is None:
        return None
    fast = link_cost <= link_cost.min() * (1 + _ALIKE)
    if fast.all() and balance > 1 - _ALIKE:
        return None
    most = float(cost.rank_seconds.max())
    even = float(cost.rank_seconds.min()) / most if most else 1.0
    if fast.all():
        return LinkUse(LinkLoad.UNEVEN, balance, even)
    through_fast, through_slow = float(moved[fast].mean()), float(moved[~fast].mean())
    load = LinkLoad.ALIKE
    if through_slow < through_fast * (1 - _ALIKE):
        load = LinkLoad.SLOW_LESS
    elif through_slow > through_fast * (1 + _ALIKE):
        load = LinkLoad.SLOW_MORE
    return LinkUse(
        load,
        balance,
        even,
        float((~fast).mean()),
        float(link_cost[~fast].mean() / link_cost[fast].mean()),
        through_fast,
        through_slow,
    )
