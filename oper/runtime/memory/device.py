"""The device of an engine: where its rows are, and the kernels that read them there."""

from typing import Any

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.base.free_memory import FreeMemory, free_memory
from oper.runtime.comm.shared_segment import DeviceSegment, Segment


class Cpu:
    """The processor and its memory."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    stream = 0

    def ops(self) -> Any:
        """The operators on this device's tensors."""
        return native.ops()

    def segment(self, bytes: int) -> Segment:
        """New memory for a heap, to be shared with the node's other ranks; zero."""
        return Segment.create(bytes, bytes, "heap")

    def free_memory(self) -> list[FreeMemory]:
        """What is left under each limit of this rank's heap."""
        return free_memory()

    def synchronize(self) -> None:
        """Wait until all that was started is done."""


class Cuda:
    """One CUDA device. Work is started on torch's current stream; nothing waits for it."""

    kind = "cuda"

    def __init__(self, torch_device: torch.device | str = "cuda") -> None:
        given = torch.device(torch_device)
        if given.type != "cuda":
            raise OperError(f"device {given}: a CUDA device was needed, as cuda:0")
        if not torch.cuda.is_available():
            raise OperError(
                f"device {given}: torch {torch.__version__} finds no CUDA device here; use the "
                "CPU, or a build of torch for CUDA and a machine that has a device"
            )
        number = torch.cuda.current_device() if given.index is None else given.index
        if number >= torch.cuda.device_count():
            raise OperError(
                f"device {given}: there are {torch.cuda.device_count()} CUDA devices here, "
                "numbered from 0"
            )
        self.torch_device = torch.device("cuda", number)
        self.ops()

    @property
    def stream(self) -> int:
        """The stream that work is started on, as the kernels take it."""
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    def ops(self) -> Any:
        """The operators on this device's tensors."""
        return native.device_ops()

    def segment(self, bytes: int) -> DeviceSegment:
        """New memory for a heap, to be shared with the node's other ranks; zero."""
        segment = DeviceSegment.create(bytes, self.torch_device)
        self.synchronize()  # so that others find it zero
        return segment

    def free_memory(self) -> list[FreeMemory]:
        """What is left of the device's memory."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        found = torch.cuda.get_device_properties(self.torch_device)
        return [FreeMemory(f"{self.torch_device}, {found.name},", f"gpu {found.uuid}", free_bytes)]

    def synchronize(self) -> None:
        """Wait until all that was started on the device is done."""
        torch.cuda.synchronize(self.torch_device)


Device = Cpu | Cuda
