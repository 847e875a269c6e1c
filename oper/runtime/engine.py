"""Embedding: all tables of a module as one distributed shared memory, and a training step on it.

The paper's §5, on one rank of M. A batch's ids become addresses, which are sorted by (bucket,
owner, slot), so that equal rows stand together: a RUN. Then

    forward    every bag's rows are read, by pointer where the owner shares this rank's memory
    backward   the gradients of each run are summed and sent home, and every row that was touched
               is updated once (gradients.py)

and four counters on the board order the ranks, each being the number of the step that it finished:

    marked      which replicas were touched stands in the bitmap
    published   the mailbox is written, and all rows of this step have been read
    reduced     this rank's slice of the replicas' gradients is summed
    applied     this rank's rows are updated: they may be read again, mailboxes may be overwritten
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.allreduce.replica_allreduce import ReplicaReduce
from oper.runtime.allreduce.replica_check import UnequalReplica, unequal_replicas
from oper.runtime.comm.all_to_all import AllToAll
from oper.runtime.comm.node import Node
from oper.runtime.comm.signals import Signals
from oper.runtime.memory import addresses
from oper.runtime.memory.heap import Heap
from oper.runtime.step import batch_checks, lookup_op
from oper.runtime.step.batch import FeatureSet, PreparedBatch
from oper.runtime.step.counters import Counters
from oper.runtime.step.gradients import Gradients
from oper.runtime.step.row_fetcher import RowFetcher
from oper.runtime.step.sort import Sorter
from oper.runtime.table_io import TableIO
from oper.runtime.tables.buckets import EmbeddingTable, make_buckets

BOUNDS = ("fatal", "warning", "ignore")
_WORDS = ("marked", "published", "reduced", "applied", "met")


class EmbeddingEngine:
    """The tables of one module on this rank of `group`, placed by `plan`.

    `nodes` overrides which ranks share memory, by a number a rank; `bounds` says what ids out of
    range do: "fatal", "warning" or "ignore", the last two reading row 0, as FBGEMM does.
    `gradient_scale` multiplies all gradients: TorchRec divides by the number of ranks.
    """

    def __init__(
        self,
        plan: Plan,
        tables: Sequence[EmbeddingTable],
        *,
        group: dist.ProcessGroup | None = None,
        weighted: bool = False,
        bounds: str = "fatal",
        nodes: Sequence[int] | None = None,
        deadline_seconds: float = 60.0,
        gradient_scale: float | None = None,
        check_gradients: bool = False,
    ) -> None:
        if bounds not in BOUNDS:
            raise OperError(f"bounds {bounds!r}: one of {', '.join(BOUNDS)} was needed")
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.plan, self.tables, self.weighted = plan, tuple(tables), weighted
        self.bounds, self.check_gradients = bounds, check_gradients
        self._group = group
        self.node = Node.join(group, deadline_seconds, nodes)
        self.rank, self.ranks = self.node.rank, self.node.ranks
        self.gradient_scale = 1 / self.ranks if gradient_scale is None else gradient_scale
        try:
            self._agree()
            self.training = plan.workload.training
            self.buckets = make_buckets(plan, self.tables)
            self.features = FeatureSet(plan, self.tables, self.buckets)
            self.board = Signals(self.node, _WORDS)
            self.counters = Counters(self.ranks)
            self._sorter = Sorter(self.node, len(self.buckets))
            self._allocate()
            self.map = addresses.runtime_map(plan, self.rank)
        except BaseException as error:
            self.node.fail(error)
            self.node.close()
            raise
        self.anchor = torch.nn.Parameter(torch.empty(0), requires_grad=self.training)
        self._number = lookup_op.register(self)
        self._process = os.getpid()
        self._meetings = 0
        self._closed = False
        self.before_use: Callable[[], None] | None = None

    def _agree(self) -> None:
        """All ranks compare what they were given before any judges it: so all judge alike."""
        settings = [(t.index, t.features, t.pooling, t.optimizer) for t in self.tables]
        given = repr((settings, self.weighted, self.gradient_scale)).encode()
        self.node.agree(addresses.plan_digest(self.plan), "plan")
        self.node.agree(given, "tables and optimizers")
        if self.ranks != self.plan.ranks:
            alone = self.node.group is None and not dist.is_initialized()
            raise OperError(
                f"the plan is for {self.plan.ranks} ranks, and {self.ranks} "
                + ("is running without a process group" if alone else "are running")
                + f"; plan for as many (--topology), or start {self.plan.ranks}"
                + (" and call torch.distributed.init_process_group first" if alone else "")
            )
        if self.plan.workload.training:
            addresses.check_trainable(self.plan)

    def _allocate(self) -> None:
        layout = self.plan.layout
        widths = len(layout.slots)
        row_bytes, state_bytes = [0] * widths, [0] * widths
        for table, width in zip(self.plan.tables, layout.width_of_table, strict=True):
            row_bytes[width] = table.row_bytes
        for bucket in self.buckets:
            needed = bucket.optimizer.state_bytes(bucket.dim)
            state_bytes[bucket.width] = max(state_bytes[bucket.width], needed)
        self.heap = Heap(self.node, layout.slots, row_bytes, state_bytes)
        self.exchange = None
        if self.node.group is not None and len(self.node.peers) < self.ranks:
            self.exchange = AllToAll(self.node.group)
        self.sources = RowFetcher(
            self.heap, self.buckets, self.node, self.plan.workload.fetch, self.exchange
        )
        self.rows_io = TableIO(
            self.plan, self.tables, self.buckets, self.heap, self.node, self.exchange
        )
        self.gradients = self._make_gradients() if self.training else None

    def _make_gradients(self) -> Gradients:
        replicas = None
        slots = [self._replica_slots(b.tables if b.trained else ()) for b in self.buckets]
        if any(map(len, slots)):
            replicas = ReplicaReduce(
                self.plan.allreduce_method,
                self.node,
                self.board,
                [(part, bucket.dim) for part, bucket in zip(slots, self.buckets, strict=True)],
            )
        return Gradients(
            self.buckets,
            self.heap,
            self.node,
            self.board,
            self.exchange,
            replicas,
            self.counters,
            self.gradient_scale,
        )

    def _replica_slots(self, tables: Iterable[int]) -> torch.Tensor:
        """Of tables of the module that share a width."""
        planned = (self.tables[n].index for n in tables)
        return torch.from_numpy(addresses.replica_slots(self.plan.layout, planned))

    # A batch.

    def prepare(self, batch: Any) -> PreparedBatch:
        """Translate and sort a KeyedJaggedTensor; may be done a batch ahead of its lookup."""
        self._check_usable()
        with self._telling_peers():
            one_each = batch_checks.check_batch(batch, self.weighted)
            order = self.features.order(batch.keys())
            if order is not None:
                batch = batch.permute(order)
                one_each = one_each or batch_checks.has_one_id_each(batch)
            keys, values, samples = tuple(batch.keys()), batch.values(), int(batch.stride())
            segment_offset, offsets = torch.arange(len(keys) + 1) * samples, None
            if not one_each:
                offsets = batch.offsets().contiguous()
                segment_offset = offsets[::samples].to(torch.int64).contiguous()
            found = self._translate(keys, values, segment_offset)
            trains = self.training and torch.is_grad_enabled()
            every_run = self.sources.needs_runs
            descriptors, elements = self.features.describe(
                keys, samples, segment_offset, trained_only=not every_run
            )
            runs = None
            if trains or every_run:
                runs = self._sorter.sort(found, segment_offset, descriptors, at_once=every_run)
            pooled = self.features.pooled
            return PreparedBatch(
                found,
                segment_offset,
                offsets if pooled else None,
                batch.weights().float().contiguous() if self.weighted else None,
                descriptors,
                elements,
                runs,
                samples,
                keys,
            )

    def lookup(self, batch: PreparedBatch) -> torch.Tensor:
        """Pooled: [samples, columns]. Unpooled: flat, each feature's [n, dim] one after another."""
        if self.before_use is not None:
            self.before_use()
        out = lookup_op.lookup(self.anchor, batch, self._number)
        return out.view(batch.samples, self.features.columns) if self.features.pooled else out

    def __call__(self, batch: Any) -> torch.Tensor:
        """Prepare and look up."""
        return self.lookup(self.prepare(batch))

    # What lookup_op calls.

    def read(self, batch: PreparedBatch) -> torch.Tensor:
        """The output of a batch, flat; rows are those after all steps so far."""
        self._check_usable()
        with self._telling_peers():
            if self.training:
                self.board.wait("applied", self.steps, "update its rows")
            else:
                self.heap.seal()
            if self.sources.needs_runs:
                self._count_distinct(batch)
            return self.sources.read(batch, self.counters)

    def train(
        self, batch: PreparedBatch, grad: torch.Tensor, weights_too: bool
    ) -> torch.Tensor | None:
        """One step from the gradient of a batch's output; the gradient of its weights, if asked.
        In inference nothing is trained, and weights have gradients all the same."""
        self._check_usable()
        with self._telling_peers():
            if self.check_gradients:
                where = f"rank {self.rank}, step {self.steps + 1}"
                batch_checks.check_finite(batch, grad, self.features.features, where)
            if self.gradients is not None and batch.runs is None:
                given = (batch.addresses, batch.segment_offset, batch.features)
                batch = replace(batch, sort=self._sorter.sort(*given, at_once=True))
            if not self.sources.needs_runs:
                self._count_distinct(batch)
            weight_grad = self.sources.weight_gradients(batch, grad) if weights_too else None
            if self.gradients is not None:
                self.gradients.step(batch, grad)
            return weight_grad

    # Training, of an engine whose plan is for it.

    @property
    def steps(self) -> int:
        """Updates of this engine."""
        return self.gradients.steps if self.gradients else 0

    @property
    def optimizer_steps(self) -> int:
        """The same, counted on from a checkpoint."""
        return self._trained.optimizer_steps

    @optimizer_steps.setter
    def optimizer_steps(self, value: int) -> None:
        self._trained.optimizer_steps = value

    @property
    def learning_rates(self) -> list[float]:
        """Of each bucket, to be set."""
        return self._trained.learning_rates

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside hold their gradients back; the next one outside adds them."""
        with self._trained.accumulate():
            yield

    @property
    def _trained(self) -> Gradients:
        if self.gradients is None:
            raise OperError(addresses.NOT_FOR_TRAINING)
        return self.gradients

    # Rows of tables, for initial values and checkpoints.

    @property
    def shared_bytes(self) -> dict[str, int]:
        """Of this rank's shared memory: its heap, and in training its mailbox and its part of the
        replicas' AllReduce, both as the largest batch so far made them."""
        return {"heap": self.heap.bytes, **(self.gradients.shared_bytes if self.gradients else {})}

    def meet(self) -> None:
        """Wait for all ranks, which is to be called on all."""
        self._meetings += 1
        self.board.post("met", self._meetings)
        self.board.wait("met", self._meetings, "come to read or write tables")
        if self.exchange is not None:
            self.exchange.meet("come to read or write tables")

    def read_rows(
        self, requests: Sequence[tuple[int, int, int]], state: str | None = None
    ) -> list[torch.Tensor]:
        """Rows [first, first + count) of tables, float32 [count, dim], or of a state of their
        optimizer. To be called on all ranks, each with (table, first, count) of its own."""
        self._check_usable()
        with self._telling_peers(together=True):
            self.meet()
            found = self.rows_io.read(requests, state)
            self.meet()
            return found

    def write_rows(
        self, entries: Sequence[tuple[int, int, torch.Tensor]], state: str | None = None
    ) -> None:
        """The reverse: (table, first, values); all copies of a row are written."""
        self._check_usable()
        with self._telling_peers(together=True):
            self.meet()
            with self.heap.writable():
                self.rows_io.write(entries, state)
            self.meet()

    def unequal_replicas(self) -> list[UnequalReplica]:
        """Replicas whose copies, or their optimizer state, differ between ranks: none, unless
        something else wrote to the heap. To be called on all ranks; the parts are rows and states
        of each width in turn, slots count the width's replicas."""
        self.meet()
        layout, parts = self.plan.layout, []
        for width in range(len(layout.slots)):
            tables = np.flatnonzero(layout.width_of_table == width)
            slots = torch.from_numpy(addresses.replica_slots(layout, tables))
            parts += [self.heap.rows(width)[slots], self.heap.state(width)[slots]]
        return unequal_replicas(parts, self.node.group)

    def fail(self, error: BaseException) -> None:
        """Let all ranks that wait for this one, now or later, raise for this error: also in the
        group's other engines, as of a model's other collections, to which it comes no more."""
        for engine in lookup_op.engines():
            if engine is self or (self._group is not None and engine._group is self._group):
                engine.board.fail(error)

    def close(self) -> None:
        """Leave the other ranks. Memory is given back with the last reference to this engine."""
        self._closed = True
        self.node.close()

    # Checks.

    def _translate(
        self, keys: tuple[str, ...], values: torch.Tensor, segment_offset: torch.Tensor
    ) -> torch.Tensor:
        lookups = self.features.lookups(keys)
        planned = [self.tables[f.table].index for f in lookups]
        numbers = torch.tensor(planned)
        try:
            return self.map.translate_features(values, segment_offset, numbers)
        except OperError:
            tables = [self.plan.tables[n] for n in planned]
            known = list(zip(lookups, tables, strict=True))
            values = batch_checks.mend_ids(values, segment_offset, known, self.rank, self.bounds)
            return self.map.translate_features(values, segment_offset, numbers)

    def _count_distinct(self, batch: PreparedBatch) -> None:
        """Where the runs are needed anyway: not before, as they may still be sorted."""
        if batch.runs is not None and len(batch.runs[0]) == len(batch.addresses):
            self.counters.add(distinct_rows=len(batch.runs[2]))

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise OperError(
                f"process {os.getpid()} was forked from {self._process} after the tables were "
                "sharded, and cannot use them; start workers first, or use spawn"
            )
        if self._closed:
            raise OperError("the tables were given back by close(), and cannot be used any more")

    @contextmanager
    def _telling_peers(self, together: bool = False) -> Iterator[None]:
        """What fails here fails on all ranks, at their next wait. In inference ranks wait only for
        what all do `together`, and a request that is wrong is nobody else's. One rank alone goes
        on: its tables can be saved after a batch that was wrong."""
        try:
            yield
        except BaseException as error:
            if self.ranks > 1 and (self.training or together):
                self.fail(error)
            raise
