"""The heap: rows of all tables and their optimizer state, of all ranks of a node (§5.1).

A rank has two arenas per width, one of rows and one of optimizer state, both indexed by slot. They
lie in one segment of shared memory, the host's or a device's, which the others of the node have
mapped. If a plan is for inference, the heap is read-only between lookups and the next `writable`,
except on devices.

When rows migrate, arenas grow in place (`resize`). For that, each arena is followed by reserved
address space: as much again in the host's memory, of which none is used before it is written, and
on devices the spare slots that were asked for.
"""

import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from oper.base.arrays import Ints, as_int64
from oper.base.free_memory import FreeMemory
from oper.base.spoken import option
from oper.plan.plan import Plan
from oper.runtime.comm.exchange import AllToAll
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.comm.shared_segment import DeviceMemory, Segment
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.memory.symmetric_memory import SymmetricMemory
from oper.runtime.memory.touched_rows import TouchedRows
from oper.runtime.tables.optimizer_buckets import Bucket

_ALIGNMENT = 4096
_ADVICE = "plan for ranks with less memory each, use fewer replicas, or more hosts"
_MIN_BYTES_PER_SECOND = 1e8  # of allocating memory: a tenth of a busy core's speed
_HUGE_PAGE = 2 << 20  # bytes
_FEW_SLOTS = 1024  # by which even the smallest arenas of the host's memory can grow


class Heap:
    """Arenas of W widths: rows of `row_bytes[w]` and state of `state_bytes[w]` bytes per slot.

    `slots` [W, M] are the slots of each rank; all begin as zero. Made by all ranks together, all on
    the CPU or all on devices. `bases` [W, M + 1] are the addresses of each rank's rows, on this
    rank's device, 0 for ranks whose memory is not mapped here; `bases_on_host` is a copy for the
    host. In `symmetric` memory, if given, `far` [W, M + 1] are the addresses at which their rows
    would begin here. `touched` holds this rank's updated rows, once it is begun. `spare` is the
    growth that arenas of a width can have on devices, as a share of the largest of them. `advice`:
    the remedy in errors if there is no memory for them.
    """

    def __init__(
        self,
        node: Node,
        slots: Ints,
        row_bytes: Sequence[int],
        state_bytes: Sequence[int],
        device: Device | None = None,
        advice: str = _ADVICE,
        symmetric: SymmetricMemory | None = None,
        spare: float = 0.0,
    ) -> None:
        self.node, self.device = node, device or Cpu()
        slots = np.asarray(slots, dtype=np.int64)
        self._sizes = sizes = np.array([row_bytes, state_bytes], dtype=np.int64)  # [2, W]
        what = json.dumps([slots.tolist(), sizes.tolist(), self.device.kind, spare]).encode()
        node.agree(what, "the sizes of the heap and the kind of its device")
        on_host = self.device.kind == "cpu"
        largest_arenas = slots.max(axis=1, keepdims=True, initial=0)
        share, few = (1.0, _FEW_SLOTS) if on_host else (spare, 0)
        grown = slots + np.ceil(share * largest_arenas).astype(np.int64) + few
        self.most_slots: Ints = grown  # [W, M]
        # A rank's arenas, in order: rows of each width, then state of each width.
        room = _aligned(grown * sizes[:, :, None], _HUGE_PAGE if on_host else _ALIGNMENT)
        ends = np.cumsum(room.reshape(-1, node.ranks), axis=0).reshape(room.shape)
        self._starts = starts = ends - room  # [2, W, M]
        largest = int(room.sum(axis=(0, 1)).max())
        taken = _bytes_of(slots if on_host else grown, sizes)
        self.bytes = int(taken[node.rank])
        if symmetric is not None:
            self.bytes = symmetric.bytes_of(largest)
        check_memory(node, self.bytes, "the heap", self.device.free_memory(), advice)
        self._segments: Mapping[int, Segment | DeviceMemory]
        if symmetric is None:
            addresses = int(room[:, :, node.rank].sum())
            self._segments = node.share(self.device.segment(addresses, self.bytes))
        else:
            self._segments = symmetric.allocate(largest)
        mine = slots[:, node.rank] * sizes
        for start, size in zip(starts[:, :, node.rank].flat, mine.flat, strict=True):
            self._segments[node.rank].use_huge_pages(int(start), int(size))
        allocating = int(taken.max()) / _MIN_BYTES_PER_SECOND
        node.gather(b"", "allocate its heap", extra_seconds=allocating)
        # By rows and states, width and rank.
        self._slots, self.views = slots, self._views_of(slots)
        bases = np.zeros((len(slots), node.ranks + 1), dtype=np.int64)
        for peer, segment in self._segments.items():
            bases[:, peer] = segment.pointer + as_int64(starts[0, :, peer])
        self.bases_on_host = bases
        self.bases = torch.from_numpy(bases).to(self.device.torch_device)
        own = self._segments[node.rank].pointer
        far = torch.cat([own + as_int64(starts[0]), torch.zeros(len(slots), 1).long()], 1)
        self.far = far.to(self.device.torch_device)
        self._lock, self._writers, self._sealed = threading.Lock(), 0, False
        self.touched = TouchedRows(self.device)

    @classmethod
    def of_plan(
        cls,
        node: Node,
        plan: Plan,
        buckets: Sequence[Bucket],
        device: Device | None = None,
        symmetric: SymmetricMemory | None = None,
        spare: float = 0.0,
    ) -> "Heap":
        """Return the heap of a plan whose tables are in these buckets, with the state of their
        optimizers."""
        advice = _ADVICE
        if device is not None and device.kind != "cpu":
            advice = (
                f"a step takes about {plan.cost.step_bytes:,} bytes of a rank beside it; plan with "
                f"a larger {option('--reserve')} or less {option('--extra-memory')}, or for more "
                "ranks"
            )
        sizes = slot_bytes(plan, buckets)
        return cls(node, plan.layout.slots, *sizes, device, advice, symmetric, spare)

    @property
    def mapped_ranks(self) -> Collection[int]:
        """The ranks whose rows are read by pointer, this one's among them."""
        return self._segments.keys()

    def rows(self, width: int, rank: int | None = None) -> torch.Tensor:
        """Return the rows of a width at a rank of the node (None: this one), uint8 [slots,
        row_bytes]."""
        self.node.check_process()
        return self.views[0][width][self.node.rank if rank is None else rank]

    def state(self, width: int, rank: int | None = None) -> torch.Tensor:
        """Return the optimizer state of a width at a rank by slot, uint8 [slots, state_bytes]."""
        self.node.check_process()
        return self.views[1][width][self.node.rank if rank is None else rank]

    @property
    def slots(self) -> Ints:
        """The sizes of all arenas, [W, M]."""
        return self._slots

    @property
    def slot_bytes(self) -> Ints:
        """Bytes of a row and of its state together, [W]."""
        return np.asarray(self._sizes.sum(axis=0))

    def resize(self, slots: Ints) -> None:
        """Give the arenas these sizes [W, M], of at most `most_slots`; the content of slots that
        stay is kept. For all ranks, between two barriers. Memory beyond the new ends is not given
        back."""
        assert (slots <= self.most_slots).all()
        self._slots, self.views = slots, self._views_of(slots)
        self.touched.resize(slots[:, self.node.rank])
        if self.device.kind == "cpu":
            self.bytes = max(self.bytes, int(_bytes_of(slots, self._sizes)[self.node.rank]))

    def begin_touched(self) -> None:
        """Mark the slots of this rank that are updated from now on."""
        self.touched.begin(self._slots[:, self.node.rank])

    def bytes_at(self, slots: Ints) -> int:
        """Return the bytes of this rank's arenas in the host's memory if the arenas of all ranks
        have these sizes [W, M]."""
        return int(_bytes_of(slots, self._sizes)[self.node.rank])

    def _views_of(self, slots: Ints) -> list[list[dict[int, torch.Tensor]]]:
        return [
            [
                {
                    peer: segment.tensor(start[w, peer], (slots[w, peer], size[w]), torch.uint8)
                    for peer, segment in self._segments.items()
                }
                for w in range(len(slots))
            ]
            for start, size in zip(self._starts, self._sizes, strict=True)
        ]

    def all_slots(self, width: int) -> int:
        """Return the slots of a width at all ranks, other nodes included."""
        return int(self._slots[width].sum())

    def seal(self) -> None:
        """Make all arenas, also those of peers, read-only in this process, unless it is writing: a
        stray write then ends the process instead of changing rows that it serves."""
        if self._sealed or self._writers:
            return
        with self._lock:
            if not self._writers:
                self._protect(writable=False)

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Keep arenas writable inside; `seal` does nothing meanwhile."""
        with self._lock:
            self._writers += 1
            self._protect(writable=True)
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def _protect(self, writable: bool) -> None:
        if self._sealed == writable:
            for segment in self._segments.values():
                segment.protect(writable)
            self._sealed = not writable


@dataclass(frozen=True)
class TableMemory:
    """A module's tables in the memory of all ranks, and the ways to reach it, shared by the parts
    of an engine. `all_to_all` leads to other nodes, None if all ranks share memory; `symmetric` is
    the memory in which kernels read the rows of other ranks, None if they do not."""

    buckets: Sequence[Bucket]
    heap: Heap
    signals: Signals
    all_to_all: AllToAll | None
    symmetric: SymmetricMemory | None = None

    @classmethod
    def of_plan(
        cls,
        node: Node,
        plan: Plan,
        buckets: Sequence[Bucket],
        signals: Signals,
        device: Device,
        spare: float,
    ) -> "TableMemory":
        """Allocate the memory of a plan's tables, with `spare` as for the heap. To be called on all
        ranks."""
        symmetric = SymmetricMemory.of(node, plan, device)
        heap = Heap.of_plan(node, plan, buckets, device, symmetric, spare)
        return cls(buckets, heap, signals, AllToAll.of(node), symmetric)

    @property
    def node(self) -> Node:
        """The ranks that share memory with this one."""
        return self.heap.node


def _aligned(bytes: Ints, alignment: int) -> Ints:
    return -(-bytes // alignment) * alignment


def _bytes_of(slots: Ints, sizes: Ints) -> Ints:
    """Return the bytes of each rank's arenas of `slots` [W, M], if a row and its state take `sizes`
    [2, W] bytes: [M]."""
    return np.asarray(_aligned(slots * sizes[:, :, None], _ALIGNMENT).sum(axis=(0, 1)))


def slot_bytes(plan: Plan, buckets: Sequence[Bucket]) -> tuple[list[int], list[int]]:
    """Return the bytes of a row and of its state in a slot of each width of a plan, [W] each."""
    widths = len(plan.layout.slots)
    row_bytes, state_bytes = [0] * widths, [0] * widths
    for table, width in zip(plan.tables, plan.layout.width_of_table, strict=True):
        row_bytes[width] = table.row_bytes
    for bucket in buckets:
        needed = bucket.optimizer.state_bytes(bucket.dim)
        state_bytes[bucket.width] = max(state_bytes[bucket.width], needed)
    return row_bytes, state_bytes


def check_memory(
    node: Node,
    bytes: int,
    what: str,
    free: Sequence[FreeMemory],
    advice: str = _ADVICE,
) -> None:
    """Raise OperError on all ranks of the group, unless there is room for `bytes` of each of them.

    `free` is the memory left under each limit of this rank. To be called by all of them before any
    allocates its part. `advice`: the remedy if there is no room.
    """
    request = {
        "bytes": bytes,
        "limits": [(left.limited_by, left.identity, left.free_bytes) for left in free],
    }
    needed: dict[str, int] = {}
    room: dict[str, tuple[int, str]] = {}
    for message in node.gather(json.dumps(request).encode(), f"say how much {what} takes").values():
        asked = json.loads(message)
        for limited_by, identity, free_bytes in asked["limits"]:
            needed[identity] = needed.get(identity, 0) + asked["bytes"]
            room[identity] = min(
                room.get(identity, (free_bytes, limited_by)), (free_bytes, limited_by)
            )
    problem = ""
    for identity, total in needed.items():
        free_bytes, limited_by = room[identity]
        if total > free_bytes:
            problem = (
                f"{what} takes {total:,} bytes on the ranks of one node, {bytes:,} of them on rank "
                f"{node.rank}, and {limited_by} has {free_bytes:,} free: {advice}"
            )
    node.check_all(problem, f"say whether there is room for {what}")
