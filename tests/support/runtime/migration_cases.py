"""Engines whose rows migrate while they train or serve, beside engines whose rows never move."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Device
from oper.runtime.migration.row_migration import RowMigration
from oper.runtime.table_io import RowRange
from tests.support.runtime.engine_cases import Case, batch_of, gradient_of, initial, prepare, start


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


def serve_and_move(
    rank: int, group: Any, case: Case, plans: Sequence[Plan], bytes_per_step: int
) -> tuple[int, int, list[str]]:
    """Threads look up while rows migrate from plan to plan; how many lookups began while rows were
    on their way, how many steps were taken, and what was wrong."""
    engine = start(case, plans[0], group)
    batches = [batch_of(case, step, rank) for step in range(6)]
    expected = [engine(each).clone() for each in batches]
    wrong: list[str] = []
    looked_up, moving, ended = 0, threading.Event(), threading.Event()

    def serve() -> None:
        nonlocal looked_up
        prepared = [engine.prepare(each) for each in batches]  # by the first map
        try:
            while not ended.is_set():
                for n, given in enumerate(batches):
                    # Some have been prepared before rows moved, and some by the map of now.
                    batch = prepared[n] if looked_up % 2 else engine.prepare(given)
                    if not torch.equal(engine.lookup(batch), expected[n]):
                        wrong.append(f"batch {n}")
                    looked_up += moving.is_set()
        except Exception as error:  # it would end unseen in a thread
            wrong.append(repr(error))

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    steps = 0
    for plan in plans[1:]:
        migration = engine.migrate(plan, bytes_per_step)
        moving.set()
        while migration.step():
            time.sleep(0.002)
        moving.clear()
        steps += migration.steps_made
    ended.set()
    for thread in threads:
        thread.join()
    assert engine.unequal_replicas() == []
    wrong += [
        f"table {n}"
        for n, rows in enumerate(
            engine.read_rows([RowRange(n, 0, r) for n, r in enumerate(case.rows)])
        )
        if not torch.equal(rows, initial(case, n))
    ]
    engine.close()
    return looked_up, steps, wrong


def _moved(migration: RowMigration) -> int:
    before = migration.steps_made
    migration.step()
    return migration.steps_made - before
