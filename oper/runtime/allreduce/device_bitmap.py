"""The bitmap method on devices (OPER §5.3), with the bits of the processor's sums (methods.py).

No count comes to the host on one node: buffers have room for as many replicas as all ranks have
accesses, or for all replicas if there are fewer (rank_accesses.py).

Memory of a rank that the others read, in addition to the buffers of the sum (device_sliced_sum.py):

    int64    [words]   its bitmap of touched replicas
"""

import functools

import torch

from oper.cost.step_memory import most_values
from oper.runtime.allreduce.device_sliced_sum import DeviceSlicedSum
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.rank_accesses import RankAccesses
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import aligned
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients


class DeviceBitmap:
    """A gradient of every replica that any rank touched, on the ranks' devices."""

    def __init__(self, node: Node, proxies: Proxies, device: Cuda, replicas: Replicas) -> None:
        self._device, self._rank = device, node.peers.index(node.rank)
        self._replicas = replicas = replicas.on(device.torch_device)
        words = sum(replicas.words)
        bitmaps = node.share(device.segment(aligned(8 * words), aligned(8 * words)))
        self._bitmaps = [s.tensor(0, [words], torch.int64) for s in bitmaps.values()]
        self._bitmap_bytes = bitmaps[node.rank].reserve_bytes
        self._sum = DeviceSlicedSum(node, proxies, device, replicas)
        self.segments = self._sum.segments
        self._proxies = proxies
        self._accesses = RankAccesses(node, device, sum(replicas.counts))
        self._values = 0  # in this step's sum
        self._united: tuple[torch.Tensor, torch.Tensor]  # slots and groups of touched replicas

    @property
    def read_bytes(self) -> torch.Tensor:
        return self._sum.read_bytes

    @property
    def shared_bytes(self) -> int:
        return self._bitmap_bytes + self.segments.bytes

    def mark(self, rows: SortedRows) -> None:
        self._accesses.say(len(rows.slots))
        self._sum.begin(sum(bitmap.nbytes for bitmap in self._bitmaps))
        self._device.ops().mark_replicas(
            rows.slots,
            rows.before,
            self._replicas.groups,
            self._replicas.slots,
            self._replicas.counts,
            self._bitmaps[self._rank],
            self._device.stream,
        )

    def write(self, sums: RowGradients) -> None:
        replicas = self._replicas
        bitmaps, accesses = self._over_all_nodes()
        most_rows = min(sum(replicas.counts), accesses)
        size = aligned(4 * most_values(most_rows, replicas.dims))
        self._values = min(4 * self._sum.most_values, size) // 4
        self._united = self._device.ops().unite_replicas(
            bitmaps,
            replicas.slots,
            replicas.counts,
            replicas.dims,
            most_rows,
            self._device.stream,
        )
        self._sum.write(sums, *self._united, self._values)

    def _over_all_nodes(self) -> tuple[list[torch.Tensor], int]:
        """Return bitmaps in which every touched replica is marked, and the number of accesses of
        all ranks."""
        accesses = self._accesses.of_node(self._sum.most_rows)
        action, proxies = "unite touched replicas", self._proxies
        if not proxies.proxies:
            return self._bitmaps, accesses
        known = proxies.received_bytes  # counts are not charged
        counts = proxies.exchange_into(
            torch.empty(len(proxies.proxies), dtype=torch.int64),
            dict.fromkeys(proxies.clients, torch.tensor([accesses])),
            dict.fromkeys(proxies.proxies, 1),
            action,
        )
        proxies.received_bytes = known
        of_node = functools.reduce(torch.bitwise_or, self._bitmaps)
        received = proxies.exchange(
            dict.fromkeys(proxies.clients, of_node),
            dict.fromkeys(proxies.proxies, len(of_node)),
            torch.int64,
            action,
        )
        return [of_node, *received.values()], accesses + sum(int(n) for n in counts.values())

    def reduce(self) -> None:
        self._sum.sum()

    def read(self) -> RowGradients:
        slots, groups = self._united
        del self._united  # kept no longer than needed: the next step makes new ones
        total = self._device.new(self._values, torch.float32)
        self._sum.gather(total)
        return RowGradients(slots, groups, total)
