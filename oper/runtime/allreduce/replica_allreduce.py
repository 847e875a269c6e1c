"""The sparse AllReduce of the replicas' gradients, locally aggregated (OPER §5.3).

Rows with a copy on every rank are updated by every rank, with the sum of all ranks' gradients. Of R
replicas a rank touches u in a step, all P ranks together U. The plan names one of three methods
(methods.py). In each, a rank reads this many bytes that another rank wrote; a ring AllReduce of x
bytes moves ring(x) = 2(P - 1)/P · x bytes, and a row is its float32 gradient of 4 · dim bytes:

    bitmap     P · R/8 + ring(U · row)   bitmaps of touched replicas, whose union numbers the rows
               that are summed
    dense      ring(R · row)             every replica has a row in the sum
    allgather  (P - 1) · u (row + 4)     all ranks receive all ids and rows, and sum

A bucket's replicas are numbered in the order of their slots, between which those of other buckets
may lie. The sums are equal bit by bit on all ranks, and for all methods within one node. A rank's
own bitmap is counted, as in the formula; headers of a few numbers are not. Over several nodes each
rank's own figure depends on its transfers for its node (proxies.py); if every rank is a node, all
bytes of the formula come over the network.

Devices carry out each method with the bits and the bytes of CPU ranks (device_bitmap.py,
device_dense.py, device_allgather.py).

Three of the engine's signals order the ranks of a node: `marked`, which says that a rank no longer
uses the last step's sums and that its bitmap is written; `reduced`; and `published`, which the
engine posts and waits for between `contribute` and `reduce`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from oper.base.errors import OperError
from oper.cost.allreduce import NodeSum
from oper.runtime.allreduce.device_allgather import DeviceAllGather
from oper.runtime.allreduce.device_bitmap import DeviceBitmap
from oper.runtime.allreduce.device_dense import DeviceDense
from oper.runtime.allreduce.methods import AllGather, Bitmap, Dense, Method, Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.comm.shared_segment import DeviceSegment
from oper.runtime.memory.device import Cuda, Device
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients

DeviceMethod = DeviceBitmap | DeviceDense | DeviceAllGather
METHODS: dict[str, type[Dense] | type[AllGather]] = {
    "bitmap": Bitmap,
    "dense": Dense,
    "allgather": AllGather,
}
DEVICE_METHODS: dict[str, type[DeviceMethod]] = {
    "bitmap": DeviceBitmap,
    "dense": DeviceDense,
    "allgather": DeviceAllGather,
}


class BucketReplicas(NamedTuple):
    """The replicas of a bucket: their slots, int64 ascending, and the dim of their rows. A bucket
    without any takes part with no rows."""

    slots: torch.Tensor
    dim: int


class ReplicaAllReduce:
    """One engine's AllReduce, of the replicas of its buckets.

    All ranks of the group make it together, and call begin, contribute, reduce and result once a
    step, in this order. The replicas of a bucket are the first of its groups (SortedRows.groups).
    """

    def __init__(
        self,
        method: str,
        node: Node,
        signals: Signals,
        buckets: Sequence[BucketReplicas],
        device: Device | None = None,
        node_sum: NodeSum = "at_once",
    ) -> None:
        self._signals = signals
        if method not in METHODS:
            raise OperError(
                f"the plan's AllReduce method is {method!r}, and it has replicas; "
                f"{', '.join(METHODS)} are known: make the plan again"
            )
        self._proxies = Proxies(node, device)
        replicas = Replicas(
            # If a width has one bucket, its replicas take the arena's first slots.
            [b.slots[:0] if _are_numbers(b.slots) else b.slots for b in buckets],
            [len(b.slots) for b in buckets],
            [b.dim for b in buckets],
            [number * (1 + node.ranks) for number in range(len(buckets))],
            node_sum,
        )
        self._method: Method
        if isinstance(device, Cuda):
            self._method = DEVICE_METHODS[method](node, self._proxies, device, replicas)
        else:
            self._method = METHODS[method](node, self._proxies, replicas)

    @property
    def bytes(self) -> torch.Tensor:
        """Bytes written by other ranks that this rank read in the last step, as the methods are
        charged: int64 [1], on the device."""
        read, network = self._method.read_bytes, self.network_bytes
        return torch.as_tensor(read + network if network else read).view(1)

    @property
    def network_bytes(self) -> int:
        """The part of `bytes` that came from other nodes."""
        return self._proxies.received_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's shared memory; they grow with the replicas touched in a step."""
        return self._method.shared_bytes

    @property
    def segments(self) -> list[DeviceSegment]:
        """The current memory of the gradients of the node's devices."""
        return self._method.segments.known if isinstance(self._method, DeviceMethod) else []

    def begin(self, step: int, rows: SortedRows) -> None:
        """Begin a step: mark the replicas among the rows of this rank's batch. The tensors that
        `result` returned in the last step are no longer used."""
        self._proxies.received_bytes = 0
        self._method.mark(rows)
        self._signals.post("marked", step)

    def contribute(self, step: int, sums: RowGradients) -> None:
        """Write the gradients of these replicas, for the others to read once they are
        `published`."""
        self._signals.wait("marked", step, f"mark its replicas (step {step})")
        self._method.write(sums)

    def reduce(self, step: int) -> None:
        """Sum this rank's part, once all ranks of the node have published."""
        self._method.reduce()
        self._signals.post("reduced", step)

    def result(self, step: int) -> RowGradients:
        """Return the replicas that any rank touched and their summed gradients, one group per
        bucket; they may lie in shared memory, and are to be used before the next `begin`."""
        self._signals.wait("reduced", step, f"sum replicas' gradients (step {step})")
        return self._method.read()

    def sums(self, step: int) -> list[RowGradients]:
        """Return the result of a step, as a list of the gradients that rows are updated by."""
        return [self.result(step)]


class NoReplicas:
    """The AllReduce of an engine without replicas: no rank marks, sends or updates any."""

    shared_bytes = 0
    bytes = torch.zeros(1, dtype=torch.int64)
    segments: Sequence[DeviceSegment] = ()

    def begin(self, step: int, rows: SortedRows) -> None:
        """See ReplicaAllReduce."""

    def contribute(self, step: int, sums: RowGradients) -> None:
        """See ReplicaAllReduce."""

    def reduce(self, step: int) -> None:
        """See ReplicaAllReduce."""

    def sums(self, step: int) -> list[RowGradients]:
        """See ReplicaAllReduce."""
        return []


def _are_numbers(slots: torch.Tensor) -> bool:
    """Say whether ascending slots are 0, 1, 2, …"""
    return not len(slots) or int(slots[-1]) == len(slots) - 1
