"""Planning for `oper plan`: place all rows, and assemble the plan.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Plan`, in memory. If the settings have
a tier, its tables are placed in the hosts' memory (place_with_tier.py).
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from oper.base import native
from oper.base.errors import OperWarning, check_type
from oper.base.formatting import plural
from oper.base.portable_math import dot
from oper.base.spoken import option, spoken
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.least_memory import place_in_memory
from oper.planner.make_placement import Planned
from oper.planner.place_by_table import chooses_by_table, place_by_table, poolable
from oper.planner.place_nearly_alike import place_nearly_alike
from oper.planner.place_pooled import place_pooled
from oper.planner.place_with_tier import plan_with_tier
from oper.planner.problem.problem import Problem
from oper.planner.reference_figures import with_reference_figures
from oper.planner.unread_reads import unread_step_seconds
from oper.profiling.profile import Profile
from oper.topology.relays import RelayedTopology
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

    Raises OperError if the capacities cannot hold the tables; warns (OperWarning) of settings
    without effect and of counts for another batch.
    """
    return plan_and_placement(profile, topology, workload, settings, report)[0]


def plan_and_placement(
    profile: Profile | Path | str,
    topology: Topology | Path | str,
    workload: Workload,
    settings: PlanSettings | None = None,
    report: Callable[[str], None] = lambda step: None,
    settle: Callable[[Planned], Planned] = lambda placed: placed,
) -> tuple[Plan, Planned]:
    """Return the plan of `make_plan`, and the placement of the tables on devices, or in the hosts
    if these have all tables. Of one memory the plan is of the placement that `settle` returns."""
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
        main = settle(place_fetched(profile, topology, workload, asked, report))
        report("layout")
        plan = assemble(main)
    seconds = {**plan.seconds}
    seconds["layout"] = time.perf_counter() - began - sum(seconds.values())
    report("other plans")
    plan = with_reference_figures(plan, profile, None if asked.tier else [main.problem])
    if plan.held_out is None and not asked.tier:
        plan = replace(plan, unread_step_seconds=unread_step_seconds(main))
    total = time.perf_counter() - began
    seconds |= {"other plans": total - sum(seconds.values()), "total": total}
    plan = replace(plan, seconds=seconds)
    for sentence in warnings_of(plan, main.problem, profile):
        warnings.warn(sentence, OperWarning, stacklevel=3)
    return plan, main


def place_fetched(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
) -> Planned:
    """Return the placement of all rows in one memory, by how the workload fetches them."""
    place: Callable[..., Planned] = place_in_memory
    if chooses_by_table(profile, topology, workload, asked):
        place = place_by_table
    elif workload.on(topology.nodes).fetch == "pooled":
        place = place_pooled
    return place_nearly_alike(
        topology, lambda ranks: place(profile, ranks, workload, asked, report)
    )


def place_like(plan: Plan, profile: Profile, topology: Topology, asked: PlanSettings) -> Planned:
    """Return the placement of all rows in one memory with tables fetched as in the plan: it pools
    the tables that the plan pools, and no others."""
    kept = frozenset(plan.pooled_tables) & poolable(profile)
    if plan.workload.fetch == "pooled" or not kept or topology.nodes == 1:
        return place_fetched(profile, topology, plan.workload, asked)
    return place_nearly_alike(
        topology, lambda ranks: place_pooled(profile, ranks, plan.workload, asked, tables=kept)
    )


# Relative byte saving below which distinct fetches are not worth a warning.
_NO_SAVING = 1e-3


def warnings_of(plan: Plan, problem: Problem, profile: Profile) -> list[str]:
    """Return the warnings as sentences; none if all settings have an effect. `problem` is that of
    the plan's tables on devices."""
    workload, topology = plan.workload, plan.topology
    memory_bytes = plan.cost.memory_bytes
    if plan.host is not None and topology.shares_host_memory:  # devices and hosts are one memory
        memory_bytes = memory_bytes + plan.host.cost.memory_bytes
    sentences = [topology.memory_warning(memory_bytes, plan.cost.step_bytes)]
    if topology.ranks == 1:
        sentences.append(
            f"there is one rank, which holds every row: {option('--mode')} and {option('--fetch')} "
            f"change the figures but not the plan; {option('--extra-memory')}, "
            f"{option('--threshold')}, {option('--dob')} and {option('--balance')} have no effect"
        )
    samples = workload.batch_size / topology.ranks
    if workload.fetch == "distinct" and not isinstance(problem.topology, RelayedTopology):
        classes = problem.classes
        weight = classes.rows * classes.S
        raw = float(dot(weight, classes.expected)) / max(profile.samples, 1) * samples
        if raw - float(dot(weight, classes.D)) <= _NO_SAVING * raw:
            sentences.append(
                f"{option('--fetch', 'distinct')}: has no effect here, as the {samples:g} samples "
                "of a rank almost never read a row twice"
            )
    measured = profile.distinct
    uses_distinct = workload.training or workload.fetch == "distinct"
    planned_for = (workload.batch_size, topology.ranks)
    if measured and uses_distinct and (measured.batch_size, measured.ranks) != planned_for:
        sentences.append(
            f"distinct rows were measured for batches of {measured.batch_size:,} on "
            f"{plural(measured.ranks, 'rank')}, and this plan is for "
            f"{workload.batch_size:,} on {topology.ranks:,}: profile with "
            f"{option('--batch-size', workload.batch_size)}{spoken(' ', ', ')}"
            f"{option('--ranks', topology.ranks)} for closer figures"
        )
    return [sentence for sentence in sentences if sentence]
