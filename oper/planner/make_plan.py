"""What `oper plan` does: place all rows, and assemble the plan.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Plan`, in memory. Where the settings
have a tier, its tables are placed in the hosts' memory (place_with_tier.py).
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from oper.base import native
from oper.base.errors import OperWarning, check_type
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import Planned
from oper.planner.place_in_memory import place_in_memory
from oper.planner.place_with_tier import plan_with_tier
from oper.planner.plan_warnings import warnings_of
from oper.profiling.profile import Profile
from oper.topology.topology import Topology


def make_plan(
    profile: Profile | Path | str,
    topology: Topology | Path | str,
    workload: Workload,
    settings: PlanSettings | None = None,
    *,
    report: Callable[[str], None] = lambda step: None,
) -> Plan:
    """Make a plan, in memory; `plan.save(folder)` writes it, with the profile's vocabularies.

    A profile may be given by its folder, a topology by its name (`cpu:4`) or file. The batch of
    `workload` is the global one, of all ranks. `report` is called with the name of each step as it
    begins.

    Raises OperError where the capacities cannot hold the tables; warns (OperWarning) of settings
    without effect and of counts for another batch.
    """
    return plan_and_placement(profile, topology, workload, settings, report)[0]


def plan_and_placement(
    profile: Profile | Path | str,
    topology: Topology | Path | str,
    workload: Workload,
    settings: PlanSettings | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> tuple[Plan, Planned]:
    """What `make_plan` makes, and the placement of the tables on devices, or in the hosts where
    these have all tables."""
    check_type("make_plan", "profile", profile, Profile, Path, str)
    check_type("make_plan", "topology", topology, Topology, Path, str)
    check_type("make_plan", "workload", workload, Workload)
    if settings is not None:
        check_type("make_plan", "settings", settings, PlanSettings)
    asked = settings or PlanSettings()
    if not isinstance(profile, Profile):
        profile = Profile.load(profile)
    if not isinstance(topology, Topology):
        topology = Topology.load(topology)
    native.ops()  # torch takes a second to load, which belongs to the start of Python
    began = time.perf_counter()
    if asked.tier:
        plan, main = plan_with_tier(profile, topology, workload, asked, report)
    else:
        main = place_in_memory(profile, topology, workload, asked, report)
        report("layout")
        plan = assemble(main)
    placed = sum(plan.seconds.values())
    total = time.perf_counter() - began
    plan = replace(plan, seconds={**plan.seconds, "layout": total - placed, "total": total})
    for sentence in warnings_of(plan, main.problem, profile):
        warnings.warn(sentence, OperWarning, stacklevel=3)
    return plan, main
