"""One rank's part in measuring the links of ranks, from which a topology is made.

Each rank has rows in one of the runtime's heaps and uses its kernels to read them and to sum
replicas (link_timer.py), as in a training step. In round k of M, rank i reads random rows of rank
(i + k) mod M, all ranks at once, as in a real iteration: round 0 is each rank's own rows, and after
M rounds every ordered pair has been measured under an even load. With t the median time over
repetitions, and for the AllReduce the slowest rank's,

    bandwidth[i, j] = rows · row bytes / t
    AllReduce bus   = ((M/N + N - 1) · replicas/8 + 2 (M-1)/M · replicas · row bytes) / t
    kernel          = t(lookup of one row)
    hop in a node   = t(all ranks of the node post a signal, and wait for the others')
    hop to another  = t(a value is sent to the next node's rank, while one comes from the last's)
    message         = (t(a value is exchanged with every rank) - that hop) / (M - 2)

of which the second is the cost model's charge for the bitmap method with all replicas touched.
Links that these ranks lack, such as those to other nodes, are not measured, and keep the defaults
of topologies. Every wait has a deadline. Nothing is named in the file system, so nothing is left
behind.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from oper.base.errors import OperError, first_line
from oper.measure.link_timer import ON_CPU, ON_DEVICES, Amounts, LinkTimer
from oper.measure.measurement import REPETITIONS, Measurement
from oper.runtime.comm.node import Node
from oper.runtime.memory.alike_devices import check_alike
from oper.runtime.memory.device import Device, device_of
from oper.topology.latency import CPU_RANKS, DEVICES, Latency
from oper.topology.number_ranges import LATENCY
from oper.topology.presets import CPU_ALLREDUCE

DEADLINE_SECONDS = 60.0
ROW_BYTES = 256  # 64 values of fp32
LATENCY_REPETITIONS = 50


def measure_ranks(
    store: Any,
    rank: int,
    ranks: int,
    node: int,
    deadline_seconds: float = DEADLINE_SECONDS,
    amounts: Amounts | None = None,
    row_bytes: int = ROW_BYTES,
    device: str = "cpu",
) -> Measurement:
    """Measure `ranks` ranks that share `store`, of which this is `rank`, on host `node` and on
    torch's `device`."""
    limit = timedelta(seconds=deadline_seconds)
    barrier(store, rank, ranks, limit)
    on = device_of(device)  # first, because the other ranks would wait for this one if it fails
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        return RankMeasurement(store, node, limit, amounts, row_bytes, on).measure()
    except RuntimeError as error:
        raise OperError(
            f"rank {rank} lost another rank, or waited {deadline_seconds:.0f} s for its bytes: "
            f"{first_line(error)}"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def barrier(store: Any, rank: int, ranks: int, limit: timedelta) -> None:
    """Wait for all ranks; raise OperError, which names those that did not come within `limit`."""
    count = store.add(f"barriers {rank}", 1)
    store.set(f"barrier {count} {rank}", "")
    keys = [f"barrier {count} {other}" for other in range(ranks)]
    try:
        store.wait(keys, limit)
    except RuntimeError as error:  # among others DistStoreError, the deadline's
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise OperError(
            f"ranks {missing} did not come within {limit.total_seconds():.0f} s, and rank {rank} "
            "gave up; see what ended or delayed them, and run it again"
        ) from error


class RankMeasurement:
    """One rank's part of the measurement by a process group."""

    def __init__(
        self,
        store: Any,
        node: int,
        limit: timedelta,
        amounts: Amounts | None,
        row_bytes: int,
        device: Device,
    ) -> None:
        self.store, self.limit, self.row_bytes = store, limit, row_bytes
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.nodes = [int(n) for n in self._from_all([node])[:, 0]]
        local_ranks = self.nodes.count(node)
        self.memory_bytes = device.memory_bytes(local_ranks)
        self.threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
        torch.set_num_threads(self.threads)
        joined = Node.join(dist.group.WORLD, limit.total_seconds(), self.nodes)
        if (of_node := [self.nodes[peer] for peer in joined.peers]) != [node] * local_ranks:
            raise OperError(
                f"rank {self.rank} shares memory with {len(of_node)} of the {local_ranks} ranks of "
                "its host; ranks of one host must run in one container, as they do in training"
            )
        check_alike(joined, device)
        on_devices = device.kind != "cpu"
        if on_devices and len(joined.peers) < self.ranks:
            raise OperError(
                f"ranks on devices of {len(set(self.nodes))} hosts, and devices read rows of one "
                "host alone: measure those of one, and write the other hosts and the bandwidth "
                "between them into the file (docs/topology.md)"
            )
        amounts = amounts or (ON_DEVICES if on_devices else ON_CPU)
        # A quarter of the memory at most, on small hosts with many ranks.
        arena_bytes = min(amounts.arena_bytes, self.memory_bytes // 4)
        amounts = amounts._replace(arena_bytes=arena_bytes)
        self.allreduce_bytes = amounts.allreduce_bytes
        # A bound method would make a cycle, which would keep the group beyond its end.
        wait = functools.partial(barrier, store, self.rank, self.ranks, limit)
        self.links = LinkTimer(joined, dist.group.WORLD, wait, row_bytes, amounts, device)

    def measure(self) -> Measurement:
        times = np.array([self._round(offset) for offset in range(self.ranks)])  # [offset, median…]
        sources = (self.rank + np.arange(self.ranks)) % self.ranks
        of_rank = np.zeros((2, self.ranks))
        of_rank[:, sources] = times.T
        everyone = self._from_all(of_rank.ravel()).reshape(self.ranks, 2, self.ranks)
        bandwidth = self.links.read_rows * self.row_bytes / everyone[:, 0]
        allreduce = self._allreduce()
        memory = self._from_all([self.memory_bytes])[:, 0]
        return Measurement(
            node_of=self.nodes,
            bandwidth=bandwidth.tolist(),
            spread=everyone[:, 1].tolist(),
            allreduce_bandwidth=allreduce,
            latency=self._latency(),
            memory_bytes=[int(m) for m in memory],
            threads=self.threads,
            row_bytes=self.row_bytes,
            device=self.links.device.name,
        )

    def _round(self, offset: int) -> tuple[float, float]:
        """Return the median time and spread of reading rows of the rank `offset` after this one."""
        return _median_and_spread(self.links.read_seconds(offset, REPETITIONS))

    def _allreduce(self) -> float:
        """Return the bus bandwidth (bytes/s) of the slowest rank."""
        if self.ranks == 1:
            return CPU_ALLREDUCE
        replicas, nodes = self.allreduce_bytes // self.row_bytes, len(set(self.nodes))
        seconds = _median_and_spread(self.links.reduce_seconds(replicas, REPETITIONS))[0]
        slowest = float(self._from_all([seconds]).max())
        bitmaps = (self.ranks / nodes + nodes - 1) / 8
        row_bytes = bitmaps + 2 * (self.ranks - 1) / self.ranks * self.row_bytes
        return replicas * row_bytes / slowest

    def _latency(self) -> Latency:
        """Return the slowest rank's latency, with defaults for hops and messages that these ranks
        lack."""
        usual = CPU_RANKS if self.links.device.kind == "cpu" else DEVICES
        times = [self.links.kernel_seconds(LATENCY_REPETITIONS)]
        several, nodes = self.ranks > 1, len(set(self.nodes))
        if several and nodes < self.ranks:
            times.append(self.links.wait_seconds(LATENCY_REPETITIONS))
        if nodes > 1:
            times += self.links.message_seconds(LATENCY_REPETITIONS)
        slowest = (
            self._from_all([float(np.median(seconds)) for seconds in times]).max(axis=0).tolist()
        )
        measured = {"kernel": slowest.pop(0)}
        if several and nodes < self.ranks:
            measured["same_node"] = slowest.pop(0)
        if nodes > 1:
            measured["other_node"], everyone = slowest
            if self.ranks > 2:
                seconds = (everyone - measured["other_node"]) / (self.ranks - 2)
                measured["message"] = max(seconds, LATENCY.least)
        return replace(usual, **measured)

    def _from_all(self, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return every rank's `values`, float64 [M, n]."""
        barrier(self.store, self.rank, self.ranks, self.limit)
        sent = torch.tensor(np.asarray(values, dtype=np.float64))
        everyone = [torch.empty_like(sent) for _ in range(self.ranks)]
        dist.all_gather(everyone, sent)
        return torch.stack(everyone).numpy()


def _median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    middle = float(np.median(times))
    return middle, (max(times) - min(times)) / middle
