"""Engines whose rows migrate while they train or serve, beside engines whose rows never move."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Device
from oper.runtime.migration.row_migration import RowMigration
from oper.runtime.table_io import RowRange
from tests.support.runtime.engine_cases import Case, batch_of, gradient_of, prepare, start


def tables_and_states(engine: EmbeddingEngine, case: Case) -> list[torch.Tensor]:
    """All rows, and all states of their optimizers."""
    every = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
    found = engine.read_rows(every)
    names = {state.name for bucket in engine.buckets for state in bucket.optimizer.states}
    for name in sorted(names):
        having = [
            n
            for b in engine.buckets
            for n in b.tables
            if name in {s.name for s in b.optimizer.states}
        ]
        found += engine.read_rows([every[n] for n in sorted(having)], name)
    return found


def train_and_move(
    rank: int,
    group: Any,
    case: Case,
    plans: Sequence[Plan],
    bytes_per_step: int,
    nodes: Any = None,
    ahead: bool = False,
    device: Device | None = None,
) -> dict[str, Any]:
    """Train by the first plan, and migrate to each of the others in turn, a step after each
    iteration from a random one on; what this rank computed. Batches are prepared, and looked up
    where the case allows it, before the rows move that the one before waited for: `ahead`."""
    engine = start(case, plans[0], group, nodes=nodes, device=device)
    rng = np.random.default_rng(case.seed)
    outputs, sizes, moved = [], [engine.heap.slots.copy()], 0
    coming, migration = list(plans[1:]), None
    following = None
    for step in range(case.steps):
        given = batch_of(case, step, rank)
        batch = prepare(engine, case, given) if following is None else following
        following = prepare(engine, case, batch_of(case, step + 1, rank)) if ahead else None
        out = engine.lookup(batch)
        outputs.append(out.detach().clone())
        if ahead and migration is not None:
            moved += _moved(migration)
        out.backward(gradient_of(case, step, rank, out))
        if migration is not None:
            moved += _moved(migration)
            if migration.done:
                migration = None
                sizes.append(engine.heap.slots.copy())
        elif coming and rng.random() < 0.7:
            migration = engine.migrate(coming.pop(0), bytes_per_step)
    while migration is not None and _moved(migration):
        moved += 1
    found = {
        "outputs": outputs,
        "tables": tables_and_states(engine, case),
        "moved": moved,
        "unequal": engine.unequal_replicas(),
        "sizes": sizes,
        "left": len(coming),
    }
    engine.close()
    return found


def _moved(migration: RowMigration) -> int:
    before = migration.steps_made
    migration.step()
    return migration.steps_made - before
