"""From a placement to the plan that is written: layout, figures, record, accesses by owner.

In: `Planned`. Out: `Plan`.
"""

import numpy as np

from oper.base.portable_math import whole_dot
from oper.cost.vectors_per_bag import pooled_names
from oper.plan.memories import DEVICE, Memory
from oper.plan.plan import ListedCounts, Plan
from oper.planner.make_placement import Planned
from oper.planner.predict_step import predict_step_of
from oper.planner.problem.classes import measured_ratios
from oper.planner.row_placement.arena_layout import lay_out
from oper.topology.pooled_links import PooledTopology, without_pooling
from oper.topology.relays import without_relays


def assemble(planned: Planned) -> Plan:
    """Return the plan of a placement: every row gets its slot. Nothing that is written depends on
    how long planning took, so that equal inputs give equal bytes."""
    problem, placement = planned.problem, planned.row_placement
    classes, profile, ranks = problem.classes, problem.profile, problem.ranks
    owner = placement.holder_sets.owner
    accesses = whole_dot(classes.accesses, placement.counts)  # [G]
    accesses[:ranks] += placement.scan.striped_accesses.sum(axis=0)
    single = owner >= 0
    owner_accesses = np.zeros(ranks, dtype=np.int64)
    np.add.at(owner_accesses, owner[single], accesses[single])
    partitions = planned.class_placement.partitions
    layout, scan = lay_out(problem, placement), placement.scan
    topology = problem.topology
    memory = Memory(
        name=DEVICE,
        tables=tuple(range(len(profile.tables))),
        cost=planned.cost,
        owner_accesses=owner_accesses,
        replica_accesses=int(accesses[~single].sum()),
        record=planned.record,
        certificate=planned.certificate,
        partitions=partitions.summary(),
    )
    return Plan(
        tables=profile.tables,
        topology=without_relays(without_pooling(topology)),
        workload=problem.workload,
        layout=layout,
        counts=ListedCounts.of(layout, scan.listed_accesses, scan.listed_samples_with_row),
        memories=(memory,),
        samples=profile.samples,
        profile=profile.digest,
        asked=problem.asked,
        limits=problem.limits,
        partition_floor=partitions.floor(classes.accesses),
        distinct_ratio=measured_ratios(profile),
        log_part=profile.log_part,
        seconds=planned.seconds,
        companions=(profile.save_vocabularies,),
        read_vocabularies=profile.prepared,
        pooled_tables=pooled_names(topology, profile.tables),
        step_time=predict_step_of(problem, placement),
        vector_ratio=tuple(topology.vector_ratio.tolist())
        if isinstance(topology, PooledTopology)
        else None,
    )
