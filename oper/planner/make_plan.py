"""What `oper plan` does: place all rows, assemble the plan, write its folder.

In: `Profile`, `Topology`, `Workload`, `Settings`. Out: `Planned`, and the plan's folder. Where the
settings have a tier, its tables are placed in the hosts' memory (place_with_tier.py).
"""

import time
from collections.abc import Callable
from pathlib import Path

from oper.base import native
from oper.base.errors import check_type
from oper.cost.workload import Workload
from oper.files import storage
from oper.plan.plan import FORMAT, Plan
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import Planned
from oper.planner.place_in_memory import place_in_memory
from oper.planner.place_with_tier import PlannedWithTier, place_with_tier
from oper.planner.problem.problem import Settings
from oper.profiling.profile import Profile
from oper.topology.topology import Topology


def make_plan(
    profile: Profile | Path | str,
    topology: Topology | Path | str,
    workload: Workload,
    settings: Settings,
    output: Path | str,
    report: Callable[[str], None] = lambda step: None,
    overwrite: bool = False,
) -> Planned:
    """Make a plan and write its folder; `seconds["total"]` ends when all of it is on disk.

    A profile may be given by its folder, a topology by its name (`cpu:4`) or file.
    `report` is called with the name of each step as it begins. `overwrite` replaces a plan that is
    there, if nothing else is in its folder.

    Raises OperError where the folder cannot be written, or the capacities cannot hold the tables.
    """
    return plan_and_save(profile, topology, workload, settings, output, report, overwrite)[0]


def plan_and_save(
    profile: Profile | Path | str,
    topology: Topology | Path | str,
    workload: Workload,
    settings: Settings,
    output: Path | str,
    report: Callable[[str], None] = lambda step: None,
    overwrite: bool = False,
) -> tuple[Planned, Plan]:
    """As `make_plan`, and the plan that was written."""
    check_type("make_plan", "profile", profile, Profile, Path, str)
    check_type("make_plan", "topology", topology, Topology, Path, str)
    check_type("make_plan", "workload", workload, Workload)
    check_type("make_plan", "settings", settings, Settings)
    check_type("make_plan", "output", output, Path, str)
    storage.check_output(output, FORMAT, overwrite)
    if not isinstance(profile, Profile):
        profile = Profile.open(profile)
    if not isinstance(topology, Topology):
        topology = Topology.load(topology)
    native.ops()  # torch takes a second to load, which belongs to the start of Python
    began = time.perf_counter()
    place = place_with_tier if settings.tier else place_in_memory
    planned = place(profile, topology, workload, settings, report)
    since = time.perf_counter()
    report("layout")
    plan = planned.plan if isinstance(planned, PlannedWithTier) else assemble(planned)
    planned.seconds["layout"] = time.perf_counter() - since
    since = time.perf_counter()
    report("writing")
    plan.save(output, also=[profile.save_vocabularies], overwrite=overwrite)
    planned.seconds["writing"] = time.perf_counter() - since
    planned.seconds["total"] = time.perf_counter() - began
    return planned, plan
