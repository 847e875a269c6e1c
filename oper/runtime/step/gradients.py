"""Gradients: one step of all tables, from the gradient of a lookup's output (§5.3).

The gradients of each run are summed into this rank's mailbox. Owners merge what all mailboxes hold
for them, in the order of ranks, and update each row once; replicas go through the sparse AllReduce
and are updated on every rank. Every sum has a fixed order, so that equal runs give equal bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from oper.base import native
from oper.runtime.allreduce.replica_allreduce import ReplicaReduce
from oper.runtime.comm.all_to_all import AllToAll
from oper.runtime.comm.node import Node
from oper.runtime.comm.signals import Signals
from oper.runtime.memory.heap import Heap
from oper.runtime.memory.mailbox import Mailboxes
from oper.runtime.step.accumulation import HeldGradients, hold
from oper.runtime.step.batch import PreparedBatch
from oper.runtime.step.counters import Counters
from oper.runtime.tables.buckets import Bucket
from oper.runtime.tables.kernel_structs import DTYPE_CODE

Part = tuple[torch.Tensor, torch.Tensor]  # slots [n], ascending, and gradients [n, dim]


class Gradients:
    """The training of one engine's buckets; `replicas` is None where there are none.

    `steps` counts this engine's; `optimizer_steps` too, unless it was loaded from a checkpoint.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        heap: Heap,
        node: Node,
        board: Signals,
        exchange: AllToAll | None,
        replicas: ReplicaReduce | None,
        counters: Counters,
        scale: float,
    ) -> None:
        self._buckets, self._heap, self._node, self._board = buckets, heap, node, board
        self._exchange, self._replicas = exchange, replicas
        self._counters, self._scale = counters, scale
        self._codes = node.ranks + 1
        self.mailboxes = Mailboxes(node, [bucket.dim for bucket in buckets])
        self.learning_rates = [bucket.optimizer.lr for bucket in buckets]
        self.steps = self.optimizer_steps = 0
        self._accumulating = False
        self._held: HeldGradients | None = None

    @property
    def shared_bytes(self) -> dict[str, int]:
        """Of this rank's shared memory: what a step's gradients pass through."""
        allreduce = 0 if self._replicas is None else self._replicas.shared_bytes
        return {"mailbox": self.mailboxes.bytes, "allreduce": allreduce}

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Steps inside hold their gradients back; the next one outside adds them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def step(self, batch: PreparedBatch, grad: torch.Tensor) -> None:
        """Take the optimizer's step from the gradient of a batch's output, flat."""
        assert batch.runs is not None
        gathered = None
        run_slot, run_count = batch.runs[2], batch.runs[3]
        if self._accumulating or self._held is not None:
            gathered = hold(self._held, batch, grad, self._buckets, self._node.ranks, self._scale)
            self._held = gathered if self._accumulating else None
            if self._accumulating:
                return
            run_slot, run_count = gathered.run_slot, gathered.run_count
        step, prefix = self.steps + 1, run_count.tolist()
        replicas = [
            (prefix[b * self._codes], prefix[b * self._codes + bucket.trained])
            for b, bucket in enumerate(self._buckets)
        ]
        if self._replicas is not None:
            self._replicas.begin(step, [run_slot[first:last] for first, last in replicas])
        self._board.wait("applied", self.steps, "update its rows")
        rows = self.mailboxes.open(run_count, run_slot)
        for b, out in enumerate(rows):
            if gathered is not None:
                out.copy_(gathered.grads[b])
            elif self._buckets[b].trained:
                self._sum(batch, grad, prefix, b, out)
        if self._replicas is not None:
            sums = [out[: last - first] for out, (first, last) in zip(rows, replicas, strict=True)]
            self._replicas.contribute(step, sums)
        self._count(prefix)
        self._board.post("published", step)
        received = self._exchanged(rows, run_slot, prefix)
        self._board.wait("published", step, "send its gradients")
        self._apply(step, received)
        self.steps = step
        self._counters.add(steps=1)
        self._board.post("applied", step)

    def _sum(
        self, batch: PreparedBatch, grad: torch.Tensor, prefix: list[int], b: int, out: torch.Tensor
    ) -> None:
        """The gradients of a bucket's runs."""
        assert batch.runs is not None
        native.ops().sum_gradients(
            grad,
            batch.runs[0],
            batch.runs[1],
            prefix[b * self._codes],
            prefix[(b + 1) * self._codes],
            batch.offsets,
            batch.weights,
            batch.features,
            batch.segment_offset,
            self._buckets[b].dim,
            self._scale,
            out,
        )

    def _apply(self, step: int, received: list[list[Part]]) -> None:
        """Update this rank's rows, then its copies of the replicas, whose sums come last."""
        if self._replicas is not None:
            self._replicas.reduce(step)
        self.optimizer_steps += 1
        parts: list[list[Part]] = [[] for _ in self._buckets]
        for rank in range(self._node.ranks):
            mapped = rank in self._node.peers
            found = self.mailboxes.read(rank, 1 + self._node.rank) if mapped else received[rank]
            for mine, part in zip(parts, found, strict=True):
                if len(part[0]):
                    mine.append(part)
        for b, mine in enumerate(parts):
            self._update(b, mine)
        if self._replicas is not None:
            for b, part in enumerate(self._replicas.result(step)):
                self._update(b, [part])
            self._counters.add(allreduce_bytes=self._replicas.bytes)

    def _exchanged(
        self, rows: list[torch.Tensor], run_slot: torch.Tensor, prefix: list[int]
    ) -> list[list[Part]]:
        """What ranks that share no memory with this one have for it, by rank and bucket."""
        received: list[list[Part]] = [[] for _ in range(self._node.ranks)]
        if self._exchange is None:
            return received
        for b, out in enumerate(rows):
            base, slots, grads = prefix[b * self._codes], [], []
            for rank in range(self._node.ranks):
                first = prefix[b * self._codes + 1 + rank]
                last = prefix[b * self._codes + 2 + rank]
                if rank in self._node.peers:
                    last = first
                slots.append(run_slot[first:last])
                grads.append(out[first - base : last - base])
            doing = f"exchange gradients (step {self.steps + 1})"
            sent = self._exchange.send(slots, doing), self._exchange.send(grads, doing)
            for mine, part in zip(received, zip(*sent, strict=True), strict=True):
                mine.append(part)
        return received

    def _update(self, b: int, parts: list[Part]) -> None:
        bucket = self._buckets[b]
        if not parts or not bucket.trained:
            return
        updated = native.ops().update_rows(
            [slots for slots, _ in parts],
            [grads for _, grads in parts],
            self._heap.rows(bucket.width),
            self._heap.state(bucket.width),
            bucket.dim,
            DTYPE_CODE[bucket.dtype],
            bucket.optimizer.kind,
            bucket.optimizer.settings(self.learning_rates[b], self.optimizer_steps),
        )
        self._counters.add(updated_rows=updated)

    def _count(self, prefix: list[int]) -> None:
        runs = np.diff(prefix).reshape(len(self._buckets), self._codes)[:, 1:]
        dims = np.array([bucket.dim for bucket in self._buckets])
        self._counters.add(gradient_rows=runs.sum(axis=0), gradient_bytes=4 * dims @ runs)
