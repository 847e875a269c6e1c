"""Fetch path: one way in which rows reach the ranks that read them, and gradients their owners.

Each table of a module has one path, chosen once (choose_path.py):

    Pointers       rows are read in place, in memory that is mapped here (pointers.py)
    CopiedRows     distinct rows of the node's other ranks are copied first (copied_rows.py)
    RelayedRows    distinct rows of other nodes cross the network once per node (relayed_rows.py)
    RowsByAccess   rows of other nodes cross the network once per access (rows_by_access.py)
    KernelGets     kernels get rows of other nodes by NVSHMEM (kernel_gets.py)
    CachedTier     rows of the hosts' tier are read in caches (cached_tier.py)
    PooledBags     bags go to the nodes that have their rows, and return as sums (pooled_bags.py)

One kernel reads all tables of a module, so a step calls one path: the last two are paths OVER
another, serve their own tables, and leave the rest to the path below. Calls of a step, in order:

    prepare              the accesses of a batch become those that this rank reads
    count, read          rows are fetched, and added up to the output of the batch
    backward             around all that follows
    weight_gradients     rows are fetched again
    sum_gradients        gradients are summed by row, into this rank's mailbox
    exchange_gradients   gradients go to owners on other nodes
    updated              this rank's rows have their new values

A call is collective, in one order on all ranks, if its path reaches other nodes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from oper.base.arrays import Ints
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.memory.forwarded_bags import ForwardedBags
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.tables.row_gradients import RowGradients

_NOTHING = nullcontext()


class Accesses(NamedTuple):
    """The accesses of a batch's features, and the bags that they belong to (prepared_batch.py)."""

    addresses: torch.Tensor
    segment_offset: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    features: torch.Tensor


class Fetched(NamedTuple):
    """Addresses by which kernels read rows, and the place at which each rank's arenas begin."""

    addresses: torch.Tensor  # int64 [N]
    bases: torch.Tensor  # int64 [widths, ranks + 1], fetched rows last; then a source's
    buffers: Sequence[torch.Tensor] = ()  # of each width; they are kept alive here


@dataclass(frozen=True)
class Needs:
    """Requirements of a path on a step, and on the memory of a device that takes it.

    `rows`: the rows of a batch must be found before it is read; `runs`: its accesses must be sorted
    for that. `together`: hosts of several nodes wait for each other in a lookup. `shared_fetch`:
    ranks of a node fetch together, to the place of their last fetch. `messages`: rows or gradients
    are on their way in messages; `fetched_row_bytes`: see DeviceStep, oper/cost/step_memory.py.
    """

    rows: bool = False
    runs: bool = False
    together: bool = False
    shared_fetch: bool = False
    messages: bool = False
    fetched_row_bytes: int = 0


class Arrived(NamedTuple):
    """Gradients of this rank's rows that ranks of other nodes sent: a group for each of `buckets`,
    by the rank that sent them. `order` has the ranks whose gradients are added up, in turn."""

    parts: Mapping[int, RowGradients] = {}
    buckets: Sequence[int] = ()
    order: Sequence[int] = ()

    def of_bucket(
        self, bucket: int, mailboxes: Mapping[int, RowGradients], group: int
    ) -> tuple[list[RowGradients], list[int]]:
        """Return the parts that have gradients of a bucket's rows, in the order of additions, and
        the bucket's group in each; `group` is its group in the mailboxes of the node's ranks."""
        if bucket not in self.buckets:
            return list(mailboxes.values()), [group] * len(mailboxes)
        sent = self.buckets.index(bucket)
        parts = [self.parts[r] if r in self.parts else mailboxes[r] for r in self.order]
        return parts, [sent if r in self.parts else group for r in self.order]


class FetchPath:
    """One fetch path of an engine. A path overrides `fetch`, and the methods whose behaviour
    differs from that for rows in the memory of this node."""

    needs = Needs()

    def __init__(self, memory: TableMemory) -> None:
        self._heap, self._buckets, self._node = memory.heap, memory.buckets, memory.node
        self._rank, self._ranks = memory.node.rank, memory.node.ranks
        self._device = memory.heap.device

    # Preparation and reading.

    def prepare(self, given: Accesses) -> tuple[Accesses, ForwardedBags | None]:
        """Return the accesses that this rank reads for a batch, and its forwarded bags."""
        return given, None

    def count(self, batch: PreparedBatch, counters: Counters) -> None:
        """Count the traffic of a lookup that the rows themselves do not tell."""

    def read(self, batch: PreparedBatch) -> torch.Tensor:
        """Return the output of a batch, flat float32 [out_elements]."""
        self._device.keep(batch.read)
        with self.reading():
            rows = self.fetch(batch)
            return self.add_up(batch, rows, batch.features, batch.out_elements)

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which work that reads rows may be started."""
        return _NOTHING

    def fetch(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """Bring the rows of a batch to where kernels can read them, except those of the buckets
        `but`, which come by another path."""
        raise NotImplementedError

    def fetch_again(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """Fetch the rows of a batch in its backward pass, as `fetch` does."""
        return self.fetch(batch, but)

    def add_up(
        self, batch: PreparedBatch, rows: Fetched, features: torch.Tensor, elements: int
    ) -> torch.Tensor:
        """Return the sums of the bags of some of a batch's features, flat float32 [elements]."""
        sums: torch.Tensor = self._device.ops().pooled_rows(
            rows.addresses,
            batch.offsets,
            batch.weights,
            features,
            rows.bases,
            self._rank,
            elements,
            torch.float32,
            self._device.stream,
            batch.report,
        )
        return sums

    # Backward.

    def backward(
        self, batch: PreparedBatch, grad: torch.Tensor, counters: Counters
    ) -> AbstractContextManager[tuple[PreparedBatch, torch.Tensor]]:
        """Return a context that begins with the exchange of outputs' gradients, and gives the batch
        and the gradient of its output by which the backward pass goes on."""
        return nullcontext((batch, grad))

    def weight_gradients(self, batch: PreparedBatch, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradients of a batch's weights [N], from that of its output."""
        with self.reading():
            return self.weigh(batch, grad, self.fetch_again(batch), batch.features)

    def weigh(
        self, batch: PreparedBatch, grad: torch.Tensor, rows: Fetched, features: torch.Tensor
    ) -> torch.Tensor:
        """Return the weights' gradients of some features' accesses, from that of their sums."""
        self._device.keep(batch.read)
        gradients: torch.Tensor = self._device.ops().weight_gradients(
            grad,
            rows.addresses,
            batch.offsets,
            batch.weights,
            features,
            rows.bases,
            self._rank,
            self._device.stream,
            batch.report,
        )
        return gradients

    def sum_gradients(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        sum_groups: Callable[[torch.Tensor, slice], None],
    ) -> None:
        """Sum the gradients of a batch's rows: `sum_groups` does so for some groups of each bucket,
        from the gradient of the output."""
        sum_groups(grad, slice(None))

    def exchange_gradients(self, mailbox: Callable[[int], RowGradients], step: int) -> Arrived:
        """Send gradients to owners on other nodes, and return those of this rank's rows. `mailbox`
        reads the gradients that a rank of this node has."""
        return Arrived()

    def carry(self, digests: Ints) -> bool:
        """Send `digests` [ranks] along with gradients, each rank's from the rank itself; return
        whether this path can."""
        return False

    def updated(self, step: int) -> None:
        """Tell other nodes that this rank's rows are updated."""

    # The engine's other calls.

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's shared memory through which rows pass."""
        return 0

    def check_graphs(self) -> None:
        """Raise OperError if a graph of torch.compile cannot look the tables up."""

    def resize(self, slots: Ints) -> None:
        """Follow the arenas, which have these slots from now on, [W, M]."""

    def close(self) -> None:
        """Leave the other ranks."""


class PathOver(FetchPath):
    """A path of some tables over the path of all others, `below`."""

    def __init__(self, memory: TableMemory, below: FetchPath) -> None:
        super().__init__(memory)
        self.below, self.needs = below, below.needs

    def prepare(self, given: Accesses) -> tuple[Accesses, ForwardedBags | None]:
        return self.below.prepare(given)

    def count(self, batch: PreparedBatch, counters: Counters) -> None:
        self.below.count(batch, counters)

    def reading(self) -> AbstractContextManager[None]:
        return self.below.reading()

    def fetch(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        return self.below.fetch(batch, but)

    def fetch_again(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        return self.below.fetch_again(batch, but)

    def add_up(
        self, batch: PreparedBatch, rows: Fetched, features: torch.Tensor, elements: int
    ) -> torch.Tensor:
        return self.below.add_up(batch, rows, features, elements)

    def backward(
        self, batch: PreparedBatch, grad: torch.Tensor, counters: Counters
    ) -> AbstractContextManager[tuple[PreparedBatch, torch.Tensor]]:
        return self.below.backward(batch, grad, counters)

    def sum_gradients(
        self,
        batch: PreparedBatch,
        grad: torch.Tensor,
        sum_groups: Callable[[torch.Tensor, slice], None],
    ) -> None:
        self.below.sum_gradients(batch, grad, sum_groups)

    def exchange_gradients(self, mailbox: Callable[[int], RowGradients], step: int) -> Arrived:
        return self.below.exchange_gradients(mailbox, step)

    def carry(self, digests: Ints) -> bool:
        return self.below.carry(digests)

    def updated(self, step: int) -> None:
        self.below.updated(step)

    @property
    def shared_bytes(self) -> int:
        return self.below.shared_bytes

    def check_graphs(self) -> None:
        self.below.check_graphs()

    def resize(self, slots: Ints) -> None:
        self.below.resize(slots)

    def close(self) -> None:
        self.below.close()
