"""The dense AllReduce: every rank sums a gradient of every replica, touched or not."""

from collections.abc import Sequence

from oper.base import native
from oper.runtime.allreduce.method import Tensors
from oper.runtime.allreduce.node_representatives import Proxies
from oper.runtime.allreduce.sliced_sum import SlicedSum
from oper.runtime.comm.node import Node
from oper.runtime.tables.row_gradients import RowGradients


class Dense:
    """A gradient of every replica. Untouched ones are told by their padding (padded_gradients.h).

    `replicas` and `dims` are those of each bucket; `header_bytes` are kept free before the
    gradients.
    """

    def __init__(
        self,
        node: Node,
        proxies: Proxies,
        replicas: Sequence[int],
        dims: Sequence[int],
        header_bytes: int = 0,
    ) -> None:
        self.read_bytes = 0
        self._replicas, self._dims = list(replicas), list(dims)
        self._size = self._floats(self._replicas)
        self._sum = SlicedSum(node, proxies, header_bytes, self._size)

    @property
    def shared_bytes(self) -> int:
        return self._sum.shared_bytes

    def mark(self, numbers: Tensors) -> None:
        pass

    def write(self, numbers: Tensors, grads: Tensors) -> None:
        buffer = self._sum.buffer(self._size)
        native.ops().aggregate_rows(numbers, grads, [], self._replicas, buffer)

    def reduce(self) -> None:
        self.read_bytes += self._sum.sum(self._size)

    def read(self) -> list[RowGradients]:
        result = []
        for sums in self._sums(self._replicas):
            numbers = native.ops().touched_rows(sums)
            all_touched = len(numbers) == len(sums)
            result.append(RowGradients(numbers, sums if all_touched else sums[numbers]))
        return result

    def _floats(self, rows: Sequence[int]) -> int:
        return sum(n * dim for n, dim in zip(rows, self._dims, strict=True))

    def _sums(self, rows: Sequence[int]) -> Tensors:
        """The sums of each bucket, [rows, dim]."""
        sizes = [n * dim for n, dim in zip(rows, self._dims, strict=True)]
        parts = self._sum.total(sum(sizes)).split(sizes)
        return [part.view(-1, dim) for part, dim in zip(parts, self._dims, strict=True)]
