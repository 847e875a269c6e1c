"""Symmetric memory: the memory in which ranks on devices of several nodes keep the rows that others
read by NVSHMEM.

All ranks have the same amount of it, at equal places in NVSHMEM's memory: a rank names another's
row by the address that it would have here. Ranks of one node, and others whose memory NVSHMEM maps,
read each other's rows by pointer; kernels ask for the rest (csrc/include/oper/nvshmem/). Gets keep
no order with the work of other ranks: so a rank that writes rows first waits for all ranks'
lookups, and all wait for it afterwards (table_io.py).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from oper.base import native
from oper.base.errors import OperError, first_line
from oper.cost.step_memory import with_slack
from oper.plan.plan import Plan
from oper.runtime.comm.node import Node
from oper.runtime.comm.peer_watch import PeerWatch
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.comm.shared_segment import DeviceMemory
from oper.runtime.memory.device import Cuda, Device
from oper.runtime.memory.step_room import NoRoomError
from oper.topology.transports import NVSHMEM, STAGE_BYTES

# The rank that NVSHMEM has here, and the ranks of the job that it runs for: it starts once.
_started: list[tuple[int, list[int]]] = []


class RegisteredBuffer:
    """Memory of a device into which kernels bring rows or gradients of other ranks; it grows and is
    kept."""

    def __init__(self, device: Cuda) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device.torch_device)

    def of(self, bytes: int) -> torch.Tensor:
        """Return the memory, of at least so many bytes; its earlier content may be lost."""
        if self._memory.numel() < bytes:
            self._device.synchronize()
            self.give_back()
            made = torch.empty(
                with_slack(bytes), dtype=torch.uint8, device=self._device.torch_device
            )
            native.ops().register_buffer(made)
            self._memory = made
        return self._memory

    def give_back(self) -> None:
        """Free the memory, once nothing is brought there any more."""
        if len(self._memory):
            native.ops().unregister_buffer(self._memory)
        self._memory = self._memory.new_empty(0)


class SymmetricMemory:
    """NVSHMEM's memory of one engine, and the lookups that read it. Made by all ranks together.

    `stage` holds rows on their way, and `rows` this rank's own, once they are allocated; `fetched`
    is for distinct rows, `inbox` for gradients.
    """

    def __init__(self, node: Node, device: Cuda) -> None:
        self._node, self._device = node, device
        self.stage = torch.empty(0, dtype=torch.uint8)
        self.rows: DeviceMemory | None = None
        self._waits, self._using = _Waits(), threading.RLock()
        self.fetched, self.inbox = RegisteredBuffer(device), RegisteredBuffer(device)
        self._outbox = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        self._watch = PeerWatch(node, self._waits.are_some)
        node.at_close(self._watch.stop)
        _load(node, device)
        with self._waits.of_host():
            _start(node, device)

    @classmethod
    def of(cls, node: Node, plan: Plan, device: Device) -> "SymmetricMemory | None":
        """Return the memory of a plan's ranks; None if their rows are elsewhere."""
        if plan.topology.transport != NVSHMEM or not isinstance(device, Cuda) or node.ranks == 1:
            return None
        return cls(node, device)

    @staticmethod
    def bytes_of(largest: int) -> int:
        """Return the bytes that each rank takes if the rank with the most rows has `largest`
        bytes."""
        return largest + STAGE_BYTES

    def allocate(self, largest: int) -> dict[int, DeviceMemory]:
        """Allocate memory for the rows of all ranks, `largest` bytes each; zero. Return the memory
        of each rank that is mapped here, this one included."""
        ops, problem = native.ops(), ""
        self.stage = self._allocated(STAGE_BYTES)
        own = self._allocated(largest).zero_()
        mapped = {self._node.rank: DeviceMemory(own)}
        for rank in range(self._node.ranks):
            if rank == self._node.rank:
                continue
            memory = ops.mapped_symmetric(own, rank)
            if len(memory):
                mapped[rank] = DeviceMemory(memory)
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

    def outbox(self, most: int) -> torch.Tensor:
        """Return memory of this rank, of at least `most` bytes, whose content other ranks bring. To
        be called on all ranks together, with one `most`, once nobody reads the earlier content."""
        if len(self._outbox) < most:
            self._device.synchronize()
            self._device.free_memory()  # gives back torch's unused memory
            # A rank that fails until here is named; the calls of NVSHMEM would wait for it.
            self._node.check_all("", "make room for gradients of other nodes' rows")
            self._free(self._outbox)
            self._outbox = self._outbox.new_empty(0)  # if there is no memory for more
            self._outbox = self._allocated(with_slack(most))
        return self._outbox

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let work start inside that asks other ranks for rows. Raise LostRankError if a rank is
        gone.

        Stage and buffers belong to this work until it is done: later work comes after it, on other
        streams too, and other threads wait until this one has started it.
        """
        with self._using, self._waits.of_host():
            self._watch.check()
            if self._waits.last is not None:
                self._device.after([self._waits.last])
            try:
                yield
            finally:
                self._waits.last = self._device.point()

    def close(self, signals: Signals) -> None:
        """Give the memory back to NVSHMEM, which keeps it for the next engine, once no rank reads
        it any more. To be called on all ranks; if a rank is gone, nothing is waited for."""
        try:
            if self.rows is not None:
                self._device.synchronize()
                self._watch.check()
                signals.barrier("release its tables")
                for buffer in (self.fetched, self.inbox):
                    buffer.give_back()
                for memory in (self.rows.memory, self.stage, self._outbox):
                    self._free(memory)
        finally:
            self.rows = None
            self._watch.stop()

    def _free(self, memory: torch.Tensor) -> None:
        if len(memory):
            with self._waits.of_host():
                native.ops().free_symmetric(memory)

    def _allocated(self, bytes: int) -> torch.Tensor:
        try:
            with self._waits.of_host():
                memory: torch.Tensor = native.ops().allocate_symmetric(
                    max(bytes, 1), self._device.torch_device
                )
        except RuntimeError as error:
            raise NoRoomError(
                f"expected {bytes:,} bytes of NVSHMEM's memory on {self._device.torch_device}, got "
                f"none: {first_line(error)}: free memory of the device, or, if it has as much, "
                "raise NVSHMEM_SYMMETRIC_SIZE and NVSHMEM_MAX_MEMORY_PER_GPU"
            ) from error
        return memory


class _Waits:
    """Waits for other ranks that only they can end, for any thread to look at: lookups that ask
    them for rows, or calls of NVSHMEM that all ranks make together."""

    def __init__(self) -> None:
        self._lock, self._calls = threading.Lock(), 0
        self.last: Any = None  # the lookups that were started

    @contextmanager
    def of_host(self) -> Iterator[None]:
        """Count inside as a wait of the host for other ranks."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    def are_some(self) -> bool:
        last = self.last
        with self._lock:
            return self._calls > 0 or (last is not None and not last.query())


def _load(node: Node, device: Cuda) -> None:
    """Load NVSHMEM on all ranks, or raise OperError on all of them with the rank that has none."""
    problem = ""
    try:
        device.load_nvshmem()
    except OperError as error:
        problem = str(error)
    node.check_all(problem, "load NVSHMEM")
    _check_versions(node)


def _check_versions(node: Node) -> None:
    """Raise OperError on all ranks unless they have NVSHMEM of one version: the version for which
    the kernels were built, or a later one of the same major version."""
    assert node.group is not None
    built, installed = native.ops().nvshmem_versions()
    versions = [
        int.from_bytes(v) for v in node.group.gather(installed.to_bytes(8), "compare NVSHMEM")
    ]
    if len({*versions}) > 1:
        of_ranks = ", ".join(f"rank {r}: {_version(v)}" for r, v in enumerate(versions))
        raise OperError(
            f"NVSHMEM is of unlike versions ({of_ranks}): install one on all nodes "
            "(`pip install nvidia-nvshmem-cu13==` that version)"
        )
    problem = ""
    if installed < built or installed // 10_000 != built // 10_000:
        problem = (
            f"NVSHMEM {_version(installed)} is installed, and the kernels were built for "
            f"{_version(built)}: install that one, or build them again by "
            "`python scripts/build_cuda.py`"
        )
    node.check_all(problem, "compare NVSHMEM with the kernels")


def _version(number: int) -> str:
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def _start(node: Node, device: Cuda) -> None:
    """Start NVSHMEM on all ranks together, unless it runs: it starts once per process."""
    assert node.group is not None
    here = (node.rank, node.group.members)
    if _started and _started[0] != here:
        raise OperError(
            f"NVSHMEM runs here for ranks {_started[0][1]} of the job, and tables of ranks "
            f"{here[1]} were to be looked up: it starts once in a process, so that all of a "
            "model's tables must be sharded over one process group"
        )
    if _started:
        return
    ops = native.ops()
    id = ops.nvshmem_unique_id() if node.rank == 0 else torch.empty(128, dtype=torch.uint8)
    node.group.run(dist.broadcast, id, group_src=0, action="start NVSHMEM")
    problem = ""
    try:
        running = tuple(ops.start_nvshmem(id, node.rank, node.ranks, device.torch_device))
    except RuntimeError as error:
        problem = f"NVSHMEM: {first_line(error)}"
    else:
        if running != (node.rank, node.ranks):
            problem = (
                f"NVSHMEM runs in rank {node.rank} of {node.ranks} as rank {running[0]} of "
                f"{running[1]}: something else in this process started it for other ranks before"
            )
    node.check_all(problem, "start NVSHMEM")
    _started.append(here)
