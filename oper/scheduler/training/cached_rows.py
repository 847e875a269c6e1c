"""Cached rows: a training step on rows of the tier, of which each rank caches some.

Every rank replays the caches of all ranks (Herald's snapshots), so each knows the rows that it
sends and receives. A step:

    read     the ranks exchange the numbers of the rows that they train; updates that must be in the
             tier are pushed to the rows' owners, rows that a rank lacks are pulled from them, and
             the batch reads its cache
    update   rows that one rank alone trained take their step in the cache; gradients of rows that
             several ranks trained wait there until they are pushed

Other cases (accumulated gradients, a backward pass after another batch was read) are settled:
pending updates of the rows are pushed to the tier, which takes the step itself.

The tier's rows of a batch have addresses that are equal on all ranks: bucket << 56 | rank whose
shard has the row << 40 | slot. They are in the order of the rank's loader, sample after sample, and
in a sample feature after feature: so the caches see the rows in the same order as a simulation of
the log.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base.arrays import Ints, as_bytes
from oper.base.errors import OperError
from oper.base.free_memory import free_memory
from oper.cost.cache_replay import CacheReplay
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.runtime.comm.exchange import gather
from oper.runtime.fetch_paths.fetch_path import Fetched
from oper.runtime.fetch_paths.row_source import HeapPlaces, RowSource, SourceParts, Step
from oper.runtime.memory.heap import check_memory
from oper.runtime.memory.prepared_batch import PreparedBatch, SortedRows
from oper.runtime.tables.kernel_structs import FEATURE
from oper.scheduler import transmissions as m
from oper.scheduler.cache import CacheDivision, Caches, CacheTooSmallError
from oper.scheduler.cache_settings import EVICTIONS, CacheSettings
from oper.scheduler.row_addresses import WIDTH_SHIFT, owner_of, sample_major, slot_of, width_of
from oper.scheduler.training.cache_arenas import CacheArenas
from oper.scheduler.training.row_transfers import Parcels, RowTransfers
from oper.scheduler.training.tier_shard import TierShard
from oper.scheduler.transmissions import TRANSMISSIONS, add_to

_BUCKET = (FEATURE.names or ()).index("bucket")
_OWN_ROWS = LOCAL - 1  # fields from here on are the reader's own


class _TierAccesses(NamedTuple):
    """Accesses of a batch that read the tier: masks of their features and of the accesses, and in
    the batch's order their buckets and addresses there, [n] each."""

    features: torch.Tensor  # bool [F]
    chosen: torch.Tensor  # bool [N]
    buckets: torch.Tensor
    addresses: torch.Tensor


def source_of(settings: CacheSettings) -> Callable[[SourceParts], RowSource]:
    """Return a function that makes an engine's source of rows with these settings."""
    return lambda parts: CachedRows(parts, settings)


class CachedRows:
    """Cache of this rank, and its shard of the tier, for one engine."""

    def __init__(self, parts: SourceParts, settings: CacheSettings) -> None:
        # Every rank replays the caches of all ranks, for which it needs equal settings.
        parts.node.agree(repr(settings).encode(), "the settings of caches")
        self._rank, self._ranks = parts.node.rank, parts.node.ranks
        self._exchange, self._heap, self._settings = parts.exchange, parts.heap, settings
        self._first, self._buckets = parts.first_bucket, parts.buckets[parts.first_bucket :]
        _check_rounding(self._buckets)
        self._bounded = settings.synchronisation.kind.startswith("het")
        if self._bounded:
            _check_plain_sgd(self._buckets, settings)
        self._rows, self._names = np.array(parts.rows[parts.first_bucket :]), parts.names
        self._value_bytes = [parts.heap.rows(b.width).shape[1] for b in self._buckets]
        states = [b.optimizer.state_bytes(b.dim) for b in self._buckets]
        self._row_bytes = np.array(self._value_bytes) + np.array(states)
        all_bytes = int(self._rows @ self._row_bytes)
        _check_replay(parts, settings, int(self._rows.sum()), all_bytes)
        self._tier = TierShard(parts.heap, self._buckets)
        self._caches: Caches | None = None
        size = settings.bytes_of(all_bytes)
        self._division = CacheDivision(size, self._rows, self._row_bytes)
        self._read: torch.Tensor | None = None  # addresses of the batch that was read last
        self._settled = True
        self.transmissions = np.zeros(self._ranks, dtype=TRANSMISSIONS)

    # The methods of RowSource, documented there.

    def read(self, batch: PreparedBatch, heap: Fetched) -> Fetched:
        """Bring the rows of a batch into the cache."""
        accesses = _tier_accesses(batch, self._rank, self._first)
        addresses, ends = _by_sample(batch, accesses)
        message = torch.cat([torch.tensor([len(ends)]), ends, addresses])
        everyone = gather(self._exchange, self._ranks, message, "say what rows its batch reads")
        parts = [_split(message_of_rank) for message_of_rank in everyone]
        try:
            self._replay(self._caches or self._make_caches(parts), parts)
        except CacheTooSmallError:
            # Batches read other buckets than at the division of the cache.
            self.settle()
            try:
                self._replay(self._make_caches(parts), parts)
            except CacheTooSmallError as error:
                raise self._too_small(error) from None
        self._read = batch.addresses
        return self._in_cache(accesses, heap)

    def holds(self, batch: PreparedBatch) -> bool:
        """Return whether it was the last batch that was read, and its rows have not moved since."""
        if self._read is batch.addresses:
            return True
        self.settle()
        return False

    def reread(self, batch: PreparedBatch, heap: Fetched) -> Fetched:
        """Return the current places of the rows of a batch."""
        return self._in_cache(_tier_accesses(batch, self._rank, self._first), heap)

    def update(
        self, batch: PreparedBatch, rows: SortedRows, grads: Sequence[torch.Tensor], step: Step
    ) -> None:
        """Train the rows."""
        if self._read is not batch.addresses or rows is not batch.rows:
            self._update_tier(rows, grads, step)
            return
        self._read, self._settled = None, False
        assert self._caches is not None
        add_to(self.transmissions, self._caches.update())
        moves = self._caches.take_moves()
        self._transfers.due = moves[moves["kind"] != m.JOINT]
        joint = moves[moves["kind"] == m.JOINT]
        self._expect(joint, step)
        for b, of_bucket in enumerate(grads):
            rate = step.learning_rates[self._first + b]
            numbers = self._caches.numbers(_distinct_addresses(rows, b, self._first))
            places = self._arenas.places(numbers)
            alone = ~np.isin(numbers, joint["row"]) | self._bounded
            chosen = torch.from_numpy(alone)
            self._arenas.step(b, places[alone], of_bucket[chosen], rate, step.number)
            if self._bounded:
                self._arenas.add_gradients(b, places, rate * of_bucket)
            else:
                self._arenas.add_gradients(b, places[~alone], of_bucket[~chosen])

    def settle(self) -> None:
        """Push all pending updates to the tier."""
        if self._settled or self._caches is None:
            return
        add_to(self.transmissions, self._caches.flush())
        self._transfers.carry_out(self._caches.take_moves())
        self._wait_for_writes("flush its cache")
        self._settled = True

    def move(self, before: HeapPlaces, after: HeapPlaces) -> None:
        """Push pending updates of rows that move to other addresses. Caches keep the rows."""
        self._read = None  # has the old addresses
        self._tier.resize()
        if self._caches is not None:
            moved = self._caches.move(_addresses(before), _addresses(after))
            add_to(self.transmissions, moved)
            self._transfers.carry_out(self._caches.take_moves())
            self._wait_for_writes("push rows that move")

    def forget(self) -> None:
        """Empty the settled caches."""
        self._caches, self._read = None, None

    def to_dict(self) -> dict[str, Any]:
        """Return the transmissions of each rank since the start: the fields of TRANSMISSIONS."""
        names = TRANSMISSIONS.names or ()
        return {name: self.transmissions[name].tolist() for name in names}

    # Parts of those methods.

    def _wait_for_writes(self, what: str) -> None:
        """Wait until all ranks have written to their shards, which nobody may read earlier."""
        gather(self._exchange, self._ranks, torch.zeros(0, dtype=torch.int64), what)

    def _make_caches(self, parts: Sequence[tuple[Ints, Ints]]) -> Caches:
        """Return empty caches, divided among the buckets by the rows that batches read."""
        addresses = np.concatenate([addresses for _, addresses in parts])
        capacity = self._division.capacity(addresses)
        caches = Caches(
            self._ranks,
            capacity.tolist(),
            self._row_bytes.tolist(),
            [4 * b.dim for b in self._buckets],
            self._settings.evict,
            self._settings.synchronisation,
        )
        caches.record_moves()
        bytes = int(capacity @ (self._row_bytes + [4 * b.dim for b in self._buckets]))
        check_memory(self._heap.node, bytes, "the cache", self._heap.device.free_memory())
        self._caches = caches
        self._arenas = CacheArenas(self._buckets, capacity, self._value_bytes)
        parcels = Parcels(self._arenas, self._tier, self._bounded)
        self._transfers = RowTransfers(self._rank, self._ranks, self._exchange, parcels)
        return caches

    def _too_small(self, error: CacheTooSmallError) -> OperError:
        least = self._division.least_bytes(error.needed)
        others = f" and {len(self._names) - 1} more" * (len(self._names) > 1)
        share = 100.1 * least / int(self._rows @ self._row_bytes)
        return OperError(
            f"tables {self._names[0]!r}{others}: a cache of {self._settings.size} is too small: "
            f"{error}; {least:,} bytes, {share:.4g}% of these tables, would be enough for this "
            "batch, and smaller ones need less"
        )

    def _replay(self, caches: Caches, parts: Sequence[tuple[Ints, Ints]]) -> None:
        """Find the step's moves, and carry them out. `parts` are the ranks' batches."""
        starts = np.cumsum([0, *(len(addresses) for _, addresses in parts)])
        ends = [offsets[1:] + start for (offsets, _), start in zip(parts, starts[:-1], strict=True)]
        samples = [len(offsets) - 1 for offsets, _ in parts]
        looked_up = caches.look_up(
            np.concatenate([addresses for _, addresses in parts]),
            np.concatenate([np.zeros(1, dtype=np.int64), *ends]),
        )
        moved = caches.read(looked_up, np.repeat(np.arange(self._ranks), samples))
        self._settled = False
        add_to(self.transmissions, moved)
        self._transfers.carry_out(caches.take_moves())

    def _expect(self, joint: NDArray[np.void], step: Step) -> None:
        """Tell the shard the rows for which gradients of several ranks will come."""
        if self._bounded:
            return
        of_shard = joint[m.owners(joint) == self._rank]
        for b in range(len(self._buckets)):
            of_bucket = of_shard[m.buckets(of_shard) == b]
            rate = step.learning_rates[self._first + b]
            self._tier.expect(b, m.slots(of_bucket), of_bucket["other"], step, rate)

    def _in_cache(self, accesses: _TierAccesses, heap: Fetched) -> Fetched:
        """Return a batch's addresses in the cache. Kernels see the cache as the arenas of one more
        rank, after those of fetched rows, which belong to tables of the tier that are not
        trained."""
        assert self._caches is not None
        numbers = self._caches.numbers(accesses.addresses.numpy())
        places = np.zeros(len(numbers), dtype=np.int64)
        for b in range(len(self._buckets)):
            of_bucket = (accesses.buckets == b).numpy()
            places[of_bucket] = self._arenas.places_in_arena(b, numbers[of_bucket])
        addresses, arenas = heap.addresses.clone(), heap.bases.new_zeros(len(heap.bases), 1)
        field = heap.bases.shape[1]
        addresses[accesses.chosen] = field << SLOT_BITS | torch.from_numpy(places)
        for width, pointer in self._arenas.pointers().items():
            arenas[width] = pointer
        return Fetched(addresses, torch.cat([heap.bases, arenas], 1), heap.buffers)

    def _update_tier(self, rows: SortedRows, grads: Sequence[torch.Tensor], step: Step) -> None:
        """Take the step in the tier, with the rows' gradients of all ranks."""
        self._read = None  # its rows may be outdated now
        buckets = range(len(self._buckets))
        addresses = [_distinct_addresses(rows, b, self._first) for b in buckets]
        sent = torch.from_numpy(np.concatenate(addresses))
        everyone = gather(self._exchange, self._ranks, sent, "say what rows it trained")
        union = np.unique(torch.cat(everyone).numpy())
        if self._caches is not None:
            add_to(self.transmissions, self._caches.settle(union))
            self._transfers.carry_out(self._caches.take_moves())
        parts = [
            torch.cat([as_bytes(_owned(rows, grads[b], self._first + b, rank)) for b in buckets])
            for rank in range(self._ranks)
        ]
        received = self._exchange.send(parts, "send gradients to the tier")
        addresses_of_ranks = [tensor.numpy() for tensor in everyone]
        at = [0] * self._ranks
        for b in buckets:
            slots, sums = [], []
            for rank, part in enumerate(received):
                of = addresses_of_ranks[rank]
                of = of[(width_of(of) == b) & (owner_of(of) == self._rank)]
                dim = self._buckets[b].dim
                size = 4 * len(of) * dim
                sums.append(part[at[rank] :][:size].view(torch.float32).view(len(of), dim))
                slots.append(slot_of(of))
                at[rank] += size
            rate = step.learning_rates[self._first + b]
            self._tier.step(b, slots, sums, rate, step.number)


def _split(given: torch.Tensor) -> tuple[Ints, Ints]:
    """Return (offsets of samples, addresses) from a rank's message about its batch."""
    size = int(given[0])
    numbers = given.numpy()
    return numbers[1 : 1 + size], numbers[1 + size :]


def _owned(rows: SortedRows, grads: torch.Tensor, bucket: int, rank: int) -> torch.Tensor:
    """Return the gradients of the rows of a bucket that are in a rank's shard."""
    base, owned = rows.bucket(bucket).start, rows.owned(bucket, rank)
    return grads[owned.start - base : owned.stop - base]


def _check_replay(parts: SourceParts, settings: CacheSettings, rows: int, all_bytes: int) -> None:
    """Raise OperError on all ranks if the hosts lack memory for the replay of all caches."""
    share = min(settings.bytes_of(all_bytes) / max(all_bytes, 1), 1.0)
    replay = CacheReplay.of(
        parts.node.ranks,
        rows,
        math.ceil(share * rows),
        settings.synchronisation.kind.startswith("het"),
        EVICTIONS.index(settings.evict),
    )
    check_memory(
        parts.node,
        replay.total_bytes,
        f"the replay of all ranks' caches of {settings.size}",
        free_memory(),
        f"every rank keeps {replay.row_bytes:,} bytes for each row that any rank caches; give "
        "oper.CacheSettings a smaller size, put fewer tables into the tier, or train on fewer ranks"
        " a host",
    )


def _check_rounding(buckets: Sequence[Any]) -> None:
    """Raise OperError for stochastic rounding: its random bits follow a row's slot, which a row has
    only while it is cached."""
    for bucket in buckets:
        if bucket.optimizer.stochastic_rounding:
            raise OperError(
                f"stochastic_rounding: tables of the tier in {bucket.dtype} cannot have it, as "
                "their rows move between caches; leave it out, or plan them without the tier"
            )


def _check_plain_sgd(buckets: Sequence[Any], settings: CacheSettings) -> None:
    for bucket in buckets:
        if bucket.optimizer.kind != "sgd" or bucket.optimizer.weight_decay:
            decay = " with weight decay" * (bucket.optimizer.weight_decay != 0)
            raise OperError(
                f"sync {settings.sync!r}: tables of the tier have {bucket.optimizer.kind}{decay}, "
                "and HET pushes sums of gradients, which plain SGD alone applies as if each had "
                "come in its turn; take SGD, or sync='on-demand'"
            )


def _addresses(rows: HeapPlaces) -> Ints:
    return rows.bucket << WIDTH_SHIFT | rows.owner << SLOT_BITS | rows.slot


def _tier_accesses(batch: PreparedBatch, rank: int, first_bucket: int) -> _TierAccesses:
    """Return the accesses of the buckets from `first_bucket` on, which are numbered from 0 in
    addresses."""
    of_feature = batch.features[:, _BUCKET] - first_bucket
    buckets = of_feature.repeat_interleave(batch.segment_offset.diff())
    chosen = buckets >= 0
    buckets, addresses = buckets[chosen], batch.addresses[chosen]
    owners = addresses >> SLOT_BITS
    owners = torch.where(owners >= _OWN_ROWS, rank, owners)
    full = buckets << WIDTH_SHIFT | owners << SLOT_BITS | addresses & SLOT_MASK
    return _TierAccesses(of_feature >= 0, chosen, buckets, full)


def _by_sample(batch: PreparedBatch, accesses: _TierAccesses) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the addresses sample after sample, and the offsets of the samples, [samples + 1]."""
    # Features after the batch's own are bags of other nodes, whose tables are not in the tier.
    of_tier = batch.lengths[accesses.features[: len(batch.keys)]].numpy().astype(np.int64)
    order = torch.from_numpy(sample_major(of_tier))
    ends = torch.from_numpy(np.append(0, np.cumsum(of_tier.sum(axis=0))))
    return accesses.addresses[order], ends


def _distinct_addresses(rows: SortedRows, bucket: int, first_bucket: int) -> np.ndarray:
    """Return the addresses of a bucket's distinct rows, in their order."""
    parts = []
    for owner in range(rows.ranks):
        slots = rows.slots[rows.owned(first_bucket + bucket, owner)]
        parts.append(slots | owner << SLOT_BITS | bucket << WIDTH_SHIFT)
    addresses: np.ndarray = torch.cat(parts).numpy()
    return addresses
