"""Warnings of a plan: settings without effect, distinct rows measured for another batch."""

from oper.base.formatting import plural
from oper.plan.plan import Plan
from oper.planner.problem.problem import Problem
from oper.profiling.profile import Profile

# Of the bytes: a saving by distinct fetches that is too small to mention. Only a warning depends
# on it.
_NO_SAVING = 1e-3


def warnings_of(plan: Plan, problem: Problem, profile: Profile) -> list[str]:
    """The warnings as sentences; none where all settings have an effect. `problem` is that of the
    plan's tables on devices."""
    workload, topology = plan.workload, plan.topology
    memory_bytes = plan.cost.memory_bytes
    if plan.host is not None and topology.shares_host_memory:  # devices and hosts are one memory
        memory_bytes = memory_bytes + plan.host.cost.memory_bytes
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
