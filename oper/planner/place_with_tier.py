"""A plan in two memories: some tables on the devices, those of the tier in the hosts.

In: `Profile`, `Topology`, `Workload`, `PlanSettings` with a tier. Out: `Plan`. The two share no
capacity and no row: tables on devices are placed as without a tier, and those of the tier for the
hosts' memory and the links to it (oper/topology/host_tier.py), each row on one rank. All their
accesses are priced, as if no rank had a cache: a cache's hits are not known here, and the aim is
that the ranks' loads are even. T of a rank is the sum of both; place_together.py makes its maximum
small, and bounds/tier_bound.py bounds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.plan_parts import join_memories
from oper.plan.settings import Limits, PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.device_limits import DeviceRoom
from oper.planner.least_memory import by_devices, place_in_memory
from oper.planner.make_placement import Planned, Watch, make_placement
from oper.planner.place_nearly_alike import place_nearly_alike
from oper.planner.place_together import place_together
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.capacity import CapacityError
from oper.topology.host_tier import tier_topology
from oper.topology.relays import without_relays
from oper.topology.topology import Topology


class PlannedWithTier(NamedTuple):
    """A plan in two memories, and the placement on devices, or in the hosts if these have all
    tables."""

    plan: Plan
    main: Planned


def plan_with_tier(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
) -> PlannedWithTier:
    """Plan for all rows of `profile`; `report` is called with the name of each step as it begins.

    Raises OperError for a workload or a topology that no tier can be planned for, and if the
    devices or the hosts cannot hold their tables.
    """
    if not workload.training:
        raise OperError(
            f"tier: the caches of a tier are for training, and {option('--mode', 'inference')} was "
            "given; serve from a plan without a tier"
        )
    if (fetch := workload.on(topology.nodes).fetch) in ("pooled", "auto"):
        raise OperError(
            f"tier: its rows are cached one by one, and {option('--fetch', fetch)} was given; plan "
            f"with {option('--fetch', 'raw')} or {option('--fetch', 'distinct')}, or without a tier"
        )
    in_tier = tier_tables(asked, profile.tables)
    others = np.setdiff1d(np.arange(len(profile.tables)), in_tier).tolist()
    hosts = tier_topology(topology)
    of_one = replace(asked, tier=())
    in_hosts = profile.select(in_tier)
    tier = place_nearly_alike(
        hosts, lambda ranks: _placed_in_hosts(in_hosts, ranks, workload, of_one, report)
    )
    devices, device_bytes = None, np.zeros(topology.ranks)
    if others:
        on_devices = profile.select(others)
        devices = place_nearly_alike(
            topology,
            lambda ranks: place_in_memory(on_devices, ranks, workload, of_one, report),
        )
    watch, certificate = Watch(report), tier.certificate
    if devices is not None:
        devices, tier, certificate = place_together(devices, tier, watch)
    main = devices or tier
    limits = main.problem.limits
    if devices is not None:
        topology = without_relays(devices.problem.topology)
    elif by_devices(topology, asked):
        limits, device_bytes = _empty_devices(topology, asked, tier)
    # So that a plan that is made from this one has the same limits, on whatever machine.
    held = tuple(int(capacity) for capacity in tier.problem.capacity_bytes)
    topology = replace(topology, host_memory_bytes=held)

    report("layout")
    plan = join_memories(
        None if devices is None else assemble(devices),
        assemble(tier),
        in_tier,
        topology,
        device_bytes,
    )
    seconds = dict(main.seconds)
    if devices is not None:
        seconds["tier"] = sum(tier.seconds.values())
        for step, taken in watch.seconds.items():
            seconds[step] = seconds.get(step, 0.0) + taken
    made = replace(
        plan,
        profile=profile.digest,
        asked=replace(asked, tier=tuple(profile.tables[t].name for t in in_tier)),
        limits=limits,
        whole_certificate=certificate.of(plan.cost.objective_seconds),
        seconds=seconds,
        companions=(profile.save_vocabularies,),
        read_vocabularies=profile.prepared,
    )
    return PlannedWithTier(made, main)


def tier_tables(asked: PlanSettings, tables: Sequence[Table]) -> tuple[int, ...]:
    """Return the numbers of the tier's tables. Raise OperError, with near names, if one does not
    exist."""
    number = {table.name: n for n, table in enumerate(tables)}
    if asked.tier == "all":
        return tuple(range(len(tables)))
    for name in asked.tier:
        if name in number:
            continue
        known = {one.lower(): one for one in number}
        near = [known[one] for one in get_close_matches(name.lower(), known, n=3)]
        some = ", ".join(near or list(number)[:8])
        raise OperError(
            f"tier: table {name!r} is not in the profile; "
            + (f"near it: {some}" if near else f"it has {some}")
            + ("" if near or len(number) <= 8 else ", …")
        )
    return tuple(sorted(number[name] for name in asked.tier))


def _empty_devices(topology: Topology, asked: PlanSettings, tier: Planned) -> tuple[Limits, Floats]:
    """Return the limits and the capacities, [M], of devices that have no table."""
    room = DeviceRoom.of(topology, asked, tier.problem.step_memory)
    left = np.array(room.capacities(0.0), dtype=np.float64)
    return Limits(0.0, room.reserve), np.maximum(left, 0.0)


def _placed_in_hosts(
    profile: Profile,
    hosts: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None],
) -> Planned:
    """Return the placement of the tier's tables, each row on one rank."""
    try:
        placed = make_placement(profile, hosts, workload, asked, report, Limits(0.0))
    except CapacityError as error:
        raise CapacityError(
            f"host_memory of topology {hosts.name}: {error.reason}; "
            "or put fewer tables into the tier",
            of="tier",
        ) from error
    assert not placed.cost.extra_bytes, "a row of the tier got copies"
    return placed
