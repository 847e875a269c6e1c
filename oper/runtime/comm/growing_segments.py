"""Growing segments: device memory that each rank of a node shares, and may replace by more.

Device memory does not grow in place, and ranks need more of it at different times. So a rank that
needs more makes new memory with undefined content, sends its descriptor to the others and goes on.
Then it increments its GENERATION, in host memory that all ranks have mapped. Ranks that read the
segment look there first, once they have waited for its content: a rank that sees a new generation
knows that the descriptor was sent before, and maps the new memory in place of the old.

Nobody needs to keep the old memory for others: it belongs to each rank that has it mapped, and is
freed when the last of them has replaced it. But its owner may not write to the new memory while
others still have to read the old content, because they would find the new.
"""

from collections.abc import Callable

import torch

from oper.base.errors import OperError
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, DeviceSegment, Segment


class GrowingSegments:
    """The segments of all ranks of the node, made by all ranks together, at first of `bytes` bytes;
    `create` allocates memory of at least the given bytes on this rank's device."""

    def __init__(self, node: Node, create: Callable[[int], DeviceSegment], bytes: int) -> None:
        self._node, self._create, self._channel = node, create, node.new_channel()
        size = LINE_BYTES * len(node.peers)  # a line a generation
        lines = node.share_first(Segment.create(size, size, "generations"))
        shared = lines.tensor(0, [len(node.peers), LINE_BYTES // 8], torch.int64)
        # NumPy arrays, whose elements are read in a tenth of the time.
        self._generations = dict(zip(node.peers, shared[:, :1].numpy(), strict=True))
        self._segments = node.share(create(bytes))
        self._known = dict.fromkeys(node.peers, 0)
        lines.close()  # mapped memory stays
        for segment in self._segments.values():
            segment.close()

    @property
    def mine(self) -> DeviceSegment:
        """The segment of this rank."""
        return self._segments[self._node.rank]

    def grow(self, bytes: int) -> None:
        """Replace this rank's segment by one of at least `bytes` bytes, with undefined content.

        To be called once all other ranks have read the content of the old segment, and before this
        rank says that there is something to read. Raise OperError if there is no memory, or
        LostRankError with the ranks that are gone or do not take the descriptor.
        """
        rank = self._node.rank
        segment, generation = self._create(bytes), self._known[rank] + 1
        try:
            self._node.send(segment, self._channel, generation)
        finally:
            segment.close()
        self._segments[rank], self._known[rank] = segment, generation
        self._generations[rank][0] = generation

    def of(self, rank: int) -> DeviceSegment:
        """Return the segment of a rank of the node that has said that there is something to read.
        It is the same object until the rank has replaced it.

        Raise OperError if the segment cannot be mapped here, or if the rank is gone without having
        sent it.
        """
        generation = int(self._generations[rank][0])
        if generation != self._known[rank]:
            segment = self._node.receive(self.mine, self._channel, generation, rank)
            segment.close()
            self._segments[rank], self._known[rank] = segment, generation
        return self._segments[rank]

    @property
    def known(self) -> list[DeviceSegment]:
        """The segments of all ranks, as far as this rank has seen."""
        return list(self._segments.values())

    def check_same(self, rank: int, segment: DeviceSegment) -> None:
        """Raise OperError if the rank, which has said that there is something to read, has replaced
        the segment."""
        if self.of(rank) is not segment:
            raise OperError(
                f"rank {rank}'s batch needed more memory than any before, and this rank's step "
                "was captured with what there was: give the step of oper.graph_step the largest "
                "batches first, on all ranks"
            )
