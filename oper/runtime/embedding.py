"""Embedding: all tables of a module as one distributed shared memory, and a training step on it.

The paper's §5, on one rank of M. A batch's ids become addresses, which are sorted by (bucket,
owner, slot), so that equal rows stand together: a RUN. Then

    forward    every bag's rows are read, by pointer where the owner shares this rank's memory
    backward   the gradients of each run are summed into this rank's mailbox (mailbox.py); owners
               merge what all mailboxes hold for them and update each row once; replicas go
               through the sparse AllReduce (sparse_allreduce.py) and are updated on every rank

and four counters on the board order the ranks, each being the number of the step that it finished:

    marked      which replicas were touched stands in the bitmap
    published   the mailbox is written, and all rows of this step have been read
    reduced     this rank's slice of the replicas' gradients is summed
    applied     this rank's rows are updated: they may be read again, mailboxes may be overwritten
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oper import native
from oper.errors import OperError
from oper.plan import Plan
from oper.runtime import addresses, checks, lookup_op
from oper.runtime.batch import Batch, FeatureSet
from oper.runtime.board import Board
from oper.runtime.counters import Counters
from oper.runtime.exchange import Exchange
from oper.runtime.features import DTYPE_CODE
from oper.runtime.gathered import Gathered, hold
from oper.runtime.heap import Heap
from oper.runtime.mailbox import Mailboxes
from oper.runtime.node import Node
from oper.runtime.replica_check import UnequalReplica, unequal_replicas
from oper.runtime.rows_io import RowsIO
from oper.runtime.sources import Sources
from oper.runtime.sparse_allreduce import ReplicaReduce
from oper.runtime.tables import EmbeddingTable, make_buckets

BOUNDS = ("fatal", "warning", "ignore")
_WORDS = ("marked", "published", "reduced", "applied", "met")


class Embedding:
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
            self.board = Board(self.node, _WORDS)
            self._allocate(group)
        except BaseException:
            self.node.close()  # tells the others
            raise
        self.counters = Counters(self.ranks)
        self.learning_rates = [bucket.optimizer.lr for bucket in self.buckets]
        self.steps = 0  # of this engine
        self.optimizer_steps = 0  # the same, unless loaded from a checkpoint
        self.map = addresses.runtime_map(plan, self.rank)
        self.anchor = torch.nn.Parameter(torch.empty(0), requires_grad=self.training)
        self._number = lookup_op.register(self)
        self._process = os.getpid()
        self._accumulating = False
        self._held: Gathered | None = None
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
            raise OperError(
                f"the plan is for {self.plan.ranks} ranks, and {self.ranks} are running; plan for "
                f"{self.ranks} ranks (--topology), or start {self.plan.ranks}"
            )
        if self.plan.workload.training:
            addresses.check_trainable(self.plan)

    def _allocate(self, group: dist.ProcessGroup | None) -> None:
        layout = self.plan.layout
        widths = len(layout.slots)
        row_bytes, state_bytes = [0] * widths, [0] * widths
        for table, width in zip(self.plan.tables, layout.width_of_table, strict=True):
            row_bytes[width] = table.row_bytes
        for bucket in self.buckets:
            needed = bucket.optimizer.state_bytes(bucket.dim)
            state_bytes[bucket.width] = max(state_bytes[bucket.width], needed)
        self.heap = Heap(self.node, layout.slots, row_bytes, state_bytes)
        unmapped = len(self.node.peers) < self.ranks
        self.exchange = (
            Exchange(group, self.ranks, self.node.deadline_seconds) if unmapped else None
        )
        self.sources = Sources(
            self.heap, self.buckets, self.node, self.plan.workload.fetch, self.exchange
        )
        self.rows_io = RowsIO(
            self.plan, self.tables, self.buckets, self.heap, self.node, self.exchange
        )
        self.mailboxes: Mailboxes | None = None
        self.replicas: ReplicaReduce | None = None
        if self.training:
            self.mailboxes = Mailboxes(self.node, [bucket.dim for bucket in self.buckets])
            top = [slots[-1] + 1 if len(slots) else 0 for slots in addresses.replica_slots(layout)]
            if any(top):
                self.replicas = ReplicaReduce(
                    self.plan.figures["allreduce_method"],
                    self.node,
                    self.board,
                    [(int(top[b.width]) * b.trained, b.dim) for b in self.buckets],
                    group,
                )

    # A batch.

    def prepare(self, batch: Any) -> Batch:
        """Translate and sort a KeyedJaggedTensor; may be done a batch ahead of its lookup."""
        self._check_usable()
        with self._telling_peers():
            checks.check_batch(batch, self.weighted)
            order = self.features.order(batch.keys())
            if order is not None:
                batch = batch.permute(order)
            keys, values = tuple(batch.keys()), batch.values()
            samples, offsets = int(batch.stride()), batch.offsets().contiguous()
            one_each = native.ops().one_per_bag(offsets)
            segment_offset = offsets[:: samples or 1].to(torch.int64).contiguous()
            if not samples:
                segment_offset = torch.zeros(len(keys) + 1, dtype=torch.int64)
            found = self._translate(keys, values, segment_offset)
            trains = self.training and torch.is_grad_enabled()
            every_run = self.sources.needs_runs
            descriptors, elements = self.features.describe(
                keys, samples, segment_offset, trained_only=not every_run
            )
            runs = None
            if trains or every_run:
                runs = native.ops().sort_accesses(
                    found, segment_offset, descriptors, self.rank, self.ranks, len(self.buckets)
                )
            pooled = self.features.pooled
            return Batch(
                found,
                segment_offset,
                offsets if pooled and not one_each else None,
                batch.weights().float().contiguous() if self.weighted else None,
                descriptors,
                elements,
                runs,
                samples,
                keys,
            )

    def lookup(self, batch: Batch) -> torch.Tensor:
        """Pooled: [samples, columns]. Unpooled: flat, each feature's [n, dim] one after another."""
        if self.before_use is not None:
            self.before_use()
        out = lookup_op.lookup(self.anchor, batch, self._number)
        return out.view(batch.samples, self.features.columns) if self.features.pooled else out

    def __call__(self, batch: Any) -> torch.Tensor:
        """Prepare and look up."""
        return self.lookup(self.prepare(batch))

    # What lookup_op calls.

    def read(self, batch: Batch) -> torch.Tensor:
        """The output of a batch, flat; rows are those after all steps so far."""
        self._check_usable()
        if not self.training:
            self.heap.seal()
            return self.sources.read(batch, self.counters)
        with self._telling_peers():
            self.board.wait("applied", self.steps, "update its rows")
            return self.sources.read(batch, self.counters)

    def train(self, batch: Batch, grad: torch.Tensor, weights_too: bool) -> torch.Tensor | None:
        """One step from the gradient of a batch's output; the gradient of its weights, if asked.
        In inference nothing is trained, and weights have gradients all the same."""
        self._check_usable()
        with self._telling_peers():
            if self.check_gradients:
                where = f"rank {self.rank}, step {self.steps + 1}"
                checks.check_finite(batch, grad, self.features.features, where)
            weight_grad = self.sources.weight_gradients(batch, grad) if weights_too else None
            if self.training:
                self._step(batch, grad)
            return weight_grad

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside hold their gradients back; the next one outside adds them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _step(self, batch: Batch, grad: torch.Tensor) -> None:
        assert self.mailboxes is not None
        if batch.runs is None:
            raise OperError(
                "backward of a batch that was prepared without gradients; prepare it with "
                "gradients enabled"
            )
        step = self.steps + 1
        if self._accumulating or self._held is not None:
            gathered = hold(self._held, batch, grad, self.buckets, self.ranks, self.gradient_scale)
            self._held = gathered if self._accumulating else None
            if self._accumulating:
                return
            run_slot, run_count = gathered.run_slot, gathered.run_count
        else:
            gathered = None
            run_slot, run_count = batch.runs[2], batch.runs[3]
        prefix = run_count.tolist()
        codes = self.ranks + 1
        first = [
            (prefix[b * codes], prefix[b * codes + bucket.trained])
            for b, bucket in enumerate(self.buckets)
        ]
        if self.replicas is not None:
            self.replicas.begin(step, [run_slot[a:b] for a, b in first])
        self.board.wait("applied", self.steps, "update its rows")
        rows = self.mailboxes.open(run_count, run_slot)
        for b, out in enumerate(rows):
            if gathered is not None:
                out.copy_(gathered.grads[b])
            elif self.buckets[b].trained:
                self._sum(batch, grad, prefix[b * codes], prefix[(b + 1) * codes], b, out)
        if self.replicas is not None:
            grads = [out[: b - a] for out, (a, b) in zip(rows, first, strict=True)]
            self.replicas.contribute(step, grads)
        self._count_gradients(prefix)
        self._publish_and_apply(step, rows, run_slot, prefix)

    def _sum(
        self,
        batch: Batch,
        grad: torch.Tensor,
        first: int,
        last: int,
        bucket: int,
        out: torch.Tensor,
    ) -> None:
        assert batch.runs is not None
        native.ops().sum_gradients(
            grad,
            batch.runs[0],
            batch.runs[1],
            first,
            last,
            batch.offsets,
            batch.weights,
            batch.features,
            batch.segment_offset,
            self.buckets[bucket].dim,
            self.gradient_scale,
            out,
        )

    def _publish_and_apply(
        self, step: int, rows: list[torch.Tensor], run_slot: torch.Tensor, prefix: list[int]
    ) -> None:
        assert self.mailboxes is not None
        self.board.post("published", step)
        sent = self._exchange_gradients(rows, run_slot, prefix)
        self.board.wait("published", step, "send its gradients")
        if self.replicas is not None:
            self.replicas.reduce(step)
        self.optimizer_steps += 1
        lists: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.buckets]
        for rank in range(self.ranks):
            mapped = rank in self.node.peers
            found = self.mailboxes.read(rank, 1 + self.rank) if mapped else sent[rank]
            for b, part in enumerate(found):
                if len(part[0]):
                    lists[b].append(part)
        for b, parts in enumerate(lists):
            self._update(b, parts)
        if self.replicas is not None:
            for b, part in enumerate(self.replicas.result(step)):
                self._update(b, [part])
            self.counters.add(allreduce_bytes=self.replicas.bytes)
        self.steps = step
        self.counters.add(steps=1)
        self.board.post("applied", step)

    def _exchange_gradients(
        self, rows: list[torch.Tensor], run_slot: torch.Tensor, prefix: list[int]
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """What ranks that share no memory with this one have for it, by rank and bucket."""
        received: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(self.ranks)]
        if self.exchange is None:
            return received
        codes = self.ranks + 1
        for b, out in enumerate(rows):
            slots, grads = [], []
            for rank in range(self.ranks):
                first, last = prefix[b * codes + 1 + rank : b * codes + 3 + rank]
                if rank in self.node.peers:
                    last = first
                slots.append(run_slot[first:last])
                grads.append(out[first - prefix[b * codes] : last - prefix[b * codes]])
            doing = f"while they exchanged gradients (step {self.steps + 1})"
            slots, grads = self.exchange.send(slots, doing), self.exchange.send(grads, doing)
            for rank in range(self.ranks):
                received[rank].append((slots[rank], grads[rank]))
        return received

    def _update(self, b: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        bucket = self.buckets[b]
        if not parts or not bucket.trained:
            return
        updated = native.ops().update_rows(
            [slots for slots, _ in parts],
            [grads for _, grads in parts],
            self.heap.rows(bucket.width),
            self.heap.state(bucket.width),
            bucket.dim,
            DTYPE_CODE[bucket.dtype],
            bucket.optimizer.kind,
            bucket.optimizer.settings(self.learning_rates[b], self.optimizer_steps),
        )
        self.counters.add(updated_rows=updated)

    def _count_gradients(self, prefix: list[int]) -> None:
        runs = np.diff(prefix).reshape(len(self.buckets), self.ranks + 1)
        dims = np.array([bucket.dim for bucket in self.buckets])
        self.counters.add(
            gradient_rows=runs[:, 1:].sum(axis=0), gradient_bytes=4 * dims @ runs[:, 1:]
        )

    # Rows of tables, for initial values and checkpoints.

    def meet(self) -> None:
        """Wait for all ranks, which is to be called on all."""
        self._meetings += 1
        self.board.post("met", self._meetings)
        self.board.wait("met", self._meetings, "come to read or write tables")
        if self.exchange is not None:
            self.exchange.meet("while they read or wrote tables")

    def read_rows(
        self, requests: Sequence[tuple[int, int, int]], state: str | None = None
    ) -> list[torch.Tensor]:
        """Rows [first, first + count) of tables, float32 [count, dim], or of a state of their
        optimizer. To be called on all ranks, each with (table, first, count) of its own."""
        self._check_usable()
        with self._telling_peers():
            self.meet()
            found = self.rows_io.read(requests, state)
            self.meet()
            return found

    def write_rows(
        self, entries: Sequence[tuple[int, int, torch.Tensor]], state: str | None = None
    ) -> None:
        """The reverse: (table, first, values); all copies of a row are written."""
        self._check_usable()
        with self._telling_peers():
            self.meet()
            with self.heap.writable():
                self.rows_io.write(entries, state)
            self.meet()

    def unequal_replicas(self) -> list[UnequalReplica]:
        """Replicas whose copies, or their optimizer state, differ between ranks: none, unless
        something else wrote to the heap. To be called on all ranks; the parts are rows and states
        of each width in turn, slots count the width's replicas."""
        self.meet()
        parts = [
            arena[torch.from_numpy(slots)]
            for width, slots in enumerate(addresses.replica_slots(self.plan.layout))
            for arena in (self.heap.rows(width), self.heap.state(width))
        ]
        return unequal_replicas(parts, self._group)

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
            values = checks.mend_ids(values, segment_offset, known, self.rank, self.bounds)
            return self.map.translate_features(values, segment_offset, numbers)

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise OperError(
                f"process {os.getpid()} was forked from {self._process} after the tables were "
                "sharded, and cannot use them; start workers first, or use spawn"
            )
        if self._closed:
            raise OperError("the tables were given back by close(), and cannot be used any more")

    @contextmanager
    def _telling_peers(self) -> Iterator[None]:
        """What fails here fails on all ranks of the node, at their next wait. In inference ranks
        do not wait for each other, and a request that is wrong is nobody else's."""
        try:
            yield
        except BaseException as error:
            if self.training:
                self.board.fail(str(error) or type(error).__name__)
            raise
