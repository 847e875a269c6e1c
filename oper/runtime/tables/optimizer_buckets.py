"""The tables of one embedding module, and the buckets by which its rows are sorted and updated.

A BUCKET is a set of tables of equal width, dtype, dim and optimizer: their rows lie in the same
arenas, one under the other, and one call updates all touched rows. Pooled tables are in buckets of
their own, because only their bags go to other nodes. Trained tables of the tier come last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oper.plan.plan import Plan
from oper.runtime.tables.optimizers import Optimizer

TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

NO_OPTIMIZER = Optimizer("none")


@dataclass(frozen=True)
class EmbeddingTable:
    """A table as a module trains it: `index` is its number in the plan, which knows its size."""

    index: int
    features: tuple[str, ...]
    pooling: str  # "sum", "mean" or "none"
    optimizer: Optimizer = NO_OPTIMIZER


@dataclass(frozen=True)
class Bucket:
    """Tables whose rows are sorted and updated together. `tables` are the module's, by number."""

    tables: tuple[int, ...]
    width: int
    dtype: str
    dim: int
    optimizer: Optimizer
    tier: bool = False
    pooled: bool = False  # read as bags if the rows are on other nodes

    @property
    def trained(self) -> bool:
        return self.optimizer.kind != "none"

    @property
    def states(self) -> set[str]:
        """The names of the states of the bucket's optimizer."""
        return {state.name for state in self.optimizer.states}


def make_buckets(plan: Plan, tables: Sequence[EmbeddingTable]) -> tuple[Bucket, ...]:
    """Return the buckets of a module's tables, in the order of their first tables, the tier's
    last."""
    tables_with: dict[tuple[int, str, int, Optimizer, bool, bool], list[int]] = {}
    for number, table in enumerate(tables):
        planned = plan.tables[table.index]
        width = int(plan.layout.width_of_table[table.index])
        trained = plan.workload.training
        optimizer = table.optimizer.for_rows(planned.dtype) if trained else NO_OPTIMIZER
        tier = table.index in plan.tier and optimizer.kind != "none"
        pooled = planned.name in plan.pooled_tables and table.pooling != "none"
        key = (width, planned.dtype, planned.dim, optimizer, tier, pooled)
        tables_with.setdefault(key, []).append(number)
    buckets = [Bucket(tuple(members), *key) for key, members in tables_with.items()]
    return tuple(sorted(buckets, key=lambda bucket: bucket.tier))
