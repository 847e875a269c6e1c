"""The accesses of the batches of a node's ranks, in memory of the host: an upper bound of the
touched replicas, whose exact number only devices know."""

from functools import partial

import torch

from oper.base.errors import OperError
from oper.cost.step_memory import with_slack
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, Segment
from oper.runtime.memory.device import Cuda


class RankAccesses:
    """The number of accesses of each rank of the node in a step. More than `enough` accesses of all
    ranks need no more room than `enough`."""

    def __init__(self, node: Node, device: Cuda, enough: int) -> None:
        self._device, self._enough = device, enough
        self._rank = node.peers.index(node.rank)
        size = LINE_BYTES * len(node.peers)
        lines = node.share_first(Segment.create(size, size, "accesses"))
        shape = [len(node.peers), LINE_BYTES // 8]
        self._accesses = lines.tensor(0, shape, torch.int64).numpy()[:, 0]
        self._most = 0  # of all ranks in a step so far

    def say(self, number: int) -> None:
        """Let the other ranks know the number of this rank."""
        self._write(number)
        if self._device.capture is not None:
            self._device.capture.check(partial(self._write, number))

    def _write(self, number: int) -> None:
        self._accesses[self._rank] = number

    def of_node(self, room: int | None = None) -> int:
        """Return the sum over all ranks of the node, once all ranks have said their numbers.

        A step that is captured gets `room`, or else a quarter more than any step needed, and raises
        OperError when it runs with more.
        """
        accesses = int(self._accesses.sum())
        self._most = max(self._most, accesses)
        if self._device.capture is not None:
            accesses = max(self._most, with_slack(self._most) if room is None else room)
            self._device.capture.check(partial(self._check, accesses))
        return accesses

    def _check(self, most: int) -> None:
        """Raise OperError if all ranks' batches need more room than a captured step has."""
        accesses = int(self._accesses.sum())
        if min(accesses, self._enough) > most:
            raise OperError(
                f"expected batches of up to {most:,} accesses on this node's ranks, which this "
                f"rank's step was captured for, got {accesses:,}: give the step of oper.graph_step "
                "the largest batches first, on all ranks"
            )
