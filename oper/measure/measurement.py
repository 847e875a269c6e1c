"""Measuring the links of CPU ranks: the bandwidths that a topology is made of.

Each rank has rows in a heap of the runtime's and reads with its kernels (runtime/links.py), which
also sum replicas: what is measured is what a step does. In round k of M, rank i reads random rows
of rank (i + k) mod M, all ranks at once, as in a real iteration: round 0 is each rank's own rows,
and after M rounds every ordered pair has been measured under an even load. With t the median time
over repetitions, and of the AllReduce the slowest rank's,

    bandwidth[i, j] = rows · row bytes / t
    AllReduce bus   = (M · replicas/8 + 2 (M-1)/M · replicas · row bytes) / t
    latency of a hop = t(AllReduce of one replica) / (3 (M-1))

the last two being what the cost model charges the bitmap method, all replicas touched
(objective.py). Every wait has a deadline. Nothing is named in the file system, so nothing is left
behind.
"""

import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from numpy.typing import NDArray
from torch.distributed.rendezvous import rendezvous

from oper.base.errors import OperError
from oper.topology.links import SAME_NODE_LATENCY_SECONDS, host_memory_bytes
from oper.topology.presets import CPU_ALLREDUCE
from oper.topology.topology import Topology

Store = Any  # a torch.distributed store, whose types torch does not export

DEADLINE_SECONDS = 60.0
START_SECONDS = 10.0  # for each rank to import torch, on cores that all ranks share
ROW_BYTES = 256  # 64 values of fp32
ARENA_BYTES = 256 << 20  # a rank's rows: several times what a last-level cache holds
REPETITIONS = 21
ALLREDUCE_BYTES = 16 << 20
LATENCY_REPETITIONS = 50


@dataclass(frozen=True)
class Measurement:
    """What M ranks measured; `bandwidth` and `spread` are [M][M], reader by source.

    Spread is (largest - smallest) / median time over the repetitions.
    """

    node_of: list[int]
    bandwidth: list[list[float]]
    spread: list[list[float]]
    allreduce_bandwidth: float
    latency_seconds: float
    memory_bytes: list[int]
    threads: int
    row_bytes: int

    def topology(self, name: str, per_pair: bool = False) -> Topology:
        """The topology, with one bandwidth for each kind of link (the median), or one per pair."""
        bandwidth = np.array(self.bandwidth)
        measured = Topology(
            name,
            tuple(self.node_of),
            1 / bandwidth,
            self.allreduce_bandwidth,
            self.latency_seconds,
            device_memory_bytes=tuple(self.memory_bytes),
        )
        if per_pair:
            return measured
        for mask in measured.masks().values():
            if mask.any():
                bandwidth[mask] = np.median(bandwidth[mask])
        return Topology(**{**vars(measured), "link_cost": 1 / bandwidth})

    def to_yaml(self, name: str, per_pair: bool = False) -> str:
        """The text of a topology file, with how it was measured in a comment."""
        bandwidth = 1 / self.topology(name, per_pair).link_cost
        masks = self.topology(name).masks()
        content: dict[str, Any] = {"name": name, "node_of": self.node_of}
        if per_pair:
            content["bandwidth"] = [[_rounded(value) for value in row] for row in bandwidth]
        else:
            content["bandwidth"] = {
                kind: _rounded(bandwidth[mask][0]) for kind, mask in masks.items() if mask.any()
            }
        content["allreduce_bandwidth"] = _rounded(self.allreduce_bandwidth)
        content["latency_seconds"] = _rounded(self.latency_seconds)
        sizes = [f"{size}B" for size in self.memory_bytes]
        content["device_memory"] = sizes[0] if len(set(sizes)) == 1 else sizes
        spread = float(np.median(self.spread))
        header = (
            f"# Measured by `oper topology measure` on {time.strftime('%Y-%m-%d')}: random rows of "
            f"{self.row_bytes} bytes,\n# ranks at once: {len(self.node_of)}, threads of each: "
            f"{self.threads}, {platform.machine()}, {os.cpu_count()} cores.\n"
            f"# Median of {REPETITIONS}; (largest - smallest) / median is {spread:.0%}. "
            "Bytes per second.\n"
        )
        return header + yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def measure_local(
    ranks: int,
    deadline_seconds: float = DEADLINE_SECONDS,
    arena_bytes: int = ARENA_BYTES,
    row_bytes: int = ROW_BYTES,
) -> Measurement:
    """Measure `ranks` processes that are started here for it, on this host.

    Raises OperError, with all ranks ended, where one fails or does not come in time.
    """
    store = _local_store(0, deadline_seconds, is_master=True)
    arguments = (ranks, store.port, deadline_seconds, arena_bytes, row_bytes)
    # A fresh interpreter each, as a fork would share torch's threads and locks.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_run_local_rank, args=(rank, *arguments), name=f"rank {rank}", daemon=True
        )
        for rank in range(ranks)
    ]
    # Each wait inside has its deadline; this one is for a rank that computes for ever.
    end = time.monotonic() + 4 * deadline_seconds + START_SECONDS * ranks
    try:
        _start(processes)
        while any(process.exitcode != 0 for process in processes):
            if failed := [(p.exitcode, rank) for rank, p in enumerate(processes) if p.exitcode]:
                # The least is a signal's, if there is one: the cause of what the others miss.
                exit_code, rank = min(failed)
                raise OperError(f"measuring: {_failure(store, rank, exit_code)}")
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
            if time.monotonic() > end:
                raise OperError(f"measuring: ranks {late} were not done in time; try fewer ranks")
            multiprocessing.connection.wait([processes[rank].sentinel for rank in late], timeout=1)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(timeout=deadline_seconds)
    return Measurement(**json.loads(store.get("measurement")))


def measure_under_torchrun(
    row_bytes: int = ROW_BYTES, deadline_seconds: float = DEADLINE_SECONDS
) -> Measurement | None:
    """Measure the ranks that torchrun started; the result on rank 0, None on the others."""
    limit = timedelta(seconds=deadline_seconds)
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=limit))
        # torchrun's number of the host among its hosts.
        node = int(os.environ["GROUP_RANK"])
        measured = measure_ranks(store, rank, ranks, node, deadline_seconds, row_bytes=row_bytes)
    except RuntimeError as error:
        raise OperError(f"measuring: the ranks did not meet ({error})") from error
    return measured if rank == 0 else None


def measure_ranks(
    store: Store,
    rank: int,
    ranks: int,
    node: int,
    deadline_seconds: float = DEADLINE_SECONDS,
    arena_bytes: int = ARENA_BYTES,
    row_bytes: int = ROW_BYTES,
) -> Measurement:
    """Measure `ranks` ranks that share `store`, of which this is `rank`, on host `node`."""
    limit = timedelta(seconds=deadline_seconds)
    _meet(store, rank, ranks, limit)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        return _Ranks(store, node, limit, arena_bytes, row_bytes).measure()
    except RuntimeError as error:
        raise OperError(
            f"rank {rank} lost another rank, or waited {deadline_seconds:.0f} s for its bytes: "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _start(processes: Sequence[Any]) -> None:
    # Ctrl-C is for this process, which ends the others: they inherit that it is ignored.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)


def _run_local_rank(
    rank: int, ranks: int, port: int, deadline_seconds: float, arena_bytes: int, row_bytes: int
) -> None:
    """One rank that `measure_local` starts; it says in the store what it found, or what failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # gloo's own variable: without it gloo asks for the host's name, which containers may not know.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _local_store(port, deadline_seconds, is_master=False)
    try:
        measured = measure_ranks(store, rank, ranks, 0, deadline_seconds, arena_bytes, row_bytes)
    except OperError as error:
        store.set(f"failure {rank}", str(error))
        sys.exit(1)
    if rank == 0:
        store.set("measurement", json.dumps(asdict(measured)))


def _end_with_parent() -> None:
    """End this rank at once where the process that started it is gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _local_store(port: int, deadline_seconds: float, is_master: bool) -> Store:
    """Where local ranks meet: the parent's, on a free port if `port` is 0."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_seconds),
    )


def _failure(store: Store, rank: int, exit_code: int) -> str:
    if store.check([f"failure {rank}"]):
        return str(store.get(f"failure {rank}").decode())
    reason = f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"
    return f"rank {rank} ended by {reason}; was there memory enough?"


def _meet(store: Store, rank: int, ranks: int, limit: timedelta) -> None:
    """A barrier with a deadline; OperError names the ranks that did not come."""
    count = store.add(f"meetings {rank}", 1)
    store.set(f"meeting {count} {rank}", "")
    keys = [f"meeting {count} {other}" for other in range(ranks)]
    try:
        store.wait(keys, limit)
    except RuntimeError as error:  # among others DistStoreError, the deadline's
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise OperError(
            f"ranks {missing} did not come within {limit.total_seconds():.0f} s, and rank {rank} "
            "gave up; see what ended or delayed them, and run it again"
        ) from error


class _Ranks:
    """One rank's part of the measurement."""

    def __init__(
        self, store: Store, node: int, limit: timedelta, arena_bytes: int, row_bytes: int
    ) -> None:
        from oper.measure.link_timer import LinkTimer
        from oper.runtime.comm.node import Node

        self.store, self.limit, self.row_bytes = store, limit, row_bytes
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.nodes = [int(n) for n in self._from_all([node])[:, 0]]
        local_ranks = self.nodes.count(node)
        self.memory_bytes = host_memory_bytes() // local_ranks
        self.threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
        torch.set_num_threads(self.threads)
        joined = Node.join(dist.group.WORLD, limit.total_seconds(), self.nodes)
        if (of_node := [self.nodes[peer] for peer in joined.peers]) != [node] * local_ranks:
            raise OperError(
                f"rank {self.rank} shares memory with {len(of_node)} of the {local_ranks} ranks of "
                "its host; ranks of one host must run in one container, as they do in training"
            )
        # A quarter of the memory at most, on small hosts with many ranks.
        arena_bytes = min(arena_bytes, self.memory_bytes // 4)
        # A bound method would make a cycle, which would keep the group beyond its end.
        meet = functools.partial(_meet, store, self.rank, self.ranks, limit)
        self.links = LinkTimer(joined, dist.group.WORLD, meet, row_bytes, arena_bytes)

    def measure(self) -> Measurement:
        from oper.measure.link_timer import READ_ROWS

        times = np.array([self._round(offset) for offset in range(self.ranks)])  # [offset, median…]
        sources = (self.rank + np.arange(self.ranks)) % self.ranks
        mine = np.zeros((2, self.ranks))
        mine[:, sources] = times.T
        everyone = self._from_all(mine.ravel()).reshape(self.ranks, 2, self.ranks)
        bandwidth = READ_ROWS * self.row_bytes / everyone[:, 0]
        allreduce, latency = self._allreduce()
        memory = self._from_all([self.memory_bytes])[:, 0]
        return Measurement(
            node_of=self.nodes,
            bandwidth=bandwidth.tolist(),
            spread=everyone[:, 1].tolist(),
            allreduce_bandwidth=allreduce,
            latency_seconds=latency,
            memory_bytes=[int(m) for m in memory],
            threads=self.threads,
            row_bytes=self.row_bytes,
        )

    def _round(self, offset: int) -> tuple[float, float]:
        """Median time and spread of reading rows of the rank `offset` after this one."""
        return _median_and_spread(self.links.read_seconds(offset, REPETITIONS))

    def _allreduce(self) -> tuple[float, float]:
        """Bus bandwidth (bytes/s) and latency of a hop (s), the slowest rank's."""
        if self.ranks == 1:
            return CPU_ALLREDUCE, SAME_NODE_LATENCY_SECONDS
        replicas = ALLREDUCE_BYTES // self.row_bytes
        seconds = [
            _median_and_spread(self.links.reduce_seconds(rows, repetitions))[0]
            for rows, repetitions in ((replicas, REPETITIONS), (1, LATENCY_REPETITIONS))
        ]
        slowest = self._from_all(seconds).max(axis=0)
        row_bytes = self.ranks / 8 + 2 * (self.ranks - 1) / self.ranks * self.row_bytes
        return replicas * row_bytes / slowest[0], slowest[1] / (3 * (self.ranks - 1))

    def _from_all(self, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Every rank's `values`, float64 [M, n]."""
        _meet(self.store, self.rank, self.ranks, self.limit)
        mine = torch.tensor(np.asarray(values, dtype=np.float64))
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).numpy()


def _median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    middle = float(np.median(times))
    return middle, (max(times) - min(times)) / middle


def _rounded(value: float) -> float:
    """Three digits: a measurement is not known to more."""
    return float(f"{value:.3g}")
