"""Time of this rank's reads of another rank's rows, and of its AllReduce of replicas with all
ranks.

Also the fixed time of messages and operators.

Both are done as in a training step: rows lie in a heap and are read by the lookup's kernel, through
pointers if memory is shared; replicas' gradients go through the bitmap AllReduce. Rows of ranks
without shared memory are copied on their rank and sent over the process group.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from oper.plan.layout import SLOT_BITS
from oper.runtime.allreduce.replica_allreduce import BucketReplicas, ReplicaAllReduce
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.memory.heap import Heap
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.kernel_structs import FEATURE, as_words
from oper.runtime.tables.row_gradients import RowGradients, laid_out

_COUNTERS = ("marked", "published", "reduced", "waited")


class Amounts(NamedTuple):
    """Bytes to move, so many that the clock's error and the start of a kernel are negligible, and
    no cache holds them."""

    read_bytes: int  # by one rank in a repetition
    arena_bytes: int  # a rank's rows
    allreduce_bytes: int  # of replicas


ON_CPU = Amounts(32 << 20, 256 << 20, 16 << 20)
ON_DEVICES = Amounts(1 << 30, 4 << 30, 256 << 20)


class LinkTimer:
    """Timer of this rank's links, together with all ranks of `group`, which is None for one rank;
    `barrier` waits for all of them. Rows have `row_bytes` bytes, float32, in a heap on each rank's
    device.
    """

    def __init__(
        self,
        node: Node,
        group: dist.ProcessGroup | None,
        barrier: Callable[[], None],
        row_bytes: int,
        amounts: Amounts,
        device: Device | None = None,
    ) -> None:
        self._node, self._group, self._barrier = node, group, barrier
        self._row_bytes, self._dim = row_bytes, row_bytes // 4
        self.device = device or Cpu()
        self.read_rows = max(amounts.read_bytes // row_bytes, 1)
        self._rows = max(amounts.arena_bytes // row_bytes, 1)
        slots = np.full((1, node.ranks), self._rows)
        self._heap = Heap(node, slots, [row_bytes], [0], self.device)
        self._heap.rows(0).view(torch.float32).fill_(1.0)
        self._random = torch.Generator(self.device.torch_device).manual_seed(node.rank)
        self._signals = Signals(node, _COUNTERS, self.device.done)
        self._steps = self._waits = 0

    def read_seconds(self, offset: int, repetitions: int) -> list[float]:
        """Return the seconds to read `read_rows` random rows of the rank `offset` after this one,
        while all ranks do the same."""
        ranks = self._node.ranks
        source, reader = (self._node.rank + offset) % ranks, (self._node.rank - offset) % ranks
        seconds = []
        for _ in range(1 + repetitions):
            slots = torch.randint(
                self._rows,
                (self.read_rows,),
                generator=self._random,
                device=self.device.torch_device,
            )
            self.device.synchronize()
            self._barrier()
            start = time.perf_counter()
            sending = None
            if reader not in self._node.peers:
                sending = dist.isend(self._copy(slots), group=self._group, group_dst=reader)
            if source in self._node.peers:
                start = time.perf_counter()  # without serving another node
                self._read(source, slots)
                self.device.synchronize()
            else:
                out = torch.empty(self.read_rows, self._row_bytes, dtype=torch.uint8)
                dist.recv(out, group=self._group, group_src=source)
            seconds.append(time.perf_counter() - start)
            if sending is not None:
                sending.wait()
        return seconds[1:]  # the first repetition warms up

    def kernel_seconds(self, repetitions: int) -> list[float]:
        """Return the seconds to look up one of this rank's own rows."""
        slot = torch.zeros(1, dtype=torch.int64, device=self.device.torch_device)

        def look_up() -> None:
            self._read(self._node.rank, slot)
            self.device.synchronize()

        return self._seconds(look_up, repetitions)

    def wait_seconds(self, repetitions: int) -> list[float]:
        """Return the seconds until all ranks of the node have posted a signal, and this rank has
        seen them."""

        def wait() -> None:
            self._waits += 1
            self._signals.post("waited", self._waits)
            self._signals.wait("waited", self._waits, "measure a wait")

        return self._seconds(wait, repetitions)

    def message_seconds(self, repetitions: int) -> tuple[list[float], list[float]]:
        """Return the seconds to send a value M/2 ranks ahead and receive one from M/2 ranks behind;
        and to exchange a value with every rank."""
        ranks, rank = self._node.ranks, self._node.rank
        sent, received = torch.ones(1), torch.ones(1)
        one_each, from_each = torch.ones(ranks), torch.ones(ranks)
        to, source = (rank + ranks // 2) % ranks, (rank - ranks // 2) % ranks

        def swap() -> None:
            sending = dist.isend(sent, group=self._group, group_dst=to)
            dist.recv(received, group=self._group, group_src=source)
            assert sending is not None
            sending.wait()

        def exchange() -> None:
            dist.all_to_all_single(from_each, one_each, group=self._group)

        return self._seconds(swap, repetitions), self._seconds(exchange, repetitions)

    def _seconds(self, action: Callable[[], None], repetitions: int) -> list[float]:
        seconds = []
        for _ in range(1 + repetitions):
            self._barrier()
            start = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def reduce_seconds(self, replicas: int, repetitions: int) -> list[float]:
        """Return the seconds of the AllReduce of `replicas` replicas, all of them touched by every
        rank."""
        on, ranks = self.device.torch_device, self._node.ranks
        slots = torch.arange(replicas, device=on)
        before = torch.tensor([0] + [replicas] * (1 + ranks), device=on)
        rows = SortedRows(slots, before, ranks)
        groups = laid_out(before, [self._dim], self.device)
        sums = RowGradients(slots, groups, torch.ones(replicas * self._dim, device=on))
        buckets = [BucketReplicas(slots, self._dim)]
        allreduce = ReplicaAllReduce("bitmap", self._node, self._signals, buckets, self.device)
        seconds = []
        for _ in range(1 + repetitions):
            self._steps += 1
            self.device.synchronize()
            self._barrier()
            start = time.perf_counter()
            allreduce.begin(self._steps, rows)
            allreduce.contribute(self._steps, sums)
            self._signals.post("published", self._steps)
            self._signals.wait("published", self._steps, "publish its gradients")
            allreduce.reduce(self._steps)
            allreduce.result(self._steps)
            self.device.synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _read(self, source: int, slots: torch.Tensor) -> torch.Tensor:
        addresses = slots + (source << SLOT_BITS)
        return self.device.ops().pooled_rows(
            addresses,
            None,
            None,
            self._feature(len(slots)),
            self._heap.bases,
            self._node.rank,
            len(slots) * self._dim,
            torch.float32,
            self.device.stream,
        )

    def _feature(self, bags: int) -> torch.Tensor:
        """Return a lookup of `bags` bags of one row each."""
        feature = np.zeros(1, FEATURE)
        feature["row_bytes"], feature["bags"] = self._row_bytes, bags
        feature["dim"] = feature["out_stride"] = self._dim
        return as_words(feature)

    def _copy(self, slots: torch.Tensor) -> torch.Tensor:
        """Return rows of this rank, for a rank of another node."""
        out = torch.empty(len(slots), self._row_bytes, dtype=torch.uint8)
        base = int(self._heap.bases[0, self._node.rank])
        self.device.ops().copy_rows(slots, [0], [len(slots)], [base], [self._row_bytes], out, [0])
        return out
