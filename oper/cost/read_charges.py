"""Charges of reads: the ranks that pay for a byte which rank i reads from rank j (§3.2).

A read uses resources: the memory of the rank that it reads from and, if that is another rank, the
link to it. A resource has one payer, the rank whose time T includes it, and a price in seconds per
byte:

    memory of rank j    used by every read from j, j's own too    paid by j    L[j][j]    (E, eq. 2)
    link from j to i    used by the reads of i from j ≠ i         paid by i    L[i][j]    (C, eq. 3)

Ranks of a node with shared memory read each other's rows through a pointer, which counts as the
link; such a read does not use the owner's memory. Gradients of rows with one owner pass through
both everywhere, because their sender collects them and the owner adds them to the row.

With relays (oper/topology/relays.py) a row of another node crosses to the reader's node once. So
reads and gradients have two weights: a rank's, with D the chance that the rank touches the row, and
a node's, with D the chance that any of its ranks does. With j the owner in another node and p its
relay in the node of rank i ≠ p,

    memory of rank p, link from p to i    used by the reads of i through p    rank's    paid by p, i
    memory of rank j, link from j to p    used by the reads of p for its node node's    paid by j, p

and the relay's own reads are among its node's. If i and p share memory, i reads there itself;
gradients pass through both.

Rows of pooled tables in another node are read by the reader's proxy there. They pass the proxy's
link to j, for which the proxy pays as for its own reads; the reader pays for vectors on its link to
j. Memory is read once for each row that a reader touches, so it has separate charges.

Reads are therefore sparse entries (reader, source, payer, seconds per byte), about 2M² of them for
M ranks, instead of an array [M, M, M]. Bytes through one resource are added up before they are
priced. The other costs of replicas are in allreduce.py. Everything that prices reads or gradients
uses these charges (traffic.py combines the two), so a rule with other payers (a rank's outgoing
link, a node's adapter) only needs other entries and resources in `Charges.of`.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets, single_owner_sets
from oper.topology.links import SHARED
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import RelayedTopology, relayed_sizes
from oper.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class Charges:
    """Resources that reads use, and the ranks that pay for them.

    Entry n: a byte that `reader[n]` reads from `source[n]` is a byte of `resource[n]`. Entries are
    sorted by reader, then source. A byte of resource k takes `seconds[k]` of the time of rank
    `payer[k]`. Resource i·M + j is the link by which rank i reads from j, and j·M + j the memory of
    rank j. With relays these are the bytes that ranks read for themselves, and `of_nodes` has the
    charges of the bytes that relays read for their nodes, per size of node: their readers are
    relays, and `asker[i, j]` is the relay that reads from j for rank i.
    """

    ranks: int
    reader: Ints  # [N]
    source: Ints  # [N]
    resource: Ints  # [N]
    payer: Ints  # [K]
    seconds: Floats  # [K]
    of_nodes: tuple["Charges", ...] = ()
    asker: Ints | None = None  # [reader, source]
    node_of: tuple[int, ...] | None = None  # with relays

    @staticmethod
    @lru_cache(maxsize=4)
    def of(topology: Topology) -> "Charges":
        """Return the charges of reads on a topology; the same object while few topologies are in
        use. For pooled tables they are those of links alone: `of_memory` has the rest."""
        if isinstance(topology, RelayedTopology):
            return Charges._relayed(topology, ~topology.shared_pairs)
        if not isinstance(topology, PooledTopology):
            return Charges._made(topology.link_cost, ~topology.shared_pairs)
        nothing = np.zeros((topology.ranks, topology.ranks), dtype=bool)
        return Charges._made(topology.vector_link_cost, nothing, topology.proxy)

    @staticmethod
    @lru_cache(maxsize=4)
    def of_memory(topology: PooledTopology) -> "Charges":
        """Return the charges of memories for reads of pooled tables' rows, per byte of the rows
        that each rank touches."""
        # Proxies read rows of shared memory themselves.
        shared = np.array([topology.memory[node] == SHARED for node in topology.node_of])
        unserved = shared & (topology.proxy != np.arange(topology.ranks))
        memory = np.diag(topology.own_link_cost.diagonal())
        return Charges._made(memory, ~unserved)

    @staticmethod
    @lru_cache(maxsize=4)
    def of_gradients(topology: Topology) -> "Charges":
        """Return the charges of gradients of rows with one owner. A gradient from rank i to rank j
        is charged as a read of i from j; if no ranks share memory, these are the charges of
        reads."""
        everywhere = np.ones((topology.ranks, topology.ranks), dtype=bool)
        if isinstance(topology, PooledTopology):
            in_node = np.where(topology.masks()["other_node"], 0.0, topology.own_link_cost)
            return Charges._made(in_node, everywhere, topology.proxy)
        if not topology.shares_memory:
            return Charges.of(topology)
        if isinstance(topology, RelayedTopology):
            return Charges._relayed(topology, everywhere)
        return Charges._made(topology.link_cost, everywhere)

    @staticmethod
    def _made(link_cost: Floats, served: NDArray[np.bool_], proxy: Ints | None = None) -> "Charges":
        """Return the charges by link costs. The source's memory is used by the reads that are
        `served`, and the link of the reader's `proxy` by those that the proxy reads for it; all
        [reader, source]."""
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

    @staticmethod
    def _relayed(topology: RelayedTopology, served: NDArray[np.bool_]) -> "Charges":
        """Return the charges with relays. The source's memory is used by the reads that are
        `served`, [reader, source]."""
        M, relay = topology.ranks, topology.relay
        reader, source = np.indices((M, M))
        through = topology.masks()["other_node"] & (topology.sizes > 1)[:, None]
        of_nodes = tuple(
            Charges._from(
                topology,
                reader,
                source,
                served,
                through & (reader == relay) & (topology.sizes == size)[:, None],
                asker=relay,
            )
            for size in relayed_sizes(topology)
        )
        read_from = np.where(through, relay, source)
        some = ~through | (reader != relay)
        return Charges._from(topology, reader, read_from, served, some, of_nodes)

    @staticmethod
    def _from(
        topology: RelayedTopology,
        reader: Ints,
        read_from: Ints,
        served: NDArray[np.bool_],
        some: NDArray[np.bool_],
        of_nodes: tuple["Charges", ...] = (),
        asker: Ints | None = None,
    ) -> "Charges":
        """Return the charges of `some` reads [reader, source], which are from the rank
        `read_from`."""
        M, source = topology.ranks, np.indices(reader.shape)[1]
        used = np.stack([served[reader, read_from], reader != read_from], axis=2) & some[..., None]
        resources = np.stack([read_from * M + read_from, reader * M + read_from], axis=2)
        entries = used.sum(axis=2).ravel()
        return Charges(
            ranks=M,
            reader=np.repeat(reader.ravel(), entries),
            source=np.repeat(source.ravel(), entries),
            resource=resources[used],
            payer=reader.ravel(),
            seconds=topology.link_cost.ravel(),
            of_nodes=of_nodes,
            asker=asker,
            node_of=topology.node_of,
        )

    # Seconds per byte, of reads between any two ranks.

    @cached_property
    def memory_seconds(self) -> Floats:
        """Seconds that each rank pays per byte read from its memory, also by itself, [M]."""
        return self._by_pair(self.seconds).diagonal()

    @cached_property
    def link_seconds(self) -> Floats:
        """Seconds per byte on the link of each pair, [reader, source]; 0 within a rank."""
        return np.where(np.eye(self.ranks, dtype=bool), 0.0, self._by_pair(self.seconds))

    @cached_property
    def links(self) -> NDArray[np.bool_]:
        """Mask of the pairs of ranks over whose links rows pass, [reader, source]."""
        passed = np.zeros(self.ranks**2, dtype=bool)
        for charges in (self, *self.of_nodes):
            passed[charges.resource] = True
        away = ~np.eye(self.ranks, dtype=bool)
        return np.asarray(passed.reshape(away.shape) & away)

    @property
    def copy_seconds(self) -> Floats:
        """Seconds per byte of copying a row, [reader, source]; within a rank, in its own memory."""
        return self._by_pair(self.seconds)

    @cached_property
    def reader_seconds(self) -> Floats:
        """Seconds that the reader itself pays per byte that it reads, [reader, source]."""
        own = self.payer[self.resource] == self.reader
        paid = np.where(own, self.seconds[self.resource], 0.0)
        return self._by_pair(_added_at(self._pair, paid, self.ranks**2))

    @cached_property
    def cheaper_than_own(self) -> NDArray[np.bool_]:
        """Mask of the reads that cost their reader less than a read of its own rows, [reader,
        source]. A holder has no reason to read from other ranks, which takes their time and saves
        none of its own. With relays a holder reads in its node."""
        cheaper = self.reader_seconds < self.reader_seconds.diagonal()[:, None]
        return cheaper & self._may_choose

    @cached_property
    def read_seconds(self) -> Floats:
        """Seconds that all ranks together pay per byte that one rank reads from another, [reader,
        source]; ranks read from the holder with the least. With relays these are the numbers of
        `ReadPrices.order` for a row that all ranks touch."""
        prices = ReadPrices.of(self, np.ones(self.ranks))
        return prices.order(np.ones(len(self.of_nodes)))

    def read_prices(self, rank_prices: Floats, link_prices: Floats | None = None) -> Floats:
        """Return the price of a byte that rank i reads from rank j, [M, M], given the price of a
        second of each rank's time, [M], and an additional price of a second on each pair's link,
        [M, M]. With relays this covers only the weight of these charges (`ReadPrices`)."""
        price = rank_prices[self.payer]
        if link_prices is not None:
            price = price + np.where(np.eye(self.ranks, dtype=bool), 0.0, link_prices).ravel()
        price = price * self.seconds
        return self._by_pair(_added_at(self._pair, price[self.resource], self.ranks**2))

    # Seconds of traffic.

    def traffic(self, sets: HolderSets, values: Floats) -> Floats:
        """Return the sums of `values` [G] over the holder sets that each rank reads from each
        other, [reader, source]; for a node's weight, the readers are its relays."""
        matrix = np.zeros((self.ranks, self.ranks))
        # A placement's first sets are mostly those of single owners, each of which is a column.
        if self.asker is None and sets.starts_with_single_owners:
            matrix[:] = values[: self.ranks]
            sets, values = sets.take(slice(self.ranks, None)), values[self.ranks :]
        reads = self._reads(sets)
        np.add.at(matrix.ravel(), reads.pair, values[reads.holder_set])
        return matrix

    def through(self, traffic: Floats) -> Floats:
        """Return the parts of `traffic` that pass each memory, on the diagonal, and each link,
        [reader, source]."""
        return self._by_pair(
            _added_at(self.resource, traffic.ravel()[self._pair], len(self.seconds))
        )

    def lookup_and_link_seconds(self, through: Floats) -> tuple[Floats, Floats]:
        """Return E [M] and C [M, M] of the bytes that pass memories and links."""
        seconds = through * self._by_pair(self.seconds)
        lookups = seconds.diagonal().copy()
        np.fill_diagonal(seconds, 0.0)
        return lookups, seconds

    def rows_served(self, traffic: Floats) -> Floats:
        """Return the number of rows that each rank looks up, [M], given the `traffic` in rows: for
        itself and for others, including those that share its memory."""
        some = np.flatnonzero(np.diff(self._first))  # all reads of a pair are from one rank
        read_from = self.resource[self._first[some]] % self.ranks
        return _added_at(read_from, traffic.ravel()[some], self.ranks)

    def paid_for_memory(self, lookup_seconds: Floats) -> Floats:
        """Return E [M] by the ranks that pay it."""
        memories = np.arange(self.ranks) * (self.ranks + 1)
        return _added_at(self.payer[memories], lookup_seconds, self.ranks)

    def paid_for_links(self, link_seconds: Floats) -> Floats:
        """Return C [M, M] by the ranks that pay it, [M]."""
        if self._readers_pay:
            return link_seconds.sum(axis=1)
        order, ends = self._by_payer
        # Sums of slices, not np.add.reduceat or bincount: those round differently from a row's sum.
        return np.array([part.sum() for part in np.split(link_seconds.ravel()[order], ends)])

    # Seconds per byte for rows with given holders: every rank reads a byte of the row.

    def set_seconds(self, sets: HolderSets, read_by_read: bool = False) -> Floats:
        """Return the seconds that each rank pays for a byte of weight in each holder set, [G, M].

        With `read_by_read` the reads of a resource are priced before they are added up: equal up to
        the last digit, by which a solver chooses among solutions that are equally good.
        """
        single = single_owner_sets(self.ranks).source
        if not read_by_read and np.array_equal(sets.source, single):
            return self.owner_seconds
        return self._set_seconds(sets, read_by_read)

    def _set_seconds(self, sets: HolderSets, read_by_read: bool = False) -> Floats:
        holder_set, entry = self._entries(sets)
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
        """Return the seconds on the link of each ordered pair for a byte of weight in each holder
        set, [G, M·M], the reader first."""
        holder_set, entry = self._entries(sets)
        resource = self.resource[entry]
        taken = np.zeros((len(sets), self.ranks**2))
        np.add.at(taken, (holder_set, resource), self.link_seconds.ravel()[resource])
        return taken

    @cached_property
    def owner_seconds(self) -> Floats:
        """Seconds that each rank pays for a byte of a row with one owner, [owner, payer]."""
        return self._set_seconds(single_owner_sets(self.ranks))

    def least_largest_seconds(self, readers: Ints) -> Floats:
        """Return a lower bound on the largest seconds of a rank for a byte of a row of which some
        holder serves `readers` readers: the holder pays for all readers that use its memory, the
        most expensive of the readers for its own read, and every rank for its cheapest. The result
        has the shape of `readers`. With relays, the relays of other nodes are readers, and the
        ranks that read through them are not."""
        near, paid = self._may_choose, self.reader_seconds
        reads = np.ones_like(near)
        if self.of_nodes:
            for of in self.of_nodes:
                paid = paid + of.reader_seconds
            asks = np.any([of.reader_seconds > 0 for of in self.of_nodes], axis=0)
            reads = near | asks | (near.sum(axis=1) == 1)[:, None]
        # [k - 1]: for k readers of one holder
        dearest = np.sort(np.where(reads, paid, np.inf), axis=0).min(axis=1)
        of_memory = self.resource == self.source * (self.ranks + 1)
        of_memory &= near[self.reader, self.source]
        uses = np.bincount(self.source[of_memory], minlength=self.ranks)
        free = near.sum(axis=0) - uses  # readers of each rank that do not use its memory
        served = np.inf
        for past in np.unique(free):
            least_memory = self.memory_seconds[free == past].min()
            served = np.minimum(served, np.maximum(readers - past, 0) * least_memory)
        least = np.maximum(served, dearest[readers - 1])
        return np.maximum(least, paid.min(axis=1).max())

    def _reads(self, sets: HolderSets) -> "_Reads":
        """Return the reads of one row in each holder set: for a node's weight, one by each relay
        that any rank of the node reads through."""
        pair = np.arange(self.ranks) * self.ranks + sets.source
        holder_set = np.repeat(np.arange(len(sets)), self.ranks)
        if self.asker is None:
            return _Reads(holder_set, pair.ravel())
        node_of, of_reader = np.array(self.node_of), np.ascontiguousarray(sets.source.T)
        ranks = np.argsort(node_of, kind="stable")
        place = np.arange(self.ranks) - np.searchsorted(node_of[ranks], node_of[ranks])
        first_of_reader = np.ones(of_reader.shape, dtype=bool)
        for n in range(1, int(place.max()) + 1):  # rank n of each node, and those before it there
            at = np.flatnonzero(place == n)
            again = np.zeros((len(at), len(sets)), dtype=bool)
            for before in range(1, n + 1):
                again |= of_reader[ranks[at - before]] == of_reader[ranks[at]]
            first_of_reader[ranks[at]] = ~again
        first = np.ascontiguousarray(first_of_reader.T)
        source = sets.source.astype(np.int64)
        by = self.asker[np.arange(self.ranks), source] * self.ranks + source
        return _Reads(holder_set[first.ravel()], by[first])

    def _entries(self, sets: HolderSets) -> tuple[Ints, Ints]:
        """Return the holder set and the number of each entry of its reads."""
        holder_set, pair = self._reads(sets)
        first, entries = self._first[pair], self._first[pair + 1] - self._first[pair]
        before = np.cumsum(entries) - entries
        entry = np.repeat(first - before, entries) + np.arange(int(entries.sum()))
        return np.repeat(holder_set, entries), entry

    @cached_property
    def _may_choose(self) -> NDArray[np.bool_]:
        """Mask of the ranks from which a rank in a node with a copy may read, [reader, source]:
        with relays only those of its node."""
        if self.node_of is None:
            return np.ones((self.ranks, self.ranks), dtype=bool)
        return np.equal.outer(self.node_of, self.node_of)

    # Means.

    @cached_property
    def mean_owner_seconds(self) -> float:
        """Seconds per byte of a row with one owner, the mean over owners and ranks."""
        uses = np.bincount(self.resource, minlength=len(self.seconds))
        return float((uses * self.seconds).sum()) / self.ranks**2

    @cached_property
    def mean_memory_seconds(self) -> float:
        """Seconds per byte of a row with a copy on every rank, the mean over ranks."""
        return float(self.memory_seconds.sum()) / self.ranks

    @cached_property
    def mean_seconds(self) -> float:
        """Mean seconds per byte of all memories and links, which scales a solver's numbers to about
        1."""
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
        """True if the reader of each pair pays for its link."""
        return np.array_equal(self.payer, np.repeat(np.arange(self.ranks), self.ranks))

    @cached_property
    def _by_payer(self) -> tuple[Ints, Ints]:
        """Resources sorted by the rank that pays for them, and the ends of each rank's resources
        except the last."""
        ends = np.cumsum(np.bincount(self.payer, minlength=self.ranks))[:-1]
        return np.argsort(self.payer, kind="stable"), ends

    def _by_pair(self, values: Floats) -> Floats:
        return values.reshape(self.ranks, self.ranks)


class _Reads(NamedTuple):
    """Reads of rows in holder sets: pair reader·M + source."""

    holder_set: Ints
    pair: Ints


@dataclass(frozen=True, eq=False)
class ReadPrices:
    """Prices of bytes that ranks read from each other, [reader, source]. For a row of which a rank
    touches one byte, and its node `ratios` [K] times as much, by the K sizes of nodes, the price is
    `of_rank` [M, M] + `ratios` · `of_nodes` [K, M, M].

    With relays all ranks of a node read from the same rank of another node, whose price is divided
    evenly among them. `near` [M, M] marks the sources that come first: a rank reads from a holder
    in its node, if there is one.
    """

    of_rank: Floats
    of_nodes: Floats
    near: NDArray[np.bool_] | None = None

    @staticmethod
    def of(
        charges: Charges, rank_prices: Floats, link_prices: Floats | None = None
    ) -> "ReadPrices":
        """Return the prices, given the price of a second of each rank's time, [M], and an
        additional price of a second on each pair's link, [M, M]."""
        of_rank = charges.read_prices(rank_prices, link_prices)
        if charges.node_of is None:
            return ReadPrices(of_rank, np.zeros((0, *of_rank.shape)))
        near, node_of = charges._may_choose, np.array(charges.node_of)

        def divided(prices: Floats) -> Floats:
            members = [prices[node_of == node].mean(axis=0) for node in range(node_of.max() + 1)]
            return np.where(near, prices, np.array(members)[node_of])

        of_nodes = [divided(of.read_prices(rank_prices, link_prices)) for of in charges.of_nodes]
        return ReadPrices(divided(of_rank), np.array(of_nodes), near)

    def at(self, ratios: Floats) -> Floats:
        """Return the prices for rows with these ratios, [..., K] -> [..., M, M]."""
        prices: Floats = self.of_rank + dot(ratios, self.of_nodes)
        return prices

    def order(self, ratios: Floats) -> Floats:
        """Return numbers, in the shape of `at`, of which a rank reads from the holder with the
        least: the prices, raised for ranks of other nodes so that all ranks of the reader's node
        come first."""
        prices = self.at(ratios)
        if self.near is None:
            return prices
        return np.where(self.near, prices, prices + 2 * float(self.of_rank[self.near].max()))


class PairSeconds(NamedTuple):
    """Seconds per byte over the link of two ranks, the mean over the pairs of each kind, on
    identical nodes; and the saving by a further copy in the node."""

    same_node: float
    other_node: float
    saved_inside_node: float  # by each further copy in a node, for a byte of weight

    @staticmethod
    def of(topology: Topology) -> "PairSeconds":
        local, same_node, other_node = topology.seconds_by_kind()
        # A read of the rank's own memory costs the same as its owner pays otherwise, and if memory
        # is shared it replaces the link.
        saved = max(same_node - local, 0.0) if topology.shares_memory else same_node
        return PairSeconds(same_node, other_node, saved)

    def saved_by_further_node(self, ranks_per_node: int) -> float:
        """Return the seconds that the first copy of a row in a node saves all ranks together, per
        byte of weight: its holder reads its own copy, and the other ranks of the node read from it,
        in inference."""
        return ranks_per_node * self.other_node - (ranks_per_node - 1) * self.saved_inside_node


def _added_at(index: NDArray[np.int64], values: Floats, length: int) -> Floats:
    """Return the sums of the values with equal index, in their order, [length]."""
    return np.bincount(index, values, minlength=length).astype(np.float64, copy=False)
