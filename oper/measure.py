"""Measuring the links of CPU ranks: the bandwidths that a topology is made of.

Each rank puts rows into anonymous shared memory (memfd); the other ranks of its host map it
through its descriptor. In round k of M, rank i gathers random rows of rank (i + k) mod M, all
ranks at once, as in a real iteration: round 0 is each rank's own rows, and after M rounds every
ordered pair has been measured under an even load. Rows of another host are gathered there and
sent through gloo. With t the median time over repetitions,

    bandwidth[i, j] = rows · row bytes / t            AllReduce bus = 2 (M-1)/M · bytes / t
    latency of a hop = t(AllReduce of one number) / (2 (M-1))

Every wait has a deadline. Nothing is named in the file system, so nothing is left behind.
"""

import json
import mmap
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

from oper.errors import OperError
from oper.topology import CPU_ALLREDUCE, SAME_NODE_LATENCY_SECONDS, Topology, host_memory_bytes

Store = Any  # a torch.distributed store, whose types torch does not export

DEADLINE_SECONDS = 60.0
START_SECONDS = 10.0  # for each rank to import torch, on cores that all ranks share
ROW_BYTES = 256  # 64 values of fp32
ARENA_BYTES = 256 << 20  # a rank's rows: several times what a last-level cache holds
GATHER_ROWS = 1 << 17  # 32 MiB a repetition: milliseconds, well above the clock's error
REPETITIONS = 7
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
            f"{ROW_BYTES} bytes,\n# {len(self.node_of)} ranks at once, {self.threads} threads "
            f"each, {platform.machine()}, {os.cpu_count()} cores.\n# Median of {REPETITIONS}; "
            f"(largest - smallest) / median is {spread:.0%}. Bytes per second.\n"
        )
        return header + yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def measure_local(
    ranks: int,
    deadline_seconds: float = DEADLINE_SECONDS,
    arena_bytes: int = ARENA_BYTES,
) -> Measurement:
    """Measure `ranks` processes that are started here for it, on this host.

    Raises OperError, with all ranks ended, where one fails or does not come in time.
    """
    store = _local_store(0, deadline_seconds, is_master=True)
    arguments = (ranks, store.port, deadline_seconds, arena_bytes)
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


def measure_under_torchrun(deadline_seconds: float = DEADLINE_SECONDS) -> Measurement | None:
    """Measure the ranks that torchrun started; the result on rank 0, None on the others."""
    limit = timedelta(seconds=deadline_seconds)
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=limit))
        # torchrun's number of the host among its hosts.
        node = int(os.environ["GROUP_RANK"])
        measured = measure_ranks(store, rank, ranks, node, deadline_seconds)
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
) -> Measurement:
    """Measure `ranks` ranks that share `store`, of which this is `rank`, on host `node`."""
    limit = timedelta(seconds=deadline_seconds)
    _meet(store, rank, ranks, limit)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        return _Ranks(store, node, limit, arena_bytes).measure()
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
    rank: int, ranks: int, port: int, deadline_seconds: float, arena_bytes: int
) -> None:
    """One rank that `measure_local` starts; it says in the store what it found, or what failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # gloo's own variable: without it gloo asks for the host's name, which containers may not know.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _local_store(port, deadline_seconds, is_master=False)
    try:
        measured = measure_ranks(store, rank, ranks, 0, deadline_seconds, arena_bytes)
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
    """One rank's part of the measurement: its rows, its neighbours' rows, and the group."""

    def __init__(self, store: Store, node: int, limit: timedelta, arena_bytes: int) -> None:
        self.store, self.limit = store, limit
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.nodes = [int(n) for n in self._from_all([node])[:, 0]]
        local_ranks = self.nodes.count(node)
        self.memory_bytes = host_memory_bytes() // local_ranks
        # A quarter of the memory at most, on small hosts with many ranks.
        size = min(arena_bytes, self.memory_bytes // 4) // mmap.PAGESIZE * mmap.PAGESIZE
        self.threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
        torch.set_num_threads(self.threads)
        self.rows_of = self._map_rows(size)
        self.out = torch.empty(GATHER_ROWS, ROW_BYTES // 4)
        self.random = torch.Generator().manual_seed(self.rank)

    def measure(self) -> Measurement:
        times = np.array([self._round(offset) for offset in range(self.ranks)])  # [offset, median…]
        sources = (self.rank + np.arange(self.ranks)) % self.ranks
        mine = np.zeros((2, self.ranks))
        mine[:, sources] = times.T
        everyone = self._from_all(mine.ravel()).reshape(self.ranks, 2, self.ranks)
        bandwidth = GATHER_ROWS * ROW_BYTES / everyone[:, 0]
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
        )

    def _round(self, offset: int) -> tuple[float, float]:
        """Median time and spread of gathering rows of the rank `offset` after this one."""
        source, reader = (self.rank + offset) % self.ranks, (self.rank - offset) % self.ranks
        times = []
        for _ in range(1 + REPETITIONS):
            ids = self._random_ids()
            self._meet()
            start = time.perf_counter()
            sending = receiving = None
            if source not in self.rows_of:
                receiving = dist.irecv(self.out, source)
            if reader not in self.rows_of:
                sending = dist.isend(self.rows_of[self.rank][ids], reader)
            if receiving is not None:
                receiving.wait(self.limit)
            else:
                start = time.perf_counter()  # serving another host is no part of this read
                torch.index_select(self.rows_of[source], 0, ids, out=self.out)
            times.append(time.perf_counter() - start)
            if sending is not None:
                sending.wait(self.limit)
        return _median_and_spread(times[1:])  # the first one warms up

    def _allreduce(self) -> tuple[float, float]:
        """Bus bandwidth (bytes/s) and latency of a hop (s), the slowest rank's."""
        if self.ranks == 1:
            return CPU_ALLREDUCE, SAME_NODE_LATENCY_SECONDS
        hops = 2 * (self.ranks - 1)
        large, small = torch.ones(ALLREDUCE_BYTES // 4), torch.ones(1)
        seconds = [
            self._time_allreduce(large, REPETITIONS),
            self._time_allreduce(small, LATENCY_REPETITIONS),
        ]
        slowest = self._from_all(seconds).max(axis=0)
        return hops / self.ranks * ALLREDUCE_BYTES / slowest[0], slowest[1] / hops

    def _time_allreduce(self, values: torch.Tensor, repetitions: int) -> float:
        times = []
        self._meet()
        for _ in range(1 + repetitions):
            values.fill_(1.0)  # or the sums would grow
            start = time.perf_counter()
            dist.all_reduce(values)
            times.append(time.perf_counter() - start)
        return _median_and_spread(times[1:])[0]

    def _map_rows(self, size: int) -> dict[int, torch.Tensor]:
        """The rows, float32 [rows, 64], of every rank on this host, this one's own among them."""
        own = os.memfd_create("oper-measure")
        try:
            os.truncate(own, size)
            rows = {self.rank: _rows(own, size)}
            rows[self.rank].fill_(1.0)
            places = self._from_all([os.getpid(), own]).astype(np.int64)
            for peer, (process, descriptor) in enumerate(places):
                if peer != self.rank and self.nodes[peer] == self.nodes[self.rank]:
                    rows[peer] = _peer_rows(peer, int(process), int(descriptor), size)
            self._meet()  # all have opened it
        finally:
            os.close(own)  # the memory lives on while it is mapped
        return rows

    def _random_ids(self) -> torch.Tensor:
        rows = len(self.rows_of[self.rank])
        return torch.randint(rows, (GATHER_ROWS,), generator=self.random)

    def _meet(self) -> None:
        _meet(self.store, self.rank, self.ranks, self.limit)

    def _from_all(self, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Every rank's `values`, float64 [M, n]."""
        self._meet()
        mine = torch.tensor(np.asarray(values, dtype=np.float64))
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).numpy()


def _rows(descriptor: int, size: int) -> torch.Tensor:
    mapped = mmap.mmap(descriptor, size)
    rows = torch.frombuffer(mapped, dtype=torch.float32).view(-1, ROW_BYTES // 4)
    rows[:: mmap.PAGESIZE // ROW_BYTES].sum()  # every page is mapped before a clock runs
    return rows


def _peer_rows(peer: int, process: int, descriptor: int, size: int) -> torch.Tensor:
    """Rows of another rank of this host, through the descriptor that it holds."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR)
    except OSError as error:
        raise OperError(
            f"rank {peer}'s shared memory cannot be mapped through {path} "
            f"({error.strerror}); ranks of one host must run as one user and in one container"
        ) from error
    try:
        return _rows(opened, size)
    finally:
        os.close(opened)


def _median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    middle = float(np.median(times))
    return middle, (max(times) - min(times)) / middle


def _rounded(value: float) -> float:
    """Three digits: a measurement is not known to more."""
    return float(f"{value:.3g}")
