"""What a plan is expected to cost, and how it was made: the "figures" of plan.json, typed.

`Prediction` is of the cost model alone (§3.2), and nothing acts on it: what the runtime must do is
in the plan itself. `PlanningRecord` says which steps made the plan. Both are written under the keys
that `oper plan --json` has, and read back from there; keys that are not known are left out.
A plan with a tier has figures of each of its two memories too, `PlanParts`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.cost.allreduce import Method
from oper.cost.objective import Cost, degree_of_balance


class Traffic(NamedTuple):
    """Bytes between ranks in an iteration, summed over the ranks."""

    fetch: float
    gradient: float
    allreduce: float
    total: float


class Balance(NamedTuple):
    """Degrees of balance, min/max: memory over capacity and lookup time over ranks, fetch time over
    ordered pairs of ranks (None for one rank)."""

    memory: float | None
    lookups: float | None
    link_cost: float | None


class GreedyBalance(NamedTuple):
    """Degrees of balance after greedy placement, before partitions are split."""

    memory: float
    lookups: float


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of an iteration on M ranks, in bytes and seconds; matrices are [M, M],
    reader by source."""

    extra_memory_ratio: float  # bytes of extra copies over bytes of one copy of all rows
    memory_bytes: Floats  # [M] whole bytes
    capacity_bytes: Floats  # [M] whole bytes
    lookups: Floats  # [M] rows that each looks up, for itself and for others
    lookup_seconds: Floats  # [M]
    link_bytes: Floats  # [M, M]
    link_seconds: Floats  # [M, M]
    gradient_lookup_seconds: Floats  # [M]
    gradient_link_seconds: Floats  # [M, M]
    allreduce_seconds: Floats  # [M]
    allreduce_memory_bytes: int  # of a rank
    rank_seconds: Floats  # [M]
    communication_bytes: Traffic
    dob: Balance
    objective_seconds: float
    feasible: bool
    mailbox_bytes: int  # of a rank, for its gradients until the rows' owners read them

    @staticmethod
    def of(cost: Cost, mailbox_bytes: float) -> "Prediction":
        """The figures of a cost."""
        return Prediction(
            extra_memory_ratio=cost.extra_memory_ratio,
            memory_bytes=np.trunc(cost.memory_bytes),
            capacity_bytes=np.trunc(cost.capacity_bytes),
            lookups=cost.lookups,
            lookup_seconds=cost.lookup_seconds,
            link_bytes=cost.link_bytes,
            link_seconds=cost.link_seconds,
            gradient_lookup_seconds=cost.gradient_lookup_seconds,
            gradient_link_seconds=cost.gradient_link_seconds,
            allreduce_seconds=cost.allreduce_seconds,
            allreduce_memory_bytes=round(cost.allreduce_memory_bytes),
            rank_seconds=cost.rank_seconds,
            communication_bytes=Traffic(**cost.communication_bytes),
            dob=Balance(**cost.dob),
            objective_seconds=cost.objective_seconds,
            feasible=cost.feasible,
            mailbox_bytes=round(mailbox_bytes),
        )

    def with_tier(self, tier: "Prediction", one_memory: bool) -> "Prediction":
        """The figures of an iteration that reads the tables on devices, which these are of, and
        those of the tier: times and traffic add up, and memory stays the devices'. `one_memory`:
        whether all ranks share one (`Cost.dob`)."""
        added = {
            f.name: getattr(self, f.name) + getattr(tier, f.name)
            for f in fields(Prediction)
            if f.name in _ADD_UP
        }
        links = added["link_seconds"][~np.eye(len(added["lookups"]), dtype=bool)]
        served = added["lookups"] if one_memory else added["lookup_seconds"]
        traffic = np.add(self.communication_bytes, tier.communication_bytes)
        return replace(
            self,
            **added,
            communication_bytes=Traffic(*traffic.tolist()),
            dob=Balance(
                memory=self.dob.memory,
                lookups=degree_of_balance(served),
                link_cost=degree_of_balance(links) if len(links) else None,
            ),
            objective_seconds=float(added["rank_seconds"].max()),
            feasible=self.feasible and tier.feasible,
        )

    def of_tier_alone(self, capacity_bytes: Floats) -> "Prediction":
        """The figures of a plan that has these rows in its tier and none on devices, which could
        hold so much, [M]."""
        return replace(
            self,
            memory_bytes=np.zeros_like(self.memory_bytes),
            capacity_bytes=np.trunc(capacity_bytes),
            dob=self.dob._replace(memory=1.0),
        )

    @staticmethod
    def from_json(figures: Mapping[str, Any]) -> "Prediction":
        """Read back; KeyError or TypeError where a figure is missing or of another kind."""

        def floats(name: str) -> Floats:
            return np.array(figures[name], dtype=np.float64)

        return Prediction(
            extra_memory_ratio=figures["extra_memory_ratio"],
            memory_bytes=floats("memory_bytes"),
            capacity_bytes=floats("capacity_bytes"),
            lookups=floats("lookups"),
            lookup_seconds=floats("lookup_seconds"),
            link_bytes=floats("link_bytes"),
            link_seconds=floats("link_seconds"),
            gradient_lookup_seconds=floats("gradient_lookup_seconds"),
            gradient_link_seconds=floats("gradient_link_seconds"),
            allreduce_seconds=floats("allreduce_seconds"),
            allreduce_memory_bytes=figures["allreduce_memory_bytes"],
            rank_seconds=floats("rank_seconds"),
            communication_bytes=Traffic(*_known(Traffic._fields, figures["communication_bytes"])),
            dob=Balance(*_known(Balance._fields, figures["dob"])),
            objective_seconds=figures["objective_seconds"],
            feasible=figures["feasible"],
            mailbox_bytes=figures["mailbox_bytes"],
        )

    @property
    def status(self) -> str:
        """What `oper plan --json` calls `status`."""
        return "ok" if self.feasible else "infeasible"

    def to_json(self, allreduce_method: Method) -> dict[str, Any]:
        """The figures in the order of plan.json, which has the plan's AllReduce among them."""
        return {
            "extra_memory_ratio": self.extra_memory_ratio,
            "memory_bytes": [int(held) for held in self.memory_bytes],
            "capacity_bytes": [int(capacity) for capacity in self.capacity_bytes],
            "lookups": self.lookups.tolist(),
            "lookup_seconds": self.lookup_seconds.tolist(),
            "link_bytes": self.link_bytes.tolist(),
            "link_seconds": self.link_seconds.tolist(),
            "gradient_lookup_seconds": self.gradient_lookup_seconds.tolist(),
            "gradient_link_seconds": self.gradient_link_seconds.tolist(),
            "allreduce_seconds": self.allreduce_seconds.tolist(),
            "allreduce_method": allreduce_method,
            "allreduce_memory_bytes": self.allreduce_memory_bytes,
            "rank_seconds": self.rank_seconds.tolist(),
            "communication_bytes": self.communication_bytes._asdict(),
            "dob": self.dob._asdict(),
            "objective_seconds": self.objective_seconds,
            "feasible": self.feasible,
            "mailbox_bytes": self.mailbox_bytes,
        }


# What the rows on devices and in the tier take of an iteration together.
_ADD_UP = (
    "lookups",
    "lookup_seconds",
    "link_bytes",
    "link_seconds",
    "gradient_lookup_seconds",
    "gradient_link_seconds",
    "allreduce_seconds",
    "rank_seconds",
    "mailbox_bytes",
)


@dataclass(frozen=True)
class ReplanRecord:
    """What `oper replan` did to the plan before this one."""

    old_plan: str  # digest of its plan.json
    horizon: int  # iterations
    old_objective_seconds: float  # of the old plan, under the new counts
    changed_rows: int
    moved_rows: int
    moved_bytes: float

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "ReplanRecord":
        """Read back."""
        known = _known(tuple(ReplanRecord.__dataclass_fields__)[1:], content)
        return ReplanRecord(content["from"], *known)

    def to_json(self) -> dict[str, Any]:
        """The fields of plan.json."""
        content = asdict(self)
        return {"from": content.pop("old_plan"), **content}


@dataclass(frozen=True)
class PlanningRecord:
    """How a plan was made: the steps and what they came to."""

    threshold: float  # of the partitions, after backtracking
    step: str  # that placed the rows
    threshold_reason: str
    greedy_dob: GreedyBalance | None  # None where rows were not placed greedily
    dob_before_swaps: Balance
    swaps: int  # rounds
    replan: ReplanRecord | None = None

    @staticmethod
    def from_json(figures: Mapping[str, Any]) -> "PlanningRecord":
        """Read back."""
        greedy, replanned = figures["greedy_dob"], figures.get("replan")
        return PlanningRecord(
            threshold=figures["threshold"],
            step=figures["step"],
            threshold_reason=figures["threshold_reason"],
            greedy_dob=greedy and GreedyBalance(*_known(GreedyBalance._fields, greedy)),
            dob_before_swaps=Balance(*_known(Balance._fields, figures["dob_before_exchanges"])),
            swaps=figures["exchanges"],
            replan=replanned and ReplanRecord.from_json(replanned),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields of plan.json, but the threshold, which stands before the prediction there."""
        content = {
            "step": self.step,
            "threshold_reason": self.threshold_reason,
            "greedy_dob": self.greedy_dob and self.greedy_dob._asdict(),
            "dob_before_exchanges": self.dob_before_swaps._asdict(),
            "exchanges": self.swaps,
        }
        return content | ({"replan": self.replan.to_json()} if self.replan else {})


@dataclass(frozen=True)
class PartFigures:
    """The figures of the tables on devices alone, or of those in the tier."""

    prediction: Prediction
    record: PlanningRecord
    certificate: dict[str, Any]
    allreduce_method: Method
    owner_accesses: NDArray[np.int64]  # [M] as in `Plan`

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "PartFigures":
        """Read back."""
        return PartFigures(
            Prediction.from_json(content),
            PlanningRecord.from_json(content),
            content["certificate"],
            content["allreduce_method"],
            np.array(content["owner_accesses"], dtype=np.int64),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields of plan.json."""
        return {
            "certificate": self.certificate,
            "owner_accesses": self.owner_accesses.tolist(),
            "threshold": self.record.threshold,
            **self.prediction.to_json(self.allreduce_method),
            **self.record.to_json(),
        }


class PlanParts(NamedTuple):
    """Figures of each memory of a plan with a tier; `devices` is None where that has all tables."""

    devices: PartFigures | None
    tier: PartFigures

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "PlanParts":
        """Read back."""
        devices = content.get("devices")
        return PlanParts(
            None if devices is None else PartFigures.from_json(devices),
            PartFigures.from_json(content["tier"]),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields of plan.json."""
        return {name: part.to_json() for name, part in self._asdict().items() if part is not None}


def _known(names: tuple[str, ...], content: Mapping[str, Any]) -> list[Any]:
    """The values of those keys, in order."""
    return [content[name] for name in names]
