"""Training in which each row says which updates it contains, as ranks do it in the tests.

Every rank's update of every step has a column of its own in the rows, by which it moves no other.
So a row that was read is compared with the updates of all earlier steps, whatever any counter says.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import RowBlock
from oper.runtime.tables.optimizer_buckets import EmbeddingTable
from oper.runtime.tables.optimizers import Optimizer
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.training.cached_rows import source_of
from oper.tables.table import Table

ROWS = 40


@dataclass(frozen=True)
class Steps:
    """Steps of some ranks. In some of them another batch is looked up: `untrained` before the
    step's own, `evaluated` without gradients, `late` between its forward and its backward."""

    seed: int
    ranks: int
    steps: int
    skew: float = 2.0
    untrained: tuple[int, ...] = ()
    evaluated: tuple[int, ...] = ()
    late: tuple[int, ...] = ()

    @property
    def table(self) -> Table:
        """A column for each rank and step."""
        return Table("t", ROWS, self.ranks * self.steps, features=("f",))

    def column(self, step: int, rank: int) -> int:
        return step * self.ranks + rank

    def rows(self, step: int, rank: int, number: int = 0) -> np.ndarray:
        """The rows of a batch: of a step its first, or another one."""
        random = np.random.default_rng((self.seed, step, rank, number))
        return (ROWS * random.random(random.integers(0, 9)) ** self.skew).astype(np.int64)


Read = tuple[int, int, np.ndarray]  # of a step the batch `number`, and what its rows contained


def train(
    rank: int, group: Any, case: Steps, plan: Plan, settings: CacheSettings
) -> tuple[list[Read], dict[str, list[int]]]:
    """What each batch read, bool [rows of it, columns]; and what was counted."""
    from torchrec import KeyedJaggedTensor

    tables = [EmbeddingTable(0, ("f",), "none", Optimizer("sgd", lr=1.0))]
    engine = EmbeddingEngine(
        plan, tables, group=group, deadline_seconds=60.0, make_source=source_of(settings)
    )
    dim = case.table.dim
    engine.write_rows([RowBlock(0, 0, torch.zeros(ROWS, dim))] if rank == 0 else [])
    reads: list[Read] = []

    def look_up(step: int, number: int = 0) -> torch.Tensor:
        rows = torch.from_numpy(case.rows(step, rank, number))
        lengths = torch.ones(len(rows), dtype=torch.int32)
        found = engine(KeyedJaggedTensor(["f"], rows, lengths=lengths)).view(lengths.numel(), dim)
        if torch.is_grad_enabled():
            reads.append((step, number, found.detach().numpy() != 0))
        return found

    for step in range(case.steps):
        if step in case.untrained:
            look_up(step, 1)
        out = look_up(step)
        if step in case.evaluated:
            with torch.no_grad():
                look_up(step, 2)
        if step in case.late:
            look_up(step, 3)
        grad = torch.zeros_like(out)
        grad[:, case.column(step, rank)] = 1
        out.backward(grad)
    assert engine.source is not None
    counted = engine.source.to_dict()
    engine.close()
    return reads, counted


def lacking(case: Steps, found: list[list[Read]]) -> tuple[list[int], list[int]]:
    """How many distinct rows of each rank's batches lacked an update of an earlier step, and the
    most that one of them lacked. `found` are the ranks' reads."""
    wrong, most = [0] * case.ranks, [0] * case.ranks
    for rank, reads in enumerate(found):
        for step, number, contents in reads:
            due = updates_before(case, step)
            rows = case.rows(step, rank, number)
            for row, contained in dict(zip(rows, contents, strict=True)).items():
                got = set(np.flatnonzero(contained).tolist())
                assert got <= due[row]
                wrong[rank] += got != due[row]
                most[rank] = max(most[rank], len(due[row] - got))
    return wrong, most


def updates_before(case: Steps, step: int) -> dict[int, set[int]]:
    """The columns of the updates that each row had in the steps before one."""
    columns: dict[int, set[int]] = defaultdict(set)
    for earlier in range(step):
        for rank in range(case.ranks):
            for row in case.rows(earlier, rank).tolist():
                columns[row].add(case.column(earlier, rank))
    return columns
