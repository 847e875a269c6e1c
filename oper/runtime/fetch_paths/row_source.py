"""Row sources: the memories in which rows are read and updated in a step, if not in the heap.

Rows of the plan's devices are in the heap: they are read there, and their gradients go to their
owners by mailboxes (apply_gradients.py). Tables that the plan keeps in the tier may have another
source, such as the scheduler's caches; without it they are used as if they lay on devices. A source
has the last buckets of a module, from `first_bucket` on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from oper.base.arrays import Ints
from oper.plan.plan import Plan
from oper.runtime.comm.exchange import Exchange, exchange_of
from oper.runtime.comm.node import Node
from oper.runtime.fetch_paths.fetch_path import Fetched
from oper.runtime.memory.heap import Heap, TableMemory
from oper.runtime.memory.prepared_batch import PreparedBatch, SortedRows
from oper.runtime.tables.optimizer_buckets import Bucket, EmbeddingTable


class HeapPlaces(NamedTuple):
    """Places of n rows in the heap: the source's bucket, counted from 0, the owner, and the slot
    there, [n] each."""

    bucket: Ints
    owner: Ints
    slot: Ints


class Step(NamedTuple):
    """An optimizer's step: its number from 1, and the learning rate of each bucket."""

    number: int
    learning_rates: Sequence[float]


class RowSource(Protocol):
    """The rows of a module's last buckets. All calls are collective, in one order on all ranks."""

    def read(self, batch: PreparedBatch, heap: Fetched) -> Fetched:
        """Return the rows of a batch that may be trained; `heap` has those of all other tables."""

    def holds(self, batch: PreparedBatch) -> bool:
        """Return whether a batch that was read can be read again here, in its backward pass. If
        not, the heap is up to date."""

    def reread(self, batch: PreparedBatch, heap: Fetched) -> Fetched:
        """Return the rows of such a batch again; `heap` has those of all other tables."""

    def update(
        self, batch: PreparedBatch, rows: SortedRows, grads: Sequence[torch.Tensor], step: Step
    ) -> None:
        """Take a step by the gradients of `rows`, float32 [n, dim] for each of the source's
        buckets: those of the batch, or of several batches that were accumulated."""

    def settle(self) -> None:
        """Bring the heap up to date, before rows are read there."""

    def move(self, before: HeapPlaces, after: HeapPlaces) -> None:
        """Bring the heap up to date with rows that are about to move to other places there."""

    def forget(self) -> None:
        """Forget copies of rows: the heap has other values now."""

    def to_dict(self) -> dict[str, Any]:
        """Return the counters since the start, as JSON holds them."""


@dataclass(frozen=True)
class SourceParts:
    """The parts of an engine from which its source is made."""

    node: Node
    exchange: Exchange
    heap: Heap
    buckets: Sequence[Bucket]  # all; the source's are those from `first_bucket` on
    first_bucket: int
    rows: Sequence[int]  # of each bucket's tables
    names: Sequence[str]  # of the source's tables


MakeSource = Callable[[SourceParts], RowSource]


class NoSource:
    """The source of no buckets: all rows are in the heap."""

    def read(self, batch: PreparedBatch, heap: Fetched) -> Fetched:
        """See RowSource."""
        return heap

    def holds(self, batch: PreparedBatch) -> bool:
        """See RowSource."""
        return True

    def reread(self, batch: PreparedBatch, heap: Fetched) -> Fetched:
        """See RowSource."""
        return heap

    def update(
        self, batch: PreparedBatch, rows: SortedRows, grads: Sequence[torch.Tensor], step: Step
    ) -> None:
        """See RowSource."""

    def settle(self) -> None:
        """See RowSource."""

    def move(self, before: HeapPlaces, after: HeapPlaces) -> None:
        """See RowSource."""

    def forget(self) -> None:
        """See RowSource."""

    def to_dict(self) -> dict[str, Any]:
        """See RowSource."""
        return {}


def source_of_tier(
    make: MakeSource | None,
    plan: Plan,
    tables: Sequence[EmbeddingTable],
    memory: TableMemory,
) -> tuple[RowSource, int]:
    """Return the source that `make` makes of a module's tables in the tier, and the number of
    buckets whose rows are in the heap while they are trained: all, if none has another source. To
    be called on all ranks."""
    buckets = memory.buckets
    first = sum(not bucket.tier for bucket in buckets)
    if make is None or first == len(buckets):
        return NoSource(), len(buckets)
    rows = [sum(plan.tables[tables[n].index].rows for n in bucket.tables) for bucket in buckets]
    names = [plan.tables[tables[n].index].name for b in buckets[first:] for n in b.tables]
    exchange = exchange_of(memory.node, memory.signals)
    parts = SourceParts(memory.node, exchange, memory.heap, buckets, first, rows, names)
    return make(parts), first
