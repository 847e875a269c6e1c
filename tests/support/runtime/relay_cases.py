"""What ranks do in the tests of rows that cross the network once a node, and must count."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from oper.plan.address_map import AddressMap, unpack
from oper.plan.layout import LOCAL
from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import RowBlock, RowRange
from tests.support.runtime.engine_cases import Case, batch_of, features_of, module_tables


def relays(nodes: tuple[int, ...]) -> Mapping[tuple[int, int], int]:
    """The relay of an owner for a rank of another node, by (rank, owner): of that rank's node the
    one at the owner's position."""
    members = {n: [r for r, of in enumerate(nodes) if of == n] for n in nodes}
    return {
        (rank, owner): members[here][members[there].index(owner) % len(members[here])]
        for rank, here in enumerate(nodes)
        for owner, there in enumerate(nodes)
        if here != there
    }


def owners(plan: Plan, table: int) -> np.ndarray:
    """The rank that alone holds each row of a table."""
    every = torch.arange(plan.tables[table].rows)
    maps = [AddressMap.of(plan, rank) for rank in range(plan.ranks)]
    fields = torch.stack([unpack(m.translate(table, every))[0] for m in maps])
    held = (fields == LOCAL).numpy()
    assert (held.sum(axis=0) == 1).all()
    return np.asarray(held.argmax(axis=0))


def rows_read(case: Case, plan: Plan, rank: int, step: int) -> set[tuple[int, int, int]]:
    """The distinct rows of other ranks that a rank's batch reads: (owner, table, slot)."""
    batch, found = batch_of(case, step, rank), set()
    address_map = AddressMap.of(plan, rank)
    offsets, samples = batch.offsets().tolist(), batch.stride()
    keys = [n for n in range(len(case.rows)) for _ in features_of(case, n)]
    for key, table in enumerate(keys):
        ids = batch.values()[offsets[key * samples] : offsets[(key + 1) * samples]]
        fields, slots = unpack(address_map.translate(table, ids.long()))
        pairs = zip(fields.tolist(), slots.tolist(), strict=True)
        found |= {(field, table, slot) for field, slot in pairs if field < LOCAL - 1}
    return found


def relayed(case: Case, plan: Plan, nodes: tuple[int, ...], steps: int) -> dict[str, np.ndarray]:
    """What relays are to count in so many steps: [ranks, ranks], relay by owner."""
    relay_of, ranks = relays(nodes), len(nodes)
    rows, bytes, gradients = np.zeros((3, ranks, ranks), dtype=np.int64)
    for step in range(steps):
        crossing = {
            (relay_of[rank, owner], owner, table, slot)
            for rank in range(ranks)
            for owner, table, slot in rows_read(case, plan, rank, step)
            if nodes[owner] != nodes[rank]
        }
        for relay, owner, table, _ in crossing:
            rows[relay, owner] += 1
            bytes[relay, owner] += plan.tables[table].row_bytes
            gradients[relay, owner] += 4 * plan.tables[table].dim
    return {
        "relayed_rows": rows,
        "relayed_bytes": bytes,
        "relayed_gradient_rows": rows,
        "relayed_gradient_bytes": gradients,
    }


def train_every_row(
    rank: int, group: Any, case: Case, plan: Plan, nodes: tuple[int, ...]
) -> list[torch.Tensor]:
    """The tables after a step by plain SGD in which every rank reads each row once, in an order of
    its own, with gradients `row_gradient`."""
    from torchrec import KeyedJaggedTensor

    engine = EmbeddingEngine(
        plan, module_tables(case), group=group, nodes=nodes, deadline_seconds=60.0
    )
    zeros = [RowBlock(n, 0, torch.zeros(t.rows, t.dim)) for n, t in enumerate(plan.tables)]
    engine.write_rows(zeros if rank == 0 else [])
    keys = [features_of(case, n)[0] for n in range(len(case.rows))]
    orders = [
        np.random.default_rng((rank, n)).permutation(rows) for n, rows in enumerate(case.rows)
    ]
    unread = [f for n in range(len(case.rows)) for f in features_of(case, n)[1:]]
    batch = KeyedJaggedTensor(
        [*keys, *unread],
        torch.from_numpy(np.concatenate(orders)),
        lengths=torch.tensor([*case.rows, *[0] * len(unread)]),
    )
    out = engine(batch)
    grads = {
        key: row_gradient(rank, n, plan.tables[n].rows, plan.tables[n].dim)[orders[n]]
        for n, key in enumerate(keys)
    }
    # Unpooled: the gradients of all rows one after the other.
    grad = np.concatenate([grads[key].ravel() for key in keys])
    out.backward(torch.from_numpy(grad))
    found = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    engine.close()
    return found


def row_gradient(rank: int, table: int, rows: int, dim: int) -> np.ndarray:
    """Of all rows of a table, float32 [rows, dim], whose sums are rounded."""
    random = np.random.default_rng((7, rank, table))
    return random.standard_normal((rows, dim)).astype(np.float32)
