"""Memory of devices in which each rank of a node leaves gradients for the others."""

from functools import partial

from oper.runtime.comm.growing_segments import GrowingSegments
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import DeviceSegment
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.step_room import device_segment

_WHAT = "the gradients of a batch"  # the purpose of the memory, for errors


class GradientSegments(GrowingSegments):
    """The segments of all ranks of the node, made by all ranks together, at first of `bytes`
    bytes."""

    def __init__(self, node: Node, device: Cuda, bytes: int) -> None:
        # No method of this object: the memory would be freed only when garbage is collected.
        super().__init__(node, partial(device_segment, device, _WHAT), bytes)
        self._device = device

    @property
    def bytes(self) -> int:
        """Bytes of this rank's segment."""
        return self.mine.reserve_bytes

    def of_step(self, rank: int) -> DeviceSegment:
        """Return the segment of a rank, as `of` does. A step that is captured raises OperError when
        it runs after the rank has replaced the segment."""
        segment = self.of(rank)
        if self._device.capture is not None:
            self._device.capture.check(partial(self.check_same, rank, segment))
        return segment
