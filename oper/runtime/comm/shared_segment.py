"""Segments: anonymous shared memory that grows in place, reached only by its descriptors.

A segment is a memfd. The kernel frees it when the last process that has it open or mapped is
gone, however that ended, so nothing is left behind; /dev/shm and its limits are not involved.
It is mapped with a reserve of addresses beyond its end: growing it makes these pages usable in
all processes that have mapped it, at the addresses they already know.

A device's memory is shared in the same way, by the descriptors that its driver gives; its size
stays as it is.
"""

import fcntl
import math
import os
import weakref
from collections.abc import Sequence

import torch

from oper.base import native
from oper.base.errors import OperError, first_line
from oper.base.free_memory import free_memory

LINE_BYTES = 64  # of the caches
RESERVE_BYTES = 1 << 38  # addresses, not memory, for segments that grow with the largest batch
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PIECE_BYTES = 1 << 26


class Segment:
    """Shared memory of `bytes` bytes, zero until it is written, at `pointer`."""

    def __init__(self, descriptor: int, reserve_bytes: int) -> None:
        """Map the file of `descriptor`, and own the descriptor. See `create` and `attach`."""
        self.descriptor = descriptor
        # Closes the descriptor now: no views or growth after this, and views that exist stay valid.
        self.close = weakref.finalize(self, os.close, descriptor)
        self._known_bytes = 0  # it has at least these: it never shrinks
        self.reserve_bytes = -(-max(reserve_bytes, 1) // _PAGE) * _PAGE
        try:
            self._map = native.ops().map_segment(descriptor, self.reserve_bytes)
        except RuntimeError as error:
            raise OperError(
                f"{first_line(error)}; this process may reserve fewer addresses than "
                "that: see `ulimit -v`"
            ) from error
        self.pointer: int = self._map.data_ptr()

    @classmethod
    def create(
        cls, bytes: int, reserve_bytes: int, name: str, used_bytes: int | None = None
    ) -> "Segment":
        """Return new shared memory. `name` is seen in /proc/PID/maps; several segments may have the
        same. `used_bytes`, if given, is the smaller part of it that will be written to for now.

        Raise OperError if the machine or the control group has less memory left.
        """
        descriptor = os.memfd_create(f"oper-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        segment = cls(descriptor, max(bytes, reserve_bytes))
        # A file that shrank would turn reads of peers into SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        segment.grow(bytes, used_bytes)
        return segment

    @classmethod
    def attach(cls, descriptor: int, reserve_bytes: int) -> "Segment":
        """Return shared memory that a peer created; the segment owns the descriptor from now on."""
        return cls(descriptor, reserve_bytes)

    @property
    def bytes(self) -> int:
        """The segment's size now; any process may have grown it."""
        return os.fstat(self.descriptor).st_size

    def grow(self, bytes: int, used_bytes: int | None = None) -> None:
        """Make the segment at least `bytes` large, of which `used_bytes` are new memory: the whole
        growth unless given. Peers see it without mapping the segment again; nothing moves."""
        if bytes <= self.bytes:
            return
        new_bytes = bytes - self.bytes if used_bytes is None else used_bytes
        if bytes > self.reserve_bytes:
            raise OperError(
                f"a segment of shared memory cannot grow to {bytes:,} bytes: "
                f"{self.reserve_bytes:,} were reserved when it was made"
            )
        for left in free_memory():
            if new_bytes > left.free_bytes:
                raise OperError(
                    f"expected {new_bytes:,} free bytes of shared memory, got {left.free_bytes:,} "
                    f"of {left.limited_by}: make tables or batches smaller, or use more hosts"
                )
        os.ftruncate(self.descriptor, bytes)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the bytes from `offset` on; it keeps the memory mapped as long as it
        lives."""
        end = offset + math.prod(shape) * dtype.itemsize
        if end > self._known_bytes:
            self._known_bytes = self.bytes
        if offset < 0 or end > self._known_bytes:
            raise OperError(
                f"bytes {offset:,} to {end:,} of a segment of {self._known_bytes:,} were asked for"
            )
        return self._map[offset:end].view(dtype).view(tuple(shape))

    def use_huge_pages(self, offset: int, bytes: int) -> bool:
        """Allocate a part now, in pages of 2 MiB, in which random reads miss the TLB far less
        often.

        Return whether the kernel had enough of them; the rest gets small pages when first touched.
        To be called before others use the segment. Needs Linux 6.1 and no setting or privilege.
        """
        # In pieces, because signals are handled between them.
        part = self._map[offset : offset + bytes]
        return all(native.ops().huge_pages(piece) for piece in part.split(_PIECE_BYTES))

    def protect(self, writable: bool) -> None:
        """Make the memory writable in this process, or read-only: a write to read-only memory ends
        the process (SIGSEGV). Peers decide for themselves."""
        native.ops().protect(self._map, writable)


class DeviceMemory:
    """Memory of a device that ranks share, `reserve_bytes` bytes from `pointer` on."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.reserve_bytes = memory.numel()
        self.pointer: int = memory.data_ptr()

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the bytes from `offset` on; it keeps the memory mapped as long as it
        lives."""
        end = offset + math.prod(shape) * dtype.itemsize
        return self.memory[offset:end].view(dtype).view(tuple(shape))

    def use_huge_pages(self, offset: int, bytes: int) -> bool:
        """Return True: the driver's pages are 2 MiB already."""
        return True

    def protect(self, writable: bool) -> None:
        """Do nothing: devices have no protection that could be changed while kernels run."""


class DeviceSegment(DeviceMemory):
    """Memory of a device that other ranks map by a descriptor."""

    def __init__(self, memory: torch.Tensor, descriptor: int) -> None:
        """See `create` and `attach`. The descriptor is owned."""
        super().__init__(memory)
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, bytes: int, device: torch.device) -> "DeviceSegment":
        """Return new memory of at least `bytes` bytes, with undefined content."""
        try:
            memory, descriptor = native.ops().create_device_segment(max(bytes, 1), device)
        except RuntimeError as error:
            raise OperError(
                f"expected {bytes:,} bytes of memory on {device}, got none: {first_line(error)}"
            ) from error
        return cls(memory, descriptor)

    def attach(self, descriptor: int, reserve_bytes: int) -> "DeviceSegment":
        """Return memory that another rank created, mapped for this segment's device."""
        try:
            memory = native.ops().attach_device_segment(
                descriptor, reserve_bytes, self.memory.device
            )
        except RuntimeError as error:
            os.close(descriptor)
            raise OperError(
                f"{first_line(error)}. Ranks of one host read each other's rows by mapped memory: "
                "each must see the devices of all (CUDA_VISIBLE_DEVICES unset, or one list for all "
                "ranks), these must have access to each other (`nvidia-smi topo -p2p r`), and "
                "parts of one device (MIG) have none"
            ) from error
        return DeviceSegment(memory, descriptor)

    def zero(self) -> None:
        """Set all of it to zero, in the order of the device's work."""
        self.memory.zero_()


def aligned(bytes: int) -> int:
    """Return the next offset at which a cache line begins."""
    return -(-bytes // LINE_BYTES) * LINE_BYTES
