"""From a planned placement to the plan that is written: layout, figures, settings."""

import numpy as np

from oper.plan.plan import Plan
from oper.planner.planner import Planned
from oper.planner.problem.classes import table_ratios, table_widths
from oper.planner.row_placement.arena_layout import lay_out
from oper.profiling.profile import Profile


def assemble(profile: Profile, planned: Planned) -> Plan:
    """The plan of a placement: every row gets its slot, every group its place in the arenas."""
    problem, realised = planned.problem, planned.realised
    tables = profile.tables
    _, width_of_table = table_widths(tables, problem.workload.mode)
    layout = lay_out(
        np.array([table.rows for table in tables], dtype=np.int64),
        width_of_table,
        problem.classes,
        realised.groups,
        realised.counts,
        realised.class_of_row,
        realised.scan,
        realised.stripes,
    )
    owner = realised.groups.owner
    accesses = problem.classes.accesses @ realised.counts
    accesses[: problem.topology.ranks] += realised.scan.striped_accesses.sum(axis=0)
    single = owner >= 0
    owned = np.zeros(problem.topology.ranks, dtype=np.int64)
    np.add.at(owned, owner[single], accesses[single])
    figures = planned.to_json()
    # No clock in the folder: the same input gives the same bytes.
    del figures["seconds"]
    asked = figures.pop("asked")
    certificate = {name: figures.pop(name) for name in planned.certificate.to_json()}
    partitions = planned.draft.partitions
    return Plan(
        tables=tables,
        topology=problem.topology,
        workload=problem.workload,
        layout=layout,
        explicit_accesses=realised.scan.explicit_accesses,
        explicit_containing=realised.scan.explicit_containing,
        owner_accesses=owned,
        replica_accesses=int(accesses[~single].sum()),
        samples=profile.samples,
        profile=profile.digest,
        produced_by=planned.step,
        figures=figures,
        partition_floor=partitions.floor(problem.classes.accesses),
        certificate=certificate,
        partitions=partitions.summary(),
        settings=asked,
        distinct_ratio=(
            np.stack(table_ratios(profile), axis=1) if profile.distinct is not None else None
        ),
    )
