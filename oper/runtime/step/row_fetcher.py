"""Reading the rows of a batch, from wherever they are, and pooling them (§5: retrieve-based).

    raw        every access reads its row, through a pointer into the owner's arena
    distinct   every distinct remote row is copied once into a buffer here, and pooled from there
    pooled     every access reads its row by pointer, and bags that read rows of other nodes are
               forwarded there (pooled_bags.py)

To the kernels the buffer is one more rank, number M: accesses that read it get addresses in it.

Rows of ranks that share no memory come over the network (row_exchange.py), distinct ones once for
all ranks of a node (relayed_rows.py); to the kernels, the owner's arena begins where they came to.
Devices whose transport is NVSHMEM read them in the lookup's kernel itself, or distinct ones into
the buffer by a kernel.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.plan.layout import SLOT_BITS
from oper.runtime.comm.shared_segment import aligned
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.pooled_bags import BagForwarding
from oper.runtime.fetch_paths.relayed_rows import RowRelay
from oper.runtime.fetch_paths.row_exchange import RowExchange
from oper.runtime.fetch_paths.row_source import Fetched, RowSource
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import BatchRows, PreparedBatch, Runs
from oper.runtime.memory.symmetric_memory import SymmetricMemory
from oper.runtime.tables.kernel_structs import FEATURE

_LOOKUP = FEATURE.names.index("lookup") if FEATURE.names else 0


class RowFetcher:
    """The rows of all ranks as one of them reads them; `distinct`: those of other ranks once each.
    `far` says which lookups may read rows of ranks whose memory is not mapped, bool [lookups];
    `exchange` leads to other nodes, and is united where rows are distinct; `forwarding` is None
    where no bags go there."""

    def __init__(
        self,
        memory: TableMemory,
        source: RowSource | None,
        distinct: bool,
        far: torch.Tensor,
        exchange: RowExchange | None = None,
        forwarding: BagForwarding | None = None,
    ) -> None:
        self.source, self.forwarding = source, forwarding
        self._heap, self._buckets, self._node = memory.heap, memory.buckets, memory.node
        self._rank, self._ranks = memory.node.rank, memory.node.ranks
        self._distinct, self._exchange = distinct, exchange
        self.relay = RowRelay(memory, exchange) if exchange is not None and distinct else None
        self._row_bytes = np.array([self._heap.rows(b.width).shape[1] for b in self._buckets])
        self._device = self._heap.device
        self._symmetric, self._far = memory.symmetric, far
        self._sizes = torch.from_numpy(self._row_bytes).to(self._device.torch_device)
        self._pooled = np.array([bucket.pooled for bucket in self._buckets])

    @property
    def needs_rows(self) -> bool:
        """Whether the rows of a batch must be found for it to be read."""
        if self._symmetric is not None:
            return self._distinct
        by_row = self._exchange is not None or (self._distinct and self._ranks > 1)
        return by_row and not self._pooled.all()

    @property
    def needs_runs(self) -> bool:
        """Whether its accesses must be sorted for that, as each of them is fetched, or a device
        finds the rows."""
        return self.needs_rows and (self._device.kind != "cpu" or not self._distinct)

    def read(self, batch: PreparedBatch, counters: Counters) -> torch.Tensor:
        """The output of a batch, flat float32 [out_elements]."""
        self._device.keep(batch.read)
        self._count(batch, counters)
        if self._symmetric is not None:
            with self._symmetric.reading():
                return self._read_symmetric(batch, self._symmetric)
        source = self.source if batch.trains else None
        fetched = self._fetch(batch, source)
        if source is not None:
            fetched = source.read(batch, fetched)
        bags = batch.forwarded
        if bags is None:
            return self._add_up(batch, fetched, batch.features, batch.out_elements)
        assert self.forwarding is not None
        clients = bags.clients
        sums = self._add_up(batch, fetched, clients.features, clients.all_elements)
        finish = self.forwarding.start_sums(bags, sums)
        try:
            own = batch.features[: len(bags.features)]
            out = self._add_up(batch, fetched, own, batch.out_elements)
        finally:
            came = finish()
        self.forwarding.add_sums(batch, out, came)
        return out

    def _add_up(
        self, batch: PreparedBatch, fetched: Fetched, features: torch.Tensor, elements: int
    ) -> torch.Tensor:
        """The sums of the bags of some of a batch's features, flat float32 [elements]."""
        found: torch.Tensor = self._device.ops().pooled_rows(
            fetched.addresses,
            batch.offsets,
            batch.weights,
            features,
            fetched.bases,
            self._rank,
            elements,
            torch.float32,
            self._device.stream,
            batch.report,
        )
        return found

    def weight_gradients(self, batch: PreparedBatch, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of a batch's weights [N], from that of its output."""
        if self._symmetric is not None:
            with self._symmetric.reading():
                if not self._distinct and bool(self._far_of(batch).any()):
                    raise OperError(
                        "gradients of weights need the rows again, and a plan with "
                        f"{option('--fetch', 'raw')} reads those of other nodes in the lookup's "
                        f"kernel alone: plan with {option('--fetch', 'distinct')}, or look up "
                        "under torch.no_grad()"
                    )
                fetched = self._fetch(batch, None)
                return self._weight_gradients(batch, grad, fetched, batch.features)
        source = self.source if batch.trains else None
        if source is not None and not source.holds(batch):
            source = None
        fetched = self._fetch(batch, source)
        if source is not None:
            fetched = source.reread(batch, fetched)
        bags = batch.forwarded
        if bags is None:
            return self._weight_gradients(batch, grad, fetched, batch.features)
        assert self.forwarding is not None
        assert bags.grad is not None
        own = batch.features[: len(bags.features)]
        found = self._weight_gradients(batch, grad, fetched, own)
        bags.grad.wait()
        theirs = bags.grad.values
        clients = self._weight_gradients(batch, theirs, fetched, bags.clients.features)
        found[bags.accesses :] = clients[bags.accesses :]
        return self.forwarding.weight_gradients(bags, found)

    def _weight_gradients(
        self, batch: PreparedBatch, grad: torch.Tensor, fetched: Fetched, features: torch.Tensor
    ) -> torch.Tensor:
        """Those of the accesses of some of a batch's features, by the gradient of their sums."""
        self._device.keep(batch.read)
        found: torch.Tensor = self._device.ops().weight_gradients(
            grad,
            fetched.addresses,
            batch.offsets,
            batch.weights,
            features,
            fetched.bases,
            self._rank,
            self._device.stream,
            batch.report,
        )
        return found

    def _fetch(self, batch: PreparedBatch, source: RowSource | None) -> Fetched:
        """Fetch remote rows, where they are neither read by pointer nor had from a source."""
        if not self.needs_rows:
            return Fetched(batch.addresses, self._heap.bases)
        if self._symmetric is not None:
            return self._fetch_symmetric(batch, self._symmetric)
        rows = batch.rows
        assert rows is not None
        bases = self._heap.bases_on_host.copy()
        # Of pooled tables by pointer: what is left of their bags is of this node.
        buckets = [
            b
            for b, bucket in enumerate(self._buckets)
            if not (bucket.pooled or (bucket.tier and source is not None))
        ]
        if not self._distinct:
            assert isinstance(rows, Runs)  # of the positions of accesses
            addresses = batch.addresses.clone()
            buffers = [self._fetch_accesses(rows, buckets, addresses, bases)] if buckets else []
            return Fetched(addresses, torch.from_numpy(bases), buffers)
        # Where rows are that were fetched.
        targets = rows.slots.new_full((int(rows.before_on_host[-1]),), -1)
        buffer = self._copy_distinct(rows, buckets, targets, bases)
        if self.relay is not None and buckets:
            self.relay.fetch(rows, buckets, targets, bases)
        addresses = rows.redirected(batch.addresses, targets, self._device)
        return Fetched(addresses, self._device.send(torch.from_numpy(bases)), [buffer])

    def _copy_distinct(
        self,
        rows: BatchRows,
        buckets: Sequence[int],
        targets: torch.Tensor,
        bases: Ints,
    ) -> torch.Tensor:
        """Copy the distinct rows of this node's other ranks into a buffer, width after width."""
        pieces: list[tuple[int, ...]] = []  # as the operator takes them
        end = 0
        for width in sorted({self._buckets[b].width for b in buckets}):
            begin = end = aligned(end)
            for b in (b for b in buckets if self._buckets[b].width == width):
                row_bytes = int(self._row_bytes[b])
                for rank in self._node.peers:
                    of = rows.owned(b, rank)
                    if rank == self._rank or of.start == of.stop:
                        continue
                    called = (self._ranks << SLOT_BITS) + (end - begin) // row_bytes
                    arena = int(bases[width, rank])
                    count = of.stop - of.start
                    pieces.append((of.start, count, arena, row_bytes, end, called))
                    end += count * row_bytes
            bases[width, self._ranks] = begin
        buffer = self._device.new(end, torch.uint8)
        bases[:, self._ranks] += buffer.data_ptr()
        *copied, places, names = np.array(pieces, dtype=np.int64).reshape(-1, 6).T.tolist()
        to = (buffer, places, targets, names)
        self._device.ops().copy_rows(rows.slots, *copied, *to, self._device.stream)
        return buffer

    def _fetch_accesses(
        self, runs: Runs, buckets: Sequence[int], addresses: torch.Tensor, bases: Ints
    ) -> torch.Tensor:
        """Fetch rows of other nodes, one for each access."""
        exchange = self._exchange
        assert exchange is not None
        accesses = [
            slice(*runs.starts[[rows.start, rows.stop]].tolist())
            for rows in (runs.owned(b, owner) for owner in exchange.owners for b in buckets)
        ]
        lengths = runs.starts.diff().long()
        each = runs.slots.repeat_interleave(lengths)
        slots = torch.cat([each[:0], *(each[of] for of in accesses)])
        counts = np.array([of.stop - of.start for of in accesses], dtype=np.int64)
        counts = counts.reshape(-1, len(buckets))
        rows = exchange.fetch(slots, counts, buckets, _bytes)
        at = exchange.places(counts, buckets)
        exchange.read_there(bases, rows.data_ptr(), exchange.owners, buckets, at)
        targets = torch.full((runs.accesses,), -1)
        owners = [owner for owner in exchange.owners for _ in buckets]
        for of, first, owner in zip(accesses, at.firsts.flat, owners, strict=True):
            targets[of] = _places(owner, int(first), of.stop - of.start)
        # As if each were a run.
        starts = torch.arange(runs.accesses + 1, dtype=runs.starts.dtype)
        native.ops().redirect(addresses, runs.positions, starts, targets)
        return rows

    def _read_symmetric(self, batch: PreparedBatch, symmetric: SymmetricMemory) -> torch.Tensor:
        fetched = self._fetch(batch, None)
        far = torch.zeros_like if self._distinct else lambda found: found
        return self._device.ops().pooled_rows_by_gets(
            fetched.addresses,
            batch.offsets,
            batch.weights,
            batch.features,
            fetched.bases,
            self._heap.far,
            far(self._far_of(batch)),
            symmetric.stage,
            self._rank,
            batch.out_elements,
            torch.float32,
            self._device.stream,
            batch.report,
        )

    def _far_of(self, batch: PreparedBatch) -> torch.Tensor:
        """Which of a batch's features may read rows of ranks whose memory is not mapped, [F]."""
        return self._far[batch.features[:, _LOOKUP]]

    def _fetch_symmetric(self, batch: PreparedBatch, symmetric: SymmetricMemory) -> Fetched:
        """Fetch the distinct rows of other ranks by a kernel, how many of them there are known to
        the device alone: the buffer has room for as many as there are accesses."""
        runs = batch.rows
        assert isinstance(runs, Runs)  # of the positions of accesses
        room = len(batch.addresses) + len(self._buckets)
        buffer = symmetric.fetched.of(room * int(self._row_bytes.max(initial=1)))
        addresses, bases = batch.addresses.clone(), self._heap.bases.clone()
        bases[:, self._ranks] = buffer.data_ptr()
        self._device.ops().fetch_rows(
            addresses,
            runs.positions,
            runs.starts,
            runs.slots,
            runs.before,
            self._heap.bases,
            self._heap.far,
            [bucket.width for bucket in self._buckets],
            self._row_bytes.tolist(),
            self._sizes,
            buffer,
            self._rank,
            self._device.stream,
            batch.report,
        )
        return Fetched(addresses, bases, [buffer])

    def _count(self, batch: PreparedBatch, counters: Counters) -> None:
        counters.add(lookups=1, accesses=len(batch.addresses))
        if batch.forwarded is not None and self.forwarding is not None:
            self.forwarding.count(batch.forwarded, counters)
        on_host = self._device.kind == "cpu"
        if isinstance(batch.sort, Future) and batch.sorting and batch.all_sorted:
            counters.add_when(batch.sort, self._by_rows)
            return
        rows = batch.rows if on_host and not batch.sorting else None
        if rows is None or rows.accesses < len(batch.addresses):
            given = (batch.addresses, batch.segment_offset, batch.features)
            accesses = self._device.ops().accesses_by_rank(
                *given,
                len(self._buckets),
                self._rank,
                self._ranks,
                self._device.stream,
                batch.report,
            )
            if on_host:
                counters.add(**self._by_source(accesses.numpy()))
            elif self._distinct and isinstance(batch.rows, Runs):
                fetched = batch.rows.before.diff().view_as(accesses)
                counters.add_later(torch.stack([accesses, fetched]), self._by_source_and_row)
            else:
                counters.add_later(accesses, self._by_source)
        else:
            counters.add(**self._by_rows(rows))

    def _by_rows(self, rows: BatchRows) -> dict[str, Any]:
        return self._by_source(rows.access_counts(), rows.row_counts() if self._distinct else None)

    def _by_source_and_row(self, counts: Ints) -> dict[str, Any]:
        return self._by_source(counts[0], counts[1])

    def _by_source(self, accesses: Ints, rows: Ints | None = None) -> dict[str, Any]:
        """Counters from accesses [buckets, ranks + 1] and the rows fetched for them (None: one for
        each), replicas first."""
        fetched = accesses[:, 1:]
        if rows is not None:
            fetched = np.where(self._pooled[:, None], fetched, rows[:, 1:])
        by_source = accesses.sum(axis=0)
        return {
            "replica_accesses": int(by_source[0]),
            "accessed_rows": by_source[1:],
            "fetched_rows": fetched.sum(axis=0),
            "fetched_bytes": self._row_bytes @ fetched,
        }


def _places(field: int, first: int, number: int) -> torch.Tensor:
    """The addresses of that field of so many slots, from the first on."""
    return (field << SLOT_BITS) + torch.arange(first, first + number)


def _bytes(size: int) -> torch.Tensor:
    """New memory of so many bytes."""
    found: torch.Tensor = native.ops().reused_tensor(size, torch.uint8)
    return found
