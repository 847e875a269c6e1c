"""What a read costs: the ranks whose time a byte takes that rank i reads from rank j (§3.2).

A read uses resources: the memory of the rank it reads from and, from another rank, the link to it.
A resource has one payer, the rank in whose time T it counts, and seconds per byte:

    memory of rank j    used by every read from j, j's own too    paid by j    L[j][j]    (E, eq. 2)
    link from j to i    used by the reads of i from j ≠ i         paid by i    L[i][j]    (C, eq. 3)

Ranks of a node with shared memory read each other's rows through a pointer, which is the link, and
the owner has no part in it: such a read does not use its memory. Gradients of rows with one owner
pass through both everywhere, as their sender collects them and the owner adds them to the row.

Rows of pooled tables in another node are read by the reader's proxy there, whose link to j they
pass, and which pays for it as for its own reads; the reader pays for vectors on its link to j.

Reads are therefore sparse entries (reader, source, payer, seconds per byte): 2M² - M of them for M
ranks at most, and no array of [M, M, M]. Bytes through one resource are added up before they are
priced. What replicas cost beside their reads is in allreduce.py. Everything that prices reads or
gradients takes it from here (traffic.py puts the two together), so that a rule with other payers (a
rank's outgoing link, a node's adapter) is other entries and other resources, made in `Charges.of`.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets, single_owner_sets
from oper.topology.links import SHARED
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class Charges:
    """Which resources reads use, and who pays for them.

    Entry n: a byte that `reader[n]` reads from `source[n]` is a byte of `resource[n]`. Entries come
    by reader, then source. A byte of resource k takes `seconds[k]` of the time of rank `payer[k]`.
    Resource i·M + j is the link by which rank i reads from j, and j·M + j the memory of rank j.
    """

    ranks: int
    reader: Ints  # [N]
    source: Ints  # [N]
    resource: Ints  # [N]
    payer: Ints  # [K]
    seconds: Floats  # [K]

    @staticmethod
    @lru_cache(maxsize=4)
    def of(topology: Topology) -> "Charges":
        """The charges of reads on a topology; the same object while few topologies are in use."""
        if not isinstance(topology, PooledTopology):
            return Charges._made(topology.link_cost, ~topology.shared_pairs)
        # Proxies read rows of shared memory themselves.
        shared = np.array([topology.memory[node] == SHARED for node in topology.node_of])
        unserved = shared & (topology.proxy != np.arange(topology.ranks))
        return Charges._made(topology.vector_link_cost, ~unserved, topology.proxy)

    @staticmethod
    @lru_cache(maxsize=4)
    def of_gradients(topology: Topology) -> "Charges":
        """The charges of gradients of rows with one owner, from rank i to rank j as those of a read
        of i from j; those of reads themselves where no ranks share memory."""
        everywhere = np.ones((topology.ranks, topology.ranks), dtype=bool)
        if isinstance(topology, PooledTopology):
            in_node = np.where(topology.masks()["other_node"], 0.0, topology.own_link_cost)
            return Charges._made(in_node, everywhere, topology.proxy)
        if not topology.shares_memory:
            return Charges.of(topology)
        return Charges._made(topology.link_cost, everywhere)

    @staticmethod
    def _made(link_cost: Floats, served: NDArray[np.bool_], proxy: Ints | None = None) -> "Charges":
        """The charges by link costs, where the source has its part in what is `served`, and the
        link of the reader's `proxy` its part in what that reads for it; all [reader, source]."""
        M = len(link_cost)
        reader, source = (axis.ravel() for axis in np.indices((M, M)))
        memory, link = source * M + source, reader * M + source
        used = np.stack([served.ravel(), reader != source], axis=1)
        resources = [memory, link]
        if proxy is not None:
            by = proxy.ravel()
            used = np.column_stack([used, (by != reader) & (by != source)])
            resources.append(by * M + source)
        entries = used.sum(axis=1)
        return Charges(
            ranks=M,
            reader=np.repeat(reader, entries),
            source=np.repeat(source, entries),
            resource=np.stack(resources, axis=1)[used],
            payer=reader,  # of a link its reader, of a memory its rank
            seconds=link_cost.ravel(),
        )

    # Seconds per byte, of reads between any two ranks.

    @cached_property
    def memory_seconds(self) -> Floats:
        """What each rank pays for every byte read from it, by itself too, [M]."""
        return self._by_pair(self.seconds).diagonal()

    @cached_property
    def link_seconds(self) -> Floats:
        """What the link of each pair takes, [reader, source]; 0 for rows of one's own."""
        return np.where(np.eye(self.ranks, dtype=bool), 0.0, self._by_pair(self.seconds))

    @property
    def copy_seconds(self) -> Floats:
        """What a copy of a row's bytes takes, [reader, source]: within a rank, those of its own
        memory."""
        return self._by_pair(self.seconds)

    @cached_property
    def reader_seconds(self) -> Floats:
        """What a rank itself pays for a byte that it reads, [reader, source]."""
        own = self.payer[self.resource] == self.reader
        paid = np.where(own, self.seconds[self.resource], 0.0)
        return self._by_pair(_added_at(self._pair, paid, self.ranks**2))

    @cached_property
    def cheaper_than_own(self) -> NDArray[np.bool_]:
        """Where a read costs its reader less than one of its own rows, [reader, source]: from other
        ranks a holder has no reason to read, as that takes their time and saves none of its own."""
        return self.reader_seconds < self.reader_seconds.diagonal()[:, None]

    @cached_property
    def read_seconds(self) -> Floats:
        """What a byte that a rank reads from any takes all ranks together, [reader, source]."""
        return self.read_prices(np.ones(self.ranks))

    def read_prices(self, rank_prices: Floats, link_prices: Floats | None = None) -> Floats:
        """The price of a byte that rank i reads from rank j, [M, M], where a second of each rank's
        time has a price, [M], and one of each pair's link another on top, [M, M]."""
        price = rank_prices[self.payer]
        if link_prices is not None:
            price = price + np.where(np.eye(self.ranks, dtype=bool), 0.0, link_prices).ravel()
        price = price * self.seconds
        return self._by_pair(_added_at(self._pair, price[self.resource], self.ranks**2))

    # Seconds of traffic.

    def lookup_and_link_seconds(self, traffic_bytes: Floats) -> tuple[Floats, Floats]:
        """E [M] and C [M, M] of the bytes that ranks read from each other, [reader, source]."""
        through = _added_at(self.resource, traffic_bytes.ravel()[self._pair], len(self.seconds))
        seconds = self._by_pair(through * self.seconds)
        lookups = seconds.diagonal().copy()
        np.fill_diagonal(seconds, 0.0)
        return lookups, seconds

    def paid_for_memory(self, lookup_seconds: Floats) -> Floats:
        """E [M] by the ranks that pay it."""
        memories = np.arange(self.ranks) * (self.ranks + 1)
        return _added_at(self.payer[memories], lookup_seconds, self.ranks)

    def paid_for_links(self, link_seconds: Floats) -> Floats:
        """C [M, M] by the ranks that pay it, [M]."""
        if self._readers_pay:
            return link_seconds.sum(axis=1)
        order, ends = self._by_payer
        # Sums of slices, not np.add.reduceat or bincount: those round otherwise than a row's sum.
        return np.array([part.sum() for part in np.split(link_seconds.ravel()[order], ends)])

    # Seconds per byte, of rows with given holders: every rank reads a byte of the row.

    def set_seconds(self, sets: HolderSets, read_by_read: bool = False) -> Floats:
        """What each rank pays for a byte of weight in each holder set, [G, M].

        With `read_by_read` the reads of a resource are priced before they are added up: equal but
        for the last digit, by which a solver chooses among solutions that are equally good.
        """
        single = single_owner_sets(self.ranks).source
        if not read_by_read and np.array_equal(sets.source, single):
            return self.owner_seconds
        return self._set_seconds(sets, read_by_read)

    def _set_seconds(self, sets: HolderSets, read_by_read: bool = False) -> Floats:
        pair = (np.arange(self.ranks) * self.ranks + sets.source).ravel()
        first, entries = self._first[pair], self._first[pair + 1] - self._first[pair]
        before = np.cumsum(entries) - entries
        entry = np.repeat(first - before, entries) + np.arange(int(entries.sum()))
        holder_set = np.repeat(np.repeat(np.arange(len(sets)), self.ranks), entries)
        resources = len(self.seconds)
        used, at, reads = np.unique(
            holder_set * resources + self.resource[entry], return_inverse=True, return_counts=True
        )
        holder_set, resource = used // resources, used % resources
        seconds = reads * self.seconds[resource]
        if read_by_read:
            seconds = _added_at(at, self.seconds[resource][at], len(used))
        payer = holder_set * self.ranks + self.payer[resource]
        return _added_at(payer, seconds, len(sets) * self.ranks).reshape(len(sets), self.ranks)

    def set_link_seconds(self, sets: HolderSets) -> Floats:
        """What the link of each ordered pair takes for a byte of weight in each holder set,
        [G, M·M], the reader first."""
        ranks = np.arange(self.ranks)
        taken = np.zeros((len(sets), self.ranks, self.ranks))
        taken[np.arange(len(sets))[:, None], ranks, sets.source] = self.link_seconds[
            ranks, sets.source
        ]
        return taken.reshape(len(sets), -1)

    @cached_property
    def owner_seconds(self) -> Floats:
        """What each rank pays for a byte of a row with one owner, [owner, payer]."""
        return self._set_seconds(single_owner_sets(self.ranks))

    def least_largest_seconds(self, readers: Ints) -> Floats:
        """What some rank pays at least for a byte of a row of which some holder serves that many
        readers: that holder for all that use its memory, the dearest of the readers for its own
        read, and every rank for its cheapest. Of the shape of `readers`."""
        dearest = np.sort(self.reader_seconds, axis=0).min(axis=1)  # [k - 1]: of k readers of one
        memories = np.arange(self.ranks) * (self.ranks + 1)
        uses = np.bincount(self.resource, minlength=len(self.seconds))[memories]
        free = self.ranks - uses  # readers of each rank that do not use its memory
        served = np.inf
        for past in np.unique(free):
            least_memory = self.memory_seconds[free == past].min()
            served = np.minimum(served, np.maximum(readers - past, 0) * least_memory)
        least = np.maximum(served, dearest[readers - 1])
        return np.maximum(least, self.reader_seconds.min(axis=1).max())

    # Means.

    @cached_property
    def mean_owner_seconds(self) -> float:
        """What a byte of a row with one owner costs a rank, the mean over owners and ranks."""
        uses = np.bincount(self.resource, minlength=len(self.seconds))
        return float((uses * self.seconds).sum()) / self.ranks**2

    @cached_property
    def mean_memory_seconds(self) -> float:
        """What a byte of a row with a copy on every rank costs a rank, the mean over ranks."""
        return float(self.memory_seconds.sum()) / self.ranks

    @cached_property
    def mean_seconds(self) -> float:
        """The mean of all memories and links, which brings a solver's numbers to about 1."""
        return float(self.seconds.mean())

    @cached_property
    def _pair(self) -> NDArray[np.int64]:
        return self.reader * self.ranks + self.source

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """The first entry of each pair, and after the last one, [M² + 1]."""
        entries = np.bincount(self._pair, minlength=self.ranks**2)
        return np.concatenate([[0], np.cumsum(entries)])

    @cached_property
    def _readers_pay(self) -> bool:
        """Whether the reader of each pair pays for its link."""
        return np.array_equal(self.payer, np.repeat(np.arange(self.ranks), self.ranks))

    @cached_property
    def _by_payer(self) -> tuple[Ints, Ints]:
        """Resources by the rank that pays for them, and where those of each rank but the last
        end."""
        ends = np.cumsum(np.bincount(self.payer, minlength=self.ranks))[:-1]
        return np.argsort(self.payer, kind="stable"), ends

    def _by_pair(self, values: Floats) -> Floats:
        return values.reshape(self.ranks, self.ranks)


class PairSeconds(NamedTuple):
    """What a byte takes over the link of two ranks, the mean over the pairs of each kind, on nodes
    that are alike; and what a copy of one's own saves of it in the node."""

    same_node: float
    other_node: float
    saved_inside_node: float  # by each further copy in a node, for a byte of weight

    @staticmethod
    def of(topology: Topology) -> "PairSeconds":
        local, same_node, other_node = topology.seconds_by_kind()
        # A read of one's own memory costs what its owner pays elsewhere, and where memory is shared
        # it takes the place of the link.
        saved = max(same_node - local, 0.0) if topology.shares_memory else same_node
        return PairSeconds(same_node, other_node, saved)

    def saved_by_further_node(self, ranks_per_node: int) -> float:
        """What the first copy of a row in a node saves all ranks together for a byte of weight:
        its holder reads its own, and the others there read from it, in inference."""
        return ranks_per_node * self.other_node - (ranks_per_node - 1) * self.saved_inside_node


def _added_at(index: NDArray[np.int64], values: Floats, length: int) -> Floats:
    """The sums of the values with equal index, in their order, [length]."""
    return np.bincount(index, values, minlength=length).astype(np.float64, copy=False)
