"""From a placement to the plan that is written: layout, prediction, record, accesses by owner.

In: `Planned`. Out: `Plan`.
"""

import numpy as np

from oper.plan.plan import ListedCounts, Plan
from oper.planner.make_placement import Planned
from oper.planner.problem.classes import measured_ratios
from oper.planner.row_placement.arena_layout import lay_out


def assemble(planned: Planned) -> Plan:
    """The plan of a placement: every row gets its slot. No times are in it, so that the same input
    gives the same bytes."""
    problem, placement = planned.problem, planned.row_placement
    classes, profile, ranks = problem.classes, problem.profile, problem.ranks
    owner = placement.holder_sets.owner
    accesses = classes.accesses @ placement.counts  # [G]
    accesses[:ranks] += placement.scan.striped_accesses.sum(axis=0)
    single = owner >= 0
    owner_accesses = np.zeros(ranks, dtype=np.int64)
    np.add.at(owner_accesses, owner[single], accesses[single])
    partitions = planned.class_placement.partitions
    layout, scan = lay_out(problem, placement), placement.scan
    return Plan(
        tables=profile.tables,
        topology=problem.topology,
        workload=problem.workload,
        layout=layout,
        counts=ListedCounts.of(layout, scan.listed_accesses, scan.listed_samples_with_row),
        owner_accesses=owner_accesses,
        replica_accesses=int(accesses[~single].sum()),
        samples=profile.samples,
        profile=profile.digest,
        allreduce_method=planned.cost.allreduce_method,
        prediction=planned.prediction,
        record=planned.record,
        partition_floor=partitions.floor(classes.accesses),
        certificate=planned.certificate.to_json(),
        partitions=partitions.summary(),
        settings=problem.settings.to_json(),
        distinct_ratio=measured_ratios(profile),
        log_part=profile.log_part,
    )
