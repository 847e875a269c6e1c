"""Warnings of `oper plan`: options without effect, distinct rows measured for another batch."""

from typing import TYPE_CHECKING

from oper.base.formatting import plural

if TYPE_CHECKING:
    from oper.planner.make_placement import Planned
    from oper.profiling.profile import Profile


# Of the bytes: a saving by distinct fetches that is too small to mention. Only a warning depends
# on it.
_NO_SAVING = 1e-3


def warnings(planned: "Planned", profile: "Profile") -> list[str]:
    """The warnings as sentences; none where all options have an effect."""
    from oper.planner.place_with_tier import PlannedWithTier

    problem = planned.problem
    workload, topology = problem.workload, problem.topology
    memory_bytes = planned.cost.memory_bytes
    if isinstance(planned, PlannedWithTier) and planned.plan.parts is not None:
        topology = planned.plan.topology
        memory_bytes = planned.prediction.memory_bytes
        if topology.shares_host_memory:  # devices and hosts are one memory
            memory_bytes = memory_bytes + planned.plan.parts.tier.prediction.memory_bytes
    found = [topology.memory_warning(memory_bytes)]
    if topology.ranks == 1:
        found.append(
            "there is one rank, which holds every row: --mode and --fetch change the figures but "
            "not the plan; --extra-memory, --threshold, --dob and --balance have no effect"
        )
    samples = workload.batch_size / topology.ranks
    if workload.fetch == "distinct":
        classes = problem.classes
        weight = classes.rows * classes.S
        raw = float(weight @ classes.accesses) / max(profile.samples, 1) * samples
        if raw - float(weight @ classes.D) <= _NO_SAVING * raw:
            found.append(
                f"--fetch distinct: has no effect here, as the {samples:g} samples of a rank "
                "almost never read a row twice"
            )
    measured = profile.distinct
    uses_distinct = workload.training or workload.fetch == "distinct"
    planned_for = (workload.batch_size, topology.ranks)
    if measured and uses_distinct and (measured.batch_size, measured.ranks) != planned_for:
        found.append(
            f"distinct rows were measured for batches of {measured.batch_size:,} on "
            f"{plural(measured.ranks, 'rank')}, and this plan is for "
            f"{workload.batch_size:,} on {topology.ranks:,}: profile with --batch-size "
            f"{workload.batch_size} --ranks {topology.ranks} for closer figures"
        )
    return [sentence for sentence in found if sentence]
