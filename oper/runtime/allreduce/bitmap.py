"""The bitmap AllReduce: bitmaps of touched replicas are united, and only those replicas summed.

Equal bitmaps on all ranks give equal numberings of the touched replicas, so that the ranks' buffers
have the same rows in the same places.
"""

import functools
from collections.abc import Sequence

import torch

from oper.base import native
from oper.runtime.allreduce.dense import Dense
from oper.runtime.allreduce.method import Tensors
from oper.runtime.allreduce.node_representatives import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.tables.row_gradients import RowGradients


class Bitmap(Dense):
    """A gradient of every replica that any rank touched."""

    def __init__(
        self, node: Node, proxies: Proxies, replicas: Sequence[int], dims: Sequence[int]
    ) -> None:
        words = sum(-(-n // 64) for n in replicas)
        super().__init__(node, proxies, replicas, dims, header_bytes=8 * words)
        bitmaps = self._sum.headers([words], torch.int64)
        self._bitmap, self._bitmaps = bitmaps[node.rank], list(bitmaps.values())
        self._proxies = proxies
        self._union: Tensors = []

    def mark(self, numbers: Tensors) -> None:
        native.ops().mark_slots(numbers, self._replicas, self._bitmap)

    def write(self, numbers: Tensors, grads: Tensors) -> None:
        bitmaps = self._bitmaps
        self.read_bytes += sum(bitmap.nbytes for bitmap in bitmaps)
        if self._proxies.proxies:
            of_node = functools.reduce(torch.bitwise_or, bitmaps)
            received = self._proxies.exchange(
                dict.fromkeys(self._proxies.clients, of_node),
                dict.fromkeys(self._proxies.proxies, len(of_node)),
                torch.int64,
                "unite touched replicas",
            )
            bitmaps = [of_node, *received.values()]
        self._union = native.ops().unite_slots(bitmaps, self._replicas)
        self._size = self._floats([len(touched) for touched in self._union])
        buffer = self._sum.buffer(self._size)
        native.ops().aggregate_rows(numbers, grads, self._union, self._replicas, buffer)

    def read(self) -> list[RowGradients]:
        sums = self._sums([len(touched) for touched in self._union])
        return [RowGradients(*part) for part in zip(self._union, sums, strict=True)]
