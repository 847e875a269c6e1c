"""What ranks do in the tests of rows with a copy on each node, and must count."""

from typing import Any

import numpy as np
import torch

from oper.plan.address_map import AddressMap, unpack
from oper.plan.layout import LOCAL
from oper.plan.plan import Plan
from oper.runtime.allreduce.replica_check import UnequalReplica
from oper.runtime.memory.runtime_plan import node_copy_slots
from oper.runtime.table_io import RowBlock, RowRange
from tests.support.runtime.engine_cases import Case, batch_of, features_of, gradient_of, start


def members_of(nodes: tuple[int, ...]) -> list[list[int]]:
    """The ranks of each node, in the order of the nodes' first ranks."""
    return [[r for r, of in enumerate(nodes) if of == n] for n in dict.fromkeys(nodes)]


def copies(plan: Plan, table: int) -> tuple[np.ndarray, np.ndarray]:
    """Which ranks have each row of a table, bool [ranks, rows], and in which slots."""
    every = torch.arange(plan.tables[table].rows)
    maps = [AddressMap.of_copies(plan, rank) for rank in range(plan.ranks)]
    found = [unpack(of_rank.translate(table, every)) for of_rank in maps]
    fields, slots = (torch.stack(part).numpy() for part in zip(*found, strict=True))
    return fields == LOCAL, slots


def sent(case: Case, plan: Plan, nodes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The rows and bytes that each rank is to send each other for copies a node, [ranks, ranks]."""
    members, (rows, bytes) = members_of(nodes), np.zeros((2, case.ranks, case.ranks), dtype=int)
    for step, table in np.ndindex(case.steps, len(case.rows)):
        holds, slots = copies(plan, table)
        touched = np.array([_touched(case, step, rank, table) for rank in range(case.ranks)])
        for position in range(len(members[0])):
            holders = [of_node[position] for of_node in members]
            others = [r for r in range(case.ranks) if r not in holders]
            here = holds[holders].all(axis=0) & ~holds[others].any(axis=0)
            of_node = [here & touched[of].any(axis=0) for of in members]
            for n, holder in enumerate(holders):
                for m, other in enumerate(holders):
                    if n == m:
                        continue
                    at = slots[holder] % len(members)
                    count = (of_node[n] & (at == m)).sum()
                    count += (np.any(of_node, axis=0) & (at == n)).sum()
                    rows[holder, other] += count
                    bytes[holder, other] += 4 * plan.tables[table].dim * count
    return rows, bytes


def _touched(case: Case, step: int, rank: int, table: int) -> np.ndarray:
    """Which rows of a table a rank's batch reads."""
    batch, found = batch_of(case, step, rank), np.zeros(case.rows[table], dtype=bool)
    offsets, samples = batch.offsets().tolist(), batch.stride()
    keys = [n for n in range(len(case.rows)) for _ in features_of(case, n)]
    for key in (k for k, of in enumerate(keys) if of == table):
        found[batch.values()[offsets[key * samples] : offsets[(key + 1) * samples]]] = True
    return found


def train_and_spoil(
    rank: int, group: Any, case: Case, plan: Plan, nodes: tuple[int, ...], state: bool
) -> tuple[list[UnequalReplica], list[UnequalReplica]]:
    """After a step and what else wrote to tables and states, the copies that are found unequal; and
    those after rank 3, the second of its node, changed the last of its copies of a width."""
    engine = start(case, plan, group, nodes=nodes)
    out = engine(batch_of(case, 0, rank))
    out.backward(gradient_of(case, 0, rank, out))
    blocks = [RowBlock(0, 0, torch.full((case.rows[0], case.dims[0]), 0.75))] if rank == 1 else []
    engine.write_rows(blocks, "momentum1")
    states = engine.read_rows([RowRange(0, 0, case.rows[0])], "momentum1")
    assert (states[0] == 0.75).all()
    before = engine.unequal_replicas()
    if rank == 3:
        arenas = engine.heap.state if state else engine.heap.rows
        arenas(WIDTH)[last_copy(plan, rank)[1]] += 1
    after = engine.unequal_replicas()
    engine.close()
    return before, after


WIDTH = 0  # whose copies are changed


def last_copy(plan: Plan, rank: int) -> tuple[int, int]:
    """The number and the slot of the last of a rank's copies a node of WIDTH."""
    slots = node_copy_slots(plan.layout, np.flatnonzero(plan.layout.width_of_table == WIDTH), rank)
    return len(slots) - 1, int(slots[-1])
