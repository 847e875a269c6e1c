"""Random modules and batches for the tests of the runtime, and the unsharded model they must equal.

The reference is plain torch in float64 on whole tables: one gradient a row and step, summed over
all ranks, and the optimizer applied to the rows that were accessed.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.prepared_batch import NumberedRows, PreparedBatch, Runs
from oper.runtime.step import sort
from oper.runtime.table_io import RowBlock, RowRange
from oper.runtime.tables.optimizer_buckets import EmbeddingTable
from oper.runtime.tables.optimizers import Optimizer
from oper.tables.table import Table


@dataclass(frozen=True)
class Case:
    """A module and its batches; all of it follows from the fields."""

    seed: int
    ranks: int
    optimizer: str = "sgd"
    pooling: str = "sum"
    weighted: bool = False
    dtype: str = "fp32"
    dims: tuple[int, ...] = (8, 16)
    rows: tuple[int, ...] = (50, 1, 200)
    # "one" id each, "many", "mean one": as many ids as bags, "none": empty batches on odd ranks
    bags: str = "many"
    int32: bool = False
    steps: int = 3
    lr: float = 0.5
    optimizers: tuple[str, ...] = ()  # of the tables in turn, in the place of `optimizer`
    lrs: tuple[float, ...] = ()
    plain: bool = False  # SGD does not decay weights
    rounding: bool = False  # stochastic, of rows in fp16 and bf16
    numbered: bool = False  # rows are numbered, as of batches of more accesses


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "sgd": {"weight_decay": 0.1},
    "momentum_sgd": {"momentum": 0.8, "weight_decay": 0.05},
    "adagrad": {"eps": 1e-3},
    "rowwise_adagrad": {"eps": 1e-3},
    "adam": {"eps": 1e-3},
    "partial_rowwise_adam": {"eps": 1e-3},
}


def tables_of(case: Case) -> tuple[Table, ...]:
    """Tables of the plan: the dims in turn; the last is read by two features."""
    return tuple(
        Table(
            f"t{n}",
            rows,
            case.dims[n % len(case.dims)],
            case.dtype,
            case.optimizer,
            case.pooling,
            features_of(case, n),
        )
        for n, rows in enumerate(case.rows)
    )


def features_of(case: Case, table: int) -> tuple[str, ...]:
    return (f"f{table}", f"g{table}") if table == len(case.rows) - 1 else (f"f{table}",)


def optimizer_of(case: Case, table: int) -> Optimizer:
    kinds, lrs = case.optimizers or (case.optimizer,), case.lrs or (case.lr,)
    kind = kinds[table % len(kinds)]
    settings = SETTINGS[kind] if not case.plain else {}
    rate = lrs[table % len(lrs)]
    return Optimizer(kind, lr=rate, stochastic_rounding=case.rounding, **settings)


def module_tables(case: Case) -> list[EmbeddingTable]:
    return [
        EmbeddingTable(n, features_of(case, n), case.pooling, optimizer_of(case, n))
        for n in range(len(case.rows))
    ]


def initial(case: Case, table: int) -> torch.Tensor:
    """Values that fp16 and bf16 hold exactly."""
    rng = np.random.default_rng((case.seed, table))
    t = tables_of(case)[table]
    return torch.from_numpy(rng.integers(-64, 65, (t.rows, t.dim)) / 32).float()


def batch_of(case: Case, step: int, rank: int):
    """A rank's KeyedJaggedTensor in a step."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(**batch_parts(case, step, rank))


def batch_parts(case: Case, step: int, rank: int) -> dict[str, Any]:
    """What that is made of."""
    rng = np.random.default_rng((case.seed, step, rank, 7))
    samples = int(rng.integers(1, 9))
    if case.bags == "none" and rank % 2:
        samples = 0
    keys = [f for n in range(len(case.rows)) for f in features_of(case, n)]
    of_key = [n for n in range(len(case.rows)) for _ in features_of(case, n)]
    lengths, values = [], []
    for table, size in zip(of_key, _bag_sizes(case, rng, len(keys), samples), strict=True):
        lengths.append(size)
        hot = rng.random(size.sum()) < 0.4
        ids = rng.integers(0, case.rows[table], size.sum())
        values.append(np.where(hot, 0, ids))
    ids = torch.from_numpy(np.concatenate(values)).to(torch.int32 if case.int32 else torch.int64)
    weights = torch.from_numpy(rng.integers(1, 9, len(ids)) / 4).float() if case.weighted else None
    counts = torch.from_numpy(np.concatenate(lengths)).to(torch.int32)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=counts.dtype)])
    # Loaders give one or the other.
    sizes = {"offsets": ends} if step % 2 else {"lengths": counts}
    return {"keys": keys, "values": ids, "weights": weights, "stride": samples, **sizes}


def _bag_sizes(
    case: Case, rng: np.random.Generator, features: int, samples: int
) -> Iterator[np.ndarray]:
    """Ids in each bag of one feature after the other, [samples]."""
    if case.bags == "mean one":
        bag_of = rng.integers(0, max(features * samples, 1), features * samples)
        yield from np.bincount(bag_of, minlength=len(bag_of)).reshape(features, samples)
        return
    for _ in range(features):
        yield np.ones(samples, int) if case.bags == "one" else rng.integers(0, 5, samples)


def gradient_of(case: Case, step: int, rank: int, like: torch.Tensor) -> torch.Tensor:
    rng = np.random.default_rng((case.seed, step, rank, 8))
    return torch.from_numpy(rng.integers(-16, 17, tuple(like.shape)) / 8).to(like.dtype)


class Reference:
    """The unsharded model on all ranks' batches."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tables = [initial(case, n).double() for n in range(len(case.rows))]
        self.states: list[dict[str, torch.Tensor]] = [{} for _ in case.rows]
        self.step_count = 0
        self.rate = 1.0  # of all learning rates

    def lookup(self, batch) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """Output, weights that require grad, and the tables that do."""
        weights = batch.weights_or_none()
        weights = None if weights is None else weights.double().requires_grad_()
        leaves = [table.clone().requires_grad_() for table in self.tables]
        offsets, stride, parts = batch.offsets().tolist(), batch.stride(), []
        of_key = [n for n in range(len(self.case.rows)) for _ in features_of(self.case, n)]
        for key, table in enumerate(of_key):
            if self.case.pooling == "none":
                span = slice(offsets[key * stride], offsets[(key + 1) * stride])
                parts.append(leaves[table][batch.values()[span].long()].flatten())
                continue
            bags = []
            for bag in range(key * stride, (key + 1) * stride):
                span = slice(offsets[bag], offsets[bag + 1])
                rows = leaves[table][batch.values()[span].long()]
                if weights is not None:
                    rows = rows * weights[span, None]
                total = rows.sum(dim=0)
                if self.case.pooling == "mean" and span.stop > span.start:
                    total = total / (span.stop - span.start)
                bags.append(total)
            dim = self.tables[table].shape[1]
            parts.append(torch.stack(bags) if bags else torch.zeros(0, dim, dtype=torch.float64))
        out = torch.cat(parts) if self.case.pooling == "none" else torch.cat(parts, dim=1)
        return out, weights, leaves

    def train(self, *steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Outputs of all ranks in each of the steps, and gradients of their weights; one update
        by the gradients of all."""
        outputs, weight_grads = [], []
        grads = [torch.zeros_like(table) for table in self.tables]
        touched = [torch.zeros(len(table), dtype=torch.bool) for table in self.tables]
        for step, rank in itertools.product(steps, range(self.case.ranks)):
            batch = batch_of(self.case, step, rank)
            out, weights, leaves = self.lookup(batch)
            outputs.append(out.detach())
            if out.requires_grad:
                out.backward(gradient_of(self.case, step, rank, out))
            weight_grads.append(None if weights is None else weights.grad)
            for n, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    grads[n] += leaf.grad / self.case.ranks
            offsets, stride = batch.offsets().tolist(), batch.stride()
            of_key = [n for n in range(len(self.case.rows)) for _ in features_of(self.case, n)]
            for key, table in enumerate(of_key):
                span = slice(offsets[key * stride], offsets[(key + 1) * stride])
                touched[table][batch.values()[span].long()] = True
        self.step_count += 1
        for n in range(len(self.tables)):
            self._update(n, grads[n], touched[n])
        return outputs, weight_grads

    def _update(self, n: int, grad: torch.Tensor, touched: torch.Tensor) -> None:
        optimizer = optimizer_of(self.case, n)
        kind, options = optimizer.kind, SETTINGS[optimizer.kind]
        w, state, lr = self.tables[n], self.states[n], self.rate * optimizer.lr
        keep = touched[:, None]
        if kind in ("sgd", "momentum_sgd"):
            grad = grad + optimizer.weight_decay * w
        if kind == "sgd":
            change = lr * grad
        elif kind == "momentum_sgd":
            state["m"] = torch.where(
                keep, options["momentum"] * state.get("m", torch.zeros_like(w)) + grad,
                state.get("m", torch.zeros_like(w)),
            )  # fmt: skip
            change = lr * state["m"]
        elif kind in ("adagrad", "rowwise_adagrad"):
            square = grad**2
            if kind == "rowwise_adagrad":
                square = square.mean(dim=1, keepdim=True)
            state["m"] = state.get("m", torch.zeros_like(square)) + square * keep
            change = lr * grad / (state["m"].sqrt() + options["eps"])
        elif kind in ("adam", "partial_rowwise_adam"):
            square = grad**2
            if kind == "partial_rowwise_adam":
                square = square.mean(dim=1, keepdim=True)
            m = state.get("m", torch.zeros_like(grad))
            v = state.get("v", torch.zeros_like(square))
            state["m"] = torch.where(keep, 0.9 * m + 0.1 * grad, m)
            state["v"] = torch.where(keep, 0.999 * v + 0.001 * square, v)
            t = self.step_count
            change = (
                lr * (state["m"] / (1 - 0.9**t))
                / ((state["v"] / (1 - 0.999**t)).sqrt() + options["eps"])
            )  # fmt: skip
        else:
            return
        self.tables[n] = torch.where(keep, w - change, w)


def start(case: Case, plan: Plan, group, **options):
    """An engine whose tables have their initial values."""
    options = {"weighted": case.weighted, "deadline_seconds": 20.0} | options
    engine = EmbeddingEngine(plan, module_tables(case), group=group, **options)
    mine = [n for n in range(len(case.rows)) if n % engine.ranks == engine.rank]
    engine.write_rows([RowBlock(n, 0, initial(case, n)) for n in mine])
    return engine


def prepare(engine: EmbeddingEngine, case: Case, batch: Any) -> PreparedBatch:
    """A batch whose rows are numbered if the case says so; by itself that is only so where there
    are many accesses of few rows."""
    if not case.numbered:
        return engine.prepare(batch)
    with mock.patch.object(sort, "ROWS_PER_ACCESS", 10**9):
        made = engine.prepare(batch)
    assert isinstance(made.rows, NumberedRows if len(made.addresses) else Runs)
    return made


def run_case(rank: int, group, case: Case, plan: Plan, nodes=None) -> dict:
    """What a rank of the runtime computes for a case: to be compared with Reference."""
    engine = start(case, plan, group, nodes=nodes)
    outputs, weight_grads = [], []
    for step in range(case.steps):
        batch = batch_of(case, step, rank)
        if case.weighted:
            batch.weights().requires_grad_()
        out = engine.lookup(prepare(engine, case, batch))
        outputs.append(out.detach().clone())
        out.backward(gradient_of(case, step, rank, out))
        weight_grads.append(batch.weights().grad if case.weighted else None)
    tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    counted = engine.counters.to_dict()
    assert engine.unequal_replicas() == []
    engine.close()
    return {"outputs": outputs, "weight_grads": weight_grads, "tables": tables, "counted": counted}
