"""What ranks do in the tests of pooled fetches between nodes."""

from typing import Any

import numpy as np
import torch

from oper.plan.plan import Plan
from oper.runtime.table_io import RowBlock, RowRange
from tests.support.runtime.engine_cases import Case, batch_of, features_of, gradient_of, start
from tests.support.runtime.fault_cases import error_of

UNIT = 2.0**-24  # half of what float32 numbers from 1 on are apart


def scattered(case: Case, table: int) -> torch.Tensor:
    """Values of a table whose sums are rounded."""
    random = torch.Generator().manual_seed(1000 * case.seed + table)
    return torch.randn(case.rows[table], case.dims[table % len(case.dims)], generator=random)


def gradient_at(case: Case, step: int, rank: int, shape: Any) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=random)


def _start(case: Case, plan: Plan, group: Any, nodes: Any) -> Any:
    engine = start(case, plan, group, nodes=nodes)
    mine = [n for n in range(len(case.rows)) if n % engine.ranks == engine.rank]
    engine.write_rows([RowBlock(n, 0, scattered(case, n)) for n in mine])
    return engine


def _all_rows(case: Case) -> list[RowRange]:
    return [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]


def train_scattered(rank: int, group: Any, case: Case, plan: Plan, nodes: Any) -> dict[str, Any]:
    """Outputs and tables of steps on values whose sums are rounded."""
    engine, outputs = _start(case, plan, group, nodes), []
    for step in range(case.steps):
        out = engine(batch_of(case, step, rank))
        outputs.append(out.detach().clone())
        out.backward(gradient_at(case, step, rank, out.shape))
    tables = engine.read_rows(_all_rows(case))
    engine.close()
    return {"outputs": outputs, "tables": tables}


def train_once(
    rank: int, group: Any, case: Case, plan: Plan, nodes: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Errors of the output of a step, and of the tables after it, by plain SGD; with their bounds.

    n additions in any order, and k other operations, are off by (n + k)·u / (1 − (n + k)·u) times
    the sum of the magnitudes, where u is half a unit (Higham 2002, §4.2).
    """
    engine = _start(case, plan, group, nodes)
    out = engine(batch_of(case, 0, rank))
    exact, magnitude, terms = _output(case, rank)
    found = [(_error(out, exact), _bound(terms, magnitude))]
    grad = gradient_at(case, 0, rank, out.shape)
    given = grad.clone()
    out.backward(grad)
    assert torch.equal(grad, given), "a gradient is its caller's"
    tables = engine.read_rows(_all_rows(case))
    engine.close()
    for n, table in enumerate(tables):
        exact, magnitude, terms = _updated(case, n)
        found.append((_error(table, exact), _bound(terms, magnitude)))
    return found


def _error(found: torch.Tensor, exact: np.ndarray) -> np.ndarray:
    return np.abs(found.detach().double().numpy() - exact)


def _bound(terms: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    return terms * UNIT / (1 - terms * UNIT) * magnitude


def _bags(case: Case, rank: int) -> Any:
    """(feature, sample, table, ids) of a rank's first batch."""
    batch = batch_of(case, 0, rank)
    offsets, samples = batch.offsets().tolist(), batch.stride()
    keys = [n for n in range(len(case.rows)) for _ in features_of(case, n)]
    for key, table in enumerate(keys):
        for sample in range(samples):
            bag = key * samples + sample
            yield key, sample, table, batch.values()[offsets[bag] : offsets[bag + 1]].numpy()


def _columns(case: Case) -> list[slice]:
    """The columns of each feature in the output."""
    dims = [
        case.dims[n % len(case.dims)] for n in range(len(case.rows)) for _ in features_of(case, n)
    ]
    ends = np.cumsum(dims).tolist()
    return [slice(end - dim, end) for end, dim in zip(ends, dims, strict=True)]


def _output(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A rank's first output in float64, the magnitudes of its terms, and how many those are."""
    samples, columns = batch_of(case, 0, rank).stride(), _columns(case)
    exact, magnitude, terms = np.zeros((3, samples, columns[-1].stop))
    for key, sample, table, ids in _bags(case, rank):
        rows = scattered(case, table).double().numpy()[ids]
        scale = max(len(ids), 1) if case.pooling == "mean" else 1
        exact[sample, columns[key]] = rows.sum(axis=0) / scale
        magnitude[sample, columns[key]] = np.abs(rows).sum(axis=0) / scale
        terms[sample, columns[key]] = len(ids) - 1 + (scale > 1)
    return exact, magnitude, terms.clip(min=0)


def _updated(case: Case, table: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table after the step, by the gradients of all ranks."""
    exact = scattered(case, table).double().numpy().copy()
    magnitude, terms = np.abs(exact), np.zeros_like(exact)
    for rank in range(case.ranks):
        shape = (batch_of(case, 0, rank).stride(), _columns(case)[-1].stop)
        grad = gradient_at(case, 0, rank, shape).double().numpy()
        for key, sample, of, ids in _bags(case, rank):
            scale = case.ranks * (max(len(ids), 1) if case.pooling == "mean" else 1)
            part = grad[sample, _columns(case)[key]] / scale
            for row in ids if of == table else ():
                exact[row] -= part
                magnitude[row] += np.abs(part)
                terms[row] += 1
    # The mean's division, the scale, the learning rate; and the row itself is a term.
    return exact, magnitude, np.where(terms > 0, terms + 3, 0)


def train_in_turn(
    rank: int, group: Any, case: Case, plan: Plan, nodes: Any, mixed: bool
) -> dict[str, Any]:
    """Steps, where `mixed` with keys in an order of this rank's own, and prepared one ahead."""
    engine, outputs = start(case, plan, group, nodes=nodes), []

    def prepared(step: int) -> Any:
        batch = batch_of(case, step, rank)
        keys = np.random.default_rng(rank).permutation(len(batch.keys())).tolist()
        return engine.prepare(batch.permute(keys) if mixed else batch)

    batches = [prepared(0)]
    for step in range(case.steps):
        if mixed and step + 1 < case.steps:
            batches.append(prepared(step + 1))
        out = engine.lookup(batches[step])
        outputs.append(out.detach().clone())
        out.backward(gradient_of(case, step, rank, out))
        if not mixed and step + 1 < case.steps:
            batches.append(prepared(step + 1))
    tables = engine.read_rows(_all_rows(case))
    engine.close()
    return {"outputs": outputs, "tables": tables}


def look_up_wrong_ids(
    rank: int, group: Any, case: Case, plan: Plan, nodes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of ids that are out of range, and of row 0 in their place."""
    engine, found = start(case, plan, group, nodes=nodes, bounds="warning"), []
    for value in (10**6, 0):
        batch = batch_of(case, 0, rank)
        batch.values()[::2] = value
        with torch.no_grad():
            found.append(engine(batch).clone())
    engine.close()
    return found[0], found[1]


def compile_lookup(rank: int, group: Any, case: Case, plan: Plan, nodes: Any) -> str | None:
    """What a graph of the lookup is told."""
    engine = start(case, plan, group, nodes=nodes)
    batch = engine.prepare(batch_of(case, 0, rank))
    looked_up = torch.compile(lambda: engine.lookup(batch), backend="eager")
    return error_of(looked_up)
