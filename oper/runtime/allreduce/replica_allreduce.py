"""The sparse AllReduce of the replicas' gradients, locally aggregated (OPER §5.3).

Rows with a copy on every rank are updated by every rank, with the sum of all ranks' gradients. Of R
replicas a rank touches u in a step, all P ranks together U. The plan names one of three methods
(methods.py); this is how many bytes a rank reads in each that another rank wrote, where ring(x) =
2(P - 1)/P · x is what a ring AllReduce of x bytes moves, and a row is its float32 gradient of
4 · dim bytes:

    bitmap     P · R/8 + ring(U · row)   bitmaps of touched replicas, whose union numbers the rows
               that are summed
    dense      ring(R · row)             every replica has a row in the sum
    allgather  (P - 1) · u (row + 4)     all ranks receive all ids and rows, and sum

A bucket's replicas are numbered in the order of their slots, between which those of other buckets
may lie. The sums are equal bit by bit on all ranks, and for all methods within one node. A rank's
own bitmap is counted, as in the formula; headers of a few numbers are not. Over several nodes each
rank's own figure depends on what it transfers for its node (proxies.py); where every
rank is a node, all of the formula comes over the network.

Three of the engine's signals order the ranks of a node: `marked`, which says that a rank no longer
uses the last step's sums and that its bitmap is written; `reduced`; and `published`, which the
engine posts and waits for between `contribute` and `reduce`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from oper.base.errors import OperError
from oper.runtime.allreduce.methods import AllGather, Bitmap, Dense, Method, Tensors
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.tables.row_gradients import RowGradients

METHODS: dict[str, type[Dense] | type[AllGather]] = {
    "bitmap": Bitmap,
    "dense": Dense,
    "allgather": AllGather,
}


class BucketReplicas(NamedTuple):
    """The replicas of a bucket: their slots, int64 ascending, and the dim of their rows."""

    slots: torch.Tensor
    dim: int


class ReplicaAllReduce:
    """One engine's AllReduce, of the replicas of its buckets.

    All ranks of the group make it together, and call begin, contribute, reduce and result once a
    step, in this order.
    """

    def __init__(
        self, method: str, node: Node, signals: Signals, buckets: Sequence[BucketReplicas]
    ) -> None:
        self._signals = signals
        self._method: Method | None = None
        self._proxies: Proxies | None = None
        self._slots: Tensors = []
        self._grads: Tensors = []
        self._numberings = [_Numbering(bucket.slots) for bucket in buckets]
        self._numbers: Tensors = []
        replicas = [len(bucket.slots) for bucket in buckets]
        if node.ranks == 1 or not any(replicas):
            return  # own gradients are the sums
        if method not in METHODS:
            raise OperError(
                f"the plan's AllReduce method is {method!r}, and it has replicas; "
                f"{', '.join(METHODS)} are known: make the plan again"
            )
        self._proxies = Proxies(node)
        dims = [bucket.dim for bucket in buckets]
        self._method = METHODS[method](node, self._proxies, replicas, dims)

    @property
    def bytes(self) -> int:
        """What this rank read in the last step that others wrote, as the methods are charged."""
        return 0 if self._method is None else self._method.read_bytes + self.network_bytes

    @property
    def network_bytes(self) -> int:
        """The part of `bytes` that came from other nodes."""
        return 0 if self._proxies is None else self._proxies.received_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's shared memory; they grow with what is touched in a step."""
        return 0 if self._method is None else self._method.shared_bytes

    def begin(self, step: int, slots: Tensors) -> None:
        """The replicas touched here, of each bucket: int64, ascending. The tensors that `result`
        gave in the last step are no longer used."""
        self._slots = slots
        if self._method is not None and self._proxies is not None:
            self._method.read_bytes = self._proxies.received_bytes = 0
            self._numbers = [n.numbers(s) for n, s in zip(self._numberings, slots, strict=True)]
            self._method.mark(self._numbers)
            self._signals.post("marked", step)

    def contribute(self, step: int, grads: Tensors) -> None:
        """Their gradients, float32 [touched, dim], for the others to read when `published`."""
        self._grads = grads
        if self._method is not None:
            self._signals.wait("marked", step, f"mark its replicas (step {step})")
            self._method.write(self._numbers, grads)

    def reduce(self, step: int) -> None:
        """Sum this rank's part, once all ranks of the node have published."""
        if self._method is not None:
            self._method.reduce()
            self._signals.post("reduced", step)

    def result(self, step: int) -> list[RowGradients]:
        """The replicas of each bucket that any rank touched and their summed gradients, a group
        each; they may lie in shared memory, and are to be used before the next `begin`."""
        if self._method is None:
            return list(map(RowGradients.of_rows, self._slots, self._grads))
        self._signals.wait("reduced", step, f"sum replicas' gradients (step {step})")
        sums = zip(self._numberings, self._method.read(), strict=True)
        return [RowGradients.of_rows(n.slots(part.numbers), part.grads) for n, part in sums]


class _Numbering:
    """The replicas of a bucket, by number and by slot."""

    def __init__(self, slots: torch.Tensor) -> None:
        # Where a width has one bucket, its replicas take the arena's first slots, and the slots
        # are the numbers.
        first = not len(slots) or int(slots[-1]) == len(slots) - 1
        self._slots = None if first else slots

    def numbers(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self._slots is None else torch.searchsorted(self._slots, slots)

    def slots(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if self._slots is None else self._slots[numbers]
