"""A placement in two memories: some tables on the devices, the tier's in the hosts.

In: `Profile`, `Topology`, `Workload`, `Settings` with a tier. Out: `PlannedWithTier`. The two are
problems of their own, that share no capacity and no row: tables on devices are placed as without a
tier, and those of the tier for the hosts' memory and the links to it (oper/topology/host_tier.py),
each row on one rank. All their accesses are priced, as if no rank had a cache: how many a cache
takes is not known here, and what counts is that the ranks' loads are even. T of a rank is the sum
of both, and bounds/tier_bound.py bounds its maximum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.prediction import Prediction
from oper.plan.tier.join_plans import SplitPlan, join_plans
from oper.planner.assemble_plan import assemble
from oper.planner.bounds.tier_bound import Certified, certify_with_tier
from oper.planner.make_placement import Planned, make_placement
from oper.planner.place_in_memory import by_devices, place_in_memory
from oper.planner.problem.problem import RESERVE, Settings
from oper.planner.problem.profile_of_tables import profile_of_tables
from oper.planner.tier_tables import tier_tables
from oper.profiling.profile import Profile
from oper.topology.capacity import device_capacities
from oper.topology.host_tier import tier_topology
from oper.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PlannedWithTier(Planned):
    """A placement of the tables on devices and of the tier's, as one plan.

    `prediction`, `certificate` and `seconds` are of both; `problem`, the placements and `cost` of
    those on devices, or of the tier where it has all tables.
    """

    plan: Plan

    @property
    def prediction(self) -> Prediction:
        return self.plan.prediction

    def to_json(self) -> dict[str, Any]:
        figures = self.plan.figures_to_json()
        return {
            **super().to_json(),
            "rows": figures["rows"],
            "tier": self.plan.tier_names,
            "parts": figures["parts"],
        }


def place_with_tier(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    settings: Settings,
    report: Callable[[str], None] = lambda step: None,
) -> PlannedWithTier:
    """Plan for all rows of `profile`; `report` is called with the name of each step as it begins.

    Raises OperError for a workload or a topology that no tier can be planned for, and where the
    devices or the hosts cannot hold their tables.
    """
    if not workload.training:
        raise OperError(
            "tier: the caches of a tier are for training, and --mode inference was given; serve "
            "from a plan without a tier"
        )
    in_tier = tier_tables(settings, profile.tables)
    others = np.setdiff1d(np.arange(len(profile.tables)), in_tier).tolist()
    hosts = tier_topology(topology)
    settings = replace(settings, tier=())
    tier = _placed_in_hosts(profile_of_tables(profile, in_tier), hosts, workload, settings, report)
    devices, device_bytes = None, np.zeros(topology.ranks)
    if others:
        devices = place_in_memory(
            profile_of_tables(profile, others), topology, workload, settings, report
        )
    first = devices or tier
    asked = first.problem.settings.to_json()
    if devices is not None:
        topology = devices.problem.topology
    elif by_devices(topology, settings):
        assert topology.memory_for_plans is not None
        asked["reserve"] = RESERVE if settings.reserve is None else settings.reserve
        room = device_capacities(
            topology.memory_for_plans, asked["reserve"], tier.problem.mailbox_bytes
        )
        device_bytes = np.maximum(np.array(room, dtype=np.float64), 0.0)
    # So that a plan that is made from this one has the same limits, on whatever machine.
    held = tuple(int(capacity) for capacity in tier.problem.capacity_bytes)
    topology = replace(topology, host_memory_bytes=held)

    report("layout")
    split = SplitPlan(None if devices is None else assemble(devices), assemble(tier))
    certificate = certify_with_tier(
        None if devices is None else Certified(devices.problem, devices.certificate),
        Certified(tier.problem, tier.certificate),
        split.whole_prediction(device_bytes).objective_seconds,
    )
    plan = join_plans(split, in_tier, topology, certificate.to_json(), device_bytes)
    seconds = dict(first.seconds)
    if devices is not None:
        seconds["tier"] = sum(tier.seconds.values())
    return PlannedWithTier(
        problem=first.problem,
        class_placement=first.class_placement,
        row_placement=first.row_placement,
        certificate=certificate,
        seconds=seconds,
        plan=replace(plan, profile=profile.digest, settings=asked),
    )


def _placed_in_hosts(
    profile: Profile,
    hosts: Topology,
    workload: Workload,
    settings: Settings,
    report: Callable[[str], None],
) -> Planned:
    """The placement of the tier's tables, each row on one rank."""
    one_copy = replace(settings, extra_memory=0.0, reserve=None)
    try:
        placed = make_placement(profile, hosts, workload, one_copy, report)
    except OperError as error:
        if not str(error).startswith("capacity: "):
            raise
        raise type(error)(
            f"tier: host_memory of topology {hosts.name}: {str(error).removeprefix('capacity: ')}; "
            "or put fewer tables into the tier"
        ) from error
    assert not placed.cost.extra_bytes, "a row of the tier got copies"
    return placed
