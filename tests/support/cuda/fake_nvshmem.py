"""The emulated library of the kernels for NVSHMEM, and the fake NVSHMEM in it (fake_nvshmem.h)."""

import ctypes
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from oper.base import native
from tests.support.cuda.emulator import Emulator


class Counts(NamedTuple):
    """What a process asked for so far; `left` are gets that it never waited for."""

    gets: int
    bytes: int
    quiets: int
    left: int


class FakeNvshmem(Emulator):
    """What tests set of the fake, and ask it, in the library that these processes use."""

    def node(self, number: int) -> None:
        """The node that this process says it is on; before NVSHMEM starts."""
        self._library.fake_nvshmem_node(number)

    def version(self, number: int) -> None:
        """The version that it says it is, such as 30405."""
        self._library.fake_nvshmem_version(number)

    def counts(self) -> Counts:
        """The gets of this process."""
        found = (ctypes.c_uint64 * 4)()
        self._library.fake_nvshmem_counts(found)
        return Counts(*found)


_started: dict[str, FakeNvshmem] = {}  # NVSHMEM starts once a process


def start(library: str, rank: int, group: Any, node: int) -> FakeNvshmem:
    """Load the library, and start the fake on all ranks of a group together."""
    if library not in _started:
        ops = native.ops()
        ops.load_nvshmem_library(library, "")
        fake = FakeNvshmem(library)  # type: ignore[arg-type]
        fake.node(node)
        id = ops.nvshmem_unique_id()
        dist.broadcast(id, 0, group=group)
        ops.start_nvshmem(id, rank, dist.get_world_size(group), torch.device("cpu"))
        _started[library] = fake
    return _started[library]
