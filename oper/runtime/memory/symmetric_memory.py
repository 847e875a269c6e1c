"""Symmetric memory: where ranks on devices of several nodes keep the rows that others read by
NVSHMEM.

All ranks have as much of it, at equal places in what NVSHMEM has: a rank names another's row by
where it would lie here. Ranks of one node, and others whose memory NVSHMEM maps, read each other's
rows by pointer; the rest is asked for by the kernels (csrc/include/oper/nvshmem/). Gets keep no
order with what other ranks do: so whoever writes rows waits before for all ranks' lookups, and all
wait for it after that (table_io.py).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from oper.base import native
from oper.base.errors import OperError, first_line
from oper.plan.plan import Plan
from oper.runtime.comm.node import Node
from oper.runtime.comm.peer_watch import PeerWatch
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.comm.shared_segment import DeviceMemory
from oper.runtime.memory.device import Cuda, Device
from oper.topology.transports import NVSHMEM, STAGE_BYTES

_started: list[tuple[int, int]] = []  # rank and ranks that NVSHMEM has here: it starts once


class SymmetricMemory:
    """NVSHMEM's memory of one engine, and the lookups that read it. Made by all ranks together.

    `stage` is where rows lie on their way, and `rows` this rank's, once they are allocated.
    """

    def __init__(self, node: Node, device: Cuda) -> None:
        self._node, self._device = node, device
        _start(node, device)
        self.stage = torch.empty(0, dtype=torch.uint8)
        self.rows: DeviceMemory | None = None
        self._reads = _Reads()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._watch = PeerWatch(node, self._reads.are_running)
        node.at_close(self._watch.stop)

    @classmethod
    def of(cls, node: Node, plan: Plan, device: Device) -> "SymmetricMemory | None":
        """That of a plan's ranks; None where their rows are elsewhere."""
        if plan.topology.transport != NVSHMEM or not isinstance(device, Cuda) or node.ranks == 1:
            return None
        return cls(node, device)

    @staticmethod
    def bytes_of(largest: int) -> int:
        """What each rank takes, where the rank with the most rows has `largest` bytes of them."""
        return largest + STAGE_BYTES

    def allocate(self, largest: int) -> dict[int, DeviceMemory]:
        """Memory for the rows of all ranks, of the bytes of the one that has the most; zero. Each
        rank's that is mapped here, its own included."""
        ops, problem = native.ops(), ""
        self.stage = self._allocated(STAGE_BYTES)
        own = self._allocated(largest).zero_()
        mapped = {self._node.rank: DeviceMemory(own)}
        for rank in range(self._node.ranks):
            if rank == self._node.rank:
                continue
            found = ops.mapped_symmetric(own, rank)
            if len(found):
                mapped[rank] = DeviceMemory(found)
            elif rank in self._node.peers:
                problem = (
                    f"the memory of rank {rank}, on the host of rank {self._node.rank}, is not "
                    "mapped by NVSHMEM: the devices of a host must have access to each other "
                    "(`nvidia-smi topo -p2p r`), and each rank one of its own"
                )
        self._device.synchronize()  # so that others find it zero
        self._node.check_all(problem, "allocate memory that all ranks read")
        self.rows = mapped[self._node.rank]
        return mapped

    def buffer(self, bytes: int) -> torch.Tensor:
        """Memory of a device into which rows are fetched, of at least so many bytes."""
        if self._buffer.numel() < bytes:
            ops = native.ops()
            self._device.synchronize()
            if len(self._buffer):
                ops.unregister_buffer(self._buffer)
            size = bytes + bytes // 4
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
            ops.register_buffer(self._buffer)
        return self._buffer

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, work is started that asks other ranks for rows. LostRankError where one is gone.

        Stage and buffer are this work's until it is done: what is started next comes after it, on
        other streams too."""
        self._reads.begin()
        try:
            self._watch.check()
            if self._reads.last is not None:
                self._device.after([self._reads.last])
            yield
        finally:
            self._reads.started(self._device.point())

    def close(self, signals: Signals) -> None:
        """Give the memory back, once no rank reads it any more. To be called on all ranks; nothing
        is waited for where one is gone."""
        try:
            if self.rows is not None:
                self._device.synchronize()
                self._watch.check()
                signals.barrier("release its tables")
                for memory in (self.rows.memory, self.stage):
                    native.ops().free_symmetric(memory)
        finally:
            self.rows = None
            self._watch.stop()

    def _allocated(self, bytes: int) -> torch.Tensor:
        try:
            memory: torch.Tensor = native.ops().allocate_symmetric(
                max(bytes, 1), self._device.torch_device
            )
        except RuntimeError as error:
            raise OperError(
                f"{bytes:,} bytes of NVSHMEM's memory were needed on {self._device.torch_device}: "
                f"{first_line(error)}. Where the device has as much free, NVSHMEM_SYMMETRIC_SIZE "
                "and NVSHMEM_MAX_MEMORY_PER_GPU may be too small for it"
            ) from error
        return memory


class _Reads:
    """Whether work runs here that asks other ranks for rows, for any thread to ask."""

    def __init__(self) -> None:
        self._lock, self._starting = threading.Lock(), 0
        self.last: Any = None  # all that was started

    def begin(self) -> None:
        with self._lock:
            self._starting += 1

    def started(self, point: Any) -> None:
        with self._lock:
            self._starting -= 1
            self.last = point

    def are_running(self) -> bool:
        with self._lock:
            return self._starting > 0 or (self.last is not None and not self.last.query())


def _start(node: Node, device: Cuda) -> None:
    """Start NVSHMEM on all ranks together, if it is not: it does so once a process."""
    here = (node.rank, node.ranks)
    if _started and _started[0] != here:
        raise OperError(
            f"NVSHMEM runs here as rank {_started[0][0]} of {_started[0][1]}, and tables of rank "
            f"{here[0]} of {here[1]} were to be looked up: it starts once in a process, so that "
            "all of a model's tables must be sharded over one process group"
        )
    problem = ""
    try:
        device.load_nvshmem()
    except OperError as error:
        problem = str(error)
    node.check_all(problem, "load NVSHMEM")
    if _started:
        return
    assert node.group is not None
    ops = native.ops()
    id = ops.nvshmem_unique_id() if node.rank == 0 else torch.empty(128, dtype=torch.uint8)
    node.group.run(dist.broadcast, id, group_src=0, action="start NVSHMEM")
    try:
        ops.start_nvshmem(id, node.rank, node.ranks, device.torch_device)
    except RuntimeError as error:
        raise OperError(f"NVSHMEM: {first_line(error)}") from error
    _started.append(here)
