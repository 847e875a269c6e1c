"""One plan of two, of the tables on devices and of those in the tier, and back.

An iteration reads both, so that each rank's times add up.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.plan.plan import ListedCounts, Plan
from oper.plan.prediction import PartFigures, PlanParts, Prediction
from oper.plan.tier.join_layouts import (
    LayoutPart,
    in_table_order,
    join_layouts,
    pieces_of,
    split_layout,
)
from oper.topology.host_tier import tier_topology
from oper.topology.topology import Topology


class SplitPlan(NamedTuple):
    """The plans of a plan's tables on devices, None where there are none, and in the tier."""

    devices: Plan | None
    tier: Plan

    def whole_prediction(self, capacity_bytes: Floats) -> Prediction:
        """The figures of an iteration that reads the tables of both; `capacity_bytes` [M] is that
        of devices without tables."""
        tier = self.tier.prediction
        if self.devices is None:
            return tier.of_tier_alone(capacity_bytes)
        return self.devices.prediction.with_tier(tier, self.tier.topology.is_one_memory)


def join_plans(
    split: SplitPlan,
    tier: tuple[int, ...],
    topology: Topology,
    certificate: dict[str, Any],
    capacity_bytes: Floats,
) -> Plan:
    """The plan of all tables, of which those numbered `tier` are in the tier.

    `topology` is that of the devices and says what the hosts have, `certificate` is of all tables;
    `capacity_bytes` [M] is that of devices without tables. All else is what the plans have in
    common, or the devices' own.
    """
    devices, host = split
    given = [plan for plan in split if plan is not None]
    numbers = [np.array(tier, dtype=np.int64)]
    if devices is not None:
        numbers.insert(0, np.setdiff1d(np.arange(len(devices.tables) + len(tier)), tier))
    parts = [LayoutPart(p.layout, n) for p, n in zip(given, numbers, strict=True)]

    def by_table(name: str) -> list[Any]:
        values = [getattr(plan, name) for plan in given]
        return in_table_order(list(zip(numbers, values, strict=True)))

    measured = all(plan.distinct_ratio is not None for plan in given)
    return replace(
        given[0],
        tables=tuple(by_table("tables")),
        topology=topology,
        layout=join_layouts(parts),
        counts=_join_counts(parts, [plan.counts for plan in given]),
        owner_accesses=np.sum([plan.owner_accesses for plan in given], axis=0),
        replica_accesses=sum(plan.replica_accesses for plan in given),
        prediction=split.whole_prediction(capacity_bytes),
        certificate=certificate,
        distinct_ratio=np.stack(by_table("distinct_ratio")) if measured else None,
        tier=tier,
        parts=PlanParts(None if devices is None else _figures(devices), _figures(host)),
    )


def split_plan(plan: Plan) -> SplitPlan:
    """The two plans of a plan with a tier: slots as they are, figures and topologies their own.

    OperError for a plan that was put together by hand, without figures of its two memories.
    """
    if plan.parts is None:
        raise OperError(
            "the plan has a tier and no figures of its two memories, which are needed here; make "
            "it with oper plan --tier"
        )
    in_tier = np.array(plan.tier, dtype=np.int64)
    others = np.setdiff1d(np.arange(len(plan.tables)), in_tier)
    settings = {name: asked for name, asked in plan.settings.items() if name != "reserve"}
    tier = replace(
        _part(plan, in_tier, plan.parts.tier),
        topology=tier_topology(plan.topology),
        replica_accesses=0,
        settings=settings | {"extra_memory": 0.0},
    )
    if plan.parts.devices is None:
        return SplitPlan(None, tier)
    return SplitPlan(_part(plan, others, plan.parts.devices), tier)


def _figures(plan: Plan) -> PartFigures:
    return PartFigures(
        plan.prediction,
        plan.record,
        plan.certificate,
        plan.allreduce_method,
        plan.owner_accesses,
    )


def _join_counts(parts: list[LayoutPart], counts: list[ListedCounts]) -> ListedCounts:
    """The counts of all tables."""

    def by_table(values: list[Any]) -> list[Any]:
        return in_table_order([(p.tables, v) for p, v in zip(parts, values, strict=True)])

    def coded(values: list[Any]) -> Any:
        pieces = [list(pieces_of(v, p.coded_offset)) for p, v in zip(parts, values, strict=True)]
        return np.concatenate(by_table(pieces))

    accesses = coded([each.accesses for each in counts])
    same = all(each.samples_with_row is each.accesses for each in counts)
    return ListedCounts(
        accesses,
        accesses if same else coded([each.samples_with_row for each in counts]),
        np.array(by_table([each.everywhere_accesses for each in counts]), dtype=np.int64),
        np.array(by_table([each.everywhere_least for each in counts]), dtype=np.int64),
    )


def _part(plan: Plan, tables: Ints, figures: PartFigures) -> Plan:
    """The plan of some tables, with figures of their own."""
    counts = plan.counts
    offset = LayoutPart(plan.layout, tables).coded_offset

    def coded(values: Any) -> Any:
        pieces = list(pieces_of(values, offset))
        return np.concatenate([values[:0], *(pieces[t] for t in tables)])

    accesses = coded(counts.accesses)
    same = counts.samples_with_row is counts.accesses
    return replace(
        plan,
        tables=tuple(plan.tables[t] for t in tables),
        layout=split_layout(plan.layout, tables).layout,
        counts=ListedCounts(
            accesses,
            accesses if same else coded(counts.samples_with_row),
            counts.everywhere_accesses[tables],
            counts.everywhere_least[tables],
        ),
        owner_accesses=figures.owner_accesses,
        allreduce_method=figures.allreduce_method,
        prediction=figures.prediction,
        record=figures.record,
        certificate=figures.certificate,
        distinct_ratio=None if plan.distinct_ratio is None else plan.distinct_ratio[tables],
        tier=(),
        parts=None,
    )
