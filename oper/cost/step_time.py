"""What a step takes, by its phases: from what a rank's batch is expected to read, the seconds of
each phase as the runtime does it.

The objective (objective.py) adds up the time of every byte, by which plans are compared and
certified. A step is shorter, as memories and links work at once and repeats come from a cache; and
longer, as every phase has its latency, and moves ids and slots and reads outputs and gradients that
no placement changes. Between two phases ranks wait for each other:

    wanted     ranks tell the relays of their node which distinct rows of other nodes they want
    ids        ranks, or relays for all of their node, ask the owners of other nodes for rows, or
               ranks forward the bags of pooled tables
    serve      owners put the rows in a row; of forwarded bags the rows are added up
    rows       rows, or sums of bags, come from other nodes
    copies     distinct rows of the node's other ranks, and those that its relays got
    pool       the lookup: bags are added up from what has come, and from rows of one's own
    vectors    gradients of forwarded bags go back
    sum        the gradients of each row are summed into the mailbox
    node sums  relays add up their node's gradients of rows of other nodes
    gradients  to other nodes' owners, after the slots of their rows
    merge      owners read the mailboxes of their node, and update each touched row
    copy sums  of rows with a copy on each node, the sums of all nodes go to one of the holders
    totals     and their total to the others, who update their copies
    sums       the replicas' AllReduce
    replicas   the update of those that any rank touched

A phase takes its waits and exchanges, and then as long as the busiest resource needs for its bytes,
or as its kernels do however few the bytes (a short kernel's time has its own work in it):

    memory   of a rank: what its kernels read and write, what is sent from it and what arrives
    cache    of a rank: all that its kernels read, repeats too; the memory has each row once
    link     of a rank to its node, each way: rows by pointer once for each access, copies once
    adapter  of a rank to other nodes, each way

In memory that ranks share a reader takes rows of the others with its own share of it, and there are
no links. Latency is that of kernels (on CPU ranks operators), waits for the ranks of a node, and
exchanges between nodes. The AllReduce's two levels move their bytes one after the other, by links
and then by adapters. What a batch needs before its lookup, translation and sort, is left out: it is
done a batch ahead. All is expected of a distribution, so that ranks which are alike take equally
long; in a batch the slowest rank takes longer than the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import zip_longest
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.base.portable_math import dot
from oper.cost.allreduce import (
    NODE_COPIES,
    PHASES,
    Method,
    ReplicaBytes,
    allreduce_cost,
    exchange_seconds,
    level_seconds,
)
from oper.cost.holder_sets import HolderSets
from oper.cost.workload import Workload
from oper.topology.pooled_links import PooledTopology, without_pooling
from oper.topology.relays import RelayedTopology, relayed
from oper.topology.topology import Topology
from oper.topology.transports import COLLECTIVE, NVSHMEM

# In their order; those of the AllReduce come after them.
PHASE_NAMES = (
    "wanted",
    "ids",
    "serve",
    "rows",
    "copies",
    "pool",
    "vectors",
    "sum",
    "node sums",
    "gradients",
    "merge",
    "copy sums",
    "totals",
)

ID_BYTES = SLOT_BYTES = 8  # of a row that is asked for, and of one whose gradient is sent
CODE_BYTES, LENGTH_BYTES = 4, 4  # of an access that is forwarded, and of its bag
ID_BYTES_OF_GATHER = 4  # beside a gradient that is gathered


@dataclass(frozen=True)
class PhaseTime:
    """A phase, and what it takes of the slowest rank: waits and exchanges first, then memory or
    cache, and links or adapters, which work at once, and no less than its kernels do."""

    DERIVED: ClassVar = ("seconds",)

    name: str
    memory_seconds: float
    link_seconds: float
    kernel_seconds: float
    wait_seconds: float

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.busy_seconds

    @property
    def busy_seconds(self) -> float:
        """Without waits and exchanges."""
        return max(self.memory_seconds, self.link_seconds, self.kernel_seconds)


@dataclass(frozen=True)
class StepTime:
    """What a step takes. The seconds of a phase are memory's, links' or kernels', whichever take
    the longest, so that the three parts add up to all: kernels' are latency, as waits are."""

    DERIVED: ClassVar = ("seconds", "memory_seconds", "link_seconds", "latency_seconds")

    phases: tuple[PhaseTime, ...]

    @property
    def seconds(self) -> float:
        return self.memory_seconds + self.link_seconds + self.latency_seconds

    @property
    def memory_seconds(self) -> float:
        """Of the phases in which memories, or caches, are the busiest."""
        return sum(p.busy_seconds for p in self.phases if p.memory_seconds == p.busy_seconds)

    @property
    def link_seconds(self) -> float:
        """Of those in which links or adapters are."""
        return sum(
            p.busy_seconds
            for p in self.phases
            if p.memory_seconds < p.busy_seconds == p.link_seconds
        )

    @property
    def latency_seconds(self) -> float:
        """Of waits and exchanges, and of the phases that take as long as their kernels at least."""
        short = [p for p in self.phases if p.kernel_seconds > max(p.memory_seconds, p.link_seconds)]
        return sum(p.wait_seconds for p in self.phases) + sum(p.kernel_seconds for p in short)


class PhaseLatency(NamedTuple):
    """What one rank does in a phase however few the bytes: kernels that are started (operators that
    are called), hops in its node, and exchanges with `peers` ranks of other nodes. A hop is a wait
    for the ranks of the node, or, over a link, for the first row that is read by pointer."""

    kernels: int = 0
    hops: int = 0
    exchanges: int = 0
    peers: int = 0

    def beside(self, other: "PhaseLatency") -> "PhaseLatency":
        """Both in one phase: ranks wait for each other once."""
        return PhaseLatency(
            self.kernels + other.kernels,
            max(self.hops, other.hops),
            self.exchanges + other.exchanges,
            max(self.peers, other.peers),
        )

    def wait_seconds(self, topology: Topology) -> float:
        """Waits and exchanges, one after the other."""
        found = self.hops * topology.latency.same_node
        return found + self.exchanges * exchange_seconds(topology, self.peers)


def phase_latencies(
    topology: Topology, workload: Workload, widths: int, pooled_widths: int = 0
) -> dict[str, PhaseLatency]:
    """What a step does, by phase, as the runtime does it, of tables of `widths` widths whose rows
    travel and of pooled ones of `pooled_widths`; the phase of the AllReduce is in allreduce.py."""
    found = _latencies_of_rows(topology, workload, widths) if widths else {}
    if not pooled_widths:
        return found
    if topology.nodes == 1:  # rows of pooled tables come by pointer
        pooled = _latencies_of_rows(topology, replace(workload, fetch="raw"), pooled_widths)
    else:
        pooled = _latencies_of_bags(topology, workload, pooled_widths)
    phases = [name for name in PHASE_NAMES if name in found or name in pooled]
    none = PhaseLatency()
    return {name: found.get(name, none).beside(pooled.get(name, none)) for name in phases}


def latency_seconds(
    topology: Topology, workload: Workload, widths: int, pooled_widths: int = 0
) -> float:
    """What a step takes however few its bytes, the AllReduce left out."""
    of_phases = phase_latencies(topology, workload, widths, pooled_widths).values()
    kernels = sum(of.kernels for of in of_phases) * topology.latency.kernel
    return kernels + sum(of.wait_seconds(topology) for of in of_phases)


def _latencies_of_rows(
    topology: Topology, workload: Workload, widths: int
) -> dict[str, PhaseLatency]:
    """Of tables whose rows travel (row_fetcher.py, row_relay.py, row_exchange.py): rows are copied,
    and gradients summed and applied, by width, and go between nodes in messages of all widths."""
    over_nodes, in_node = topology.nodes > 1, topology.nodes < topology.ranks
    fetch, transport = workload.known_fetch, topology.known_transport
    through = relayed(topology, fetch == "distinct")
    relays = isinstance(through, RelayedTopology)
    peers = topology.ranks - topology.ranks // topology.nodes
    if isinstance(through, RelayedTopology):
        peers = through.most_peers
    by_link = in_node and topology.of_devices
    found: dict[str, PhaseLatency] = {}
    if over_nodes and transport == COLLECTIVE:
        if relays:
            found["wanted"] = PhaseLatency(kernels=1, hops=1)
        # How many slots there are, and these; then the rows, of which accesses are told.
        found["ids"] = PhaseLatency(exchanges=2, peers=peers)
        found["serve"] = PhaseLatency(kernels=widths)
        found["rows"] = PhaseLatency(kernels=0 if relays else 1, exchanges=1, peers=peers)
    elif over_nodes and transport == NVSHMEM:
        found["rows"] = PhaseLatency(exchanges=1, peers=peers)
    if fetch == "distinct" and in_node:
        found["copies"] = PhaseLatency(kernels=1, hops=by_link or relays)
    found["pool"] = PhaseLatency(kernels=1, hops=by_link and fetch == "raw")
    if workload.training:
        found["sum"] = PhaseLatency(kernels=widths, hops=in_node)
        if relays:
            found["node sums"] = PhaseLatency(kernels=1)
        if over_nodes:  # how many gradients there are, and these
            kernels = 0 if relays else 1
            found["gradients"] = PhaseLatency(kernels, exchanges=2, peers=peers)
        found["merge"] = PhaseLatency(kernels=widths, hops=in_node)
    return found


def _latencies_of_bags(
    topology: Topology, workload: Workload, widths: int
) -> dict[str, PhaseLatency]:
    """Of pooled tables on several nodes (bag_forwarding.py), whose proxies talk to the ranks at
    their own position."""
    in_node = topology.nodes < topology.ranks
    exchange = partial(PhaseLatency, peers=topology.nodes - 1)
    found = {
        "ids": exchange(exchanges=2),
        "serve": PhaseLatency(kernels=1, hops=in_node and topology.of_devices),
        "rows": exchange(exchanges=1),
        "pool": PhaseLatency(kernels=1),
    }
    if workload.training:
        found["vectors"] = exchange(exchanges=1)
        found["sum"] = PhaseLatency(kernels=widths, hops=in_node)
        found["merge"] = PhaseLatency(kernels=widths, hops=in_node)
    return found


def _latencies_of_copies(topology: Topology) -> dict[str, PhaseLatency]:
    """Of rows with a copy on each node (node_copies.py)."""
    kernels, exchanges = NODE_COPIES.kernels // 2, NODE_COPIES.exchanges // 2
    phase = PhaseLatency(kernels, exchanges=exchanges, peers=topology.nodes - 1)
    return {"copy sums": phase, "totals": phase}


@dataclass(frozen=True)
class Amount:
    """Rows and their bytes, of each of G holder sets, or between M ranks."""

    rows: Floats
    bytes: Floats

    def where(self, which: NDArray[np.bool_]) -> "Amount":
        """The amounts where `which` holds, and none elsewhere."""
        return Amount(np.where(which, self.rows, 0.0), np.where(which, self.bytes, 0.0))

    def beside(self, other: "Amount") -> "Amount":
        """Both together."""
        return Amount(self.rows + other.rows, self.bytes + other.bytes)

    def times(self, factor: Floats) -> "Amount":
        """So many times the amounts."""
        return Amount(self.rows * factor, self.bytes * factor)

    def at(self, place: NDArray[np.integer]) -> "Amount":
        """The sums of what is at each place i·M + j of a matrix, [M, M]."""
        M = place.shape[-1]

        def summed(values: Floats) -> Floats:
            found = np.bincount(place.ravel(), values.ravel(), minlength=M * M)
            return found.astype(np.float64, copy=False).reshape(M, M)

        return Amount(summed(self.rows), summed(self.bytes))


@dataclass(frozen=True)
class BatchRows:
    """What is expected of the rows of G holder sets, or of one row of each, in an iteration."""

    all: Amount  # that there are
    read: Amount  # by the accesses of a rank
    of_rank: Amount  # touched by a rank, each once
    of_node: Amount  # by any rank of a node
    of_position: Amount  # by any of the ranks at one position of their nodes
    of_any: Amount  # by any rank
    updates: Floats  # bytes of the last with their optimizer state, read and written

    @property
    def figures(self) -> Floats:
        """All of them, [13, G]: what is linear in rows."""
        amounts = [getattr(self, f.name) for f in fields(self)[:-1]]
        return np.stack([*(of for a in amounts for of in (a.rows, a.bytes)), self.updates])

    @staticmethod
    def is_bytes() -> NDArray[np.bool_]:
        """Return whether each of the figures is in bytes; the others are rows, [13]."""
        return np.array([*(False, True) * (len(fields(BatchRows)) - 1), True])

    @staticmethod
    def of_figures(figures: Floats) -> "BatchRows":
        """The inverse of `figures`."""
        amounts = [Amount(figures[n], figures[n + 1]) for n in range(0, len(figures) - 1, 2)]
        names = [f.name for f in fields(BatchRows)[:-1]]
        return BatchRows(**dict(zip(names, amounts, strict=True)), updates=figures[-1])


@dataclass(frozen=True)
class Bags:
    """A rank's bags in an iteration: how many, and the bytes of their sums, float32. value_ratio:
    bytes of a float32 vector, such as a row's gradient, for a byte of a row."""

    number: float
    output_bytes: float
    value_ratio: float


class _Load:
    """What the bytes of one phase take of each rank's resources, in seconds, [M] each."""

    def __init__(self, topology: Topology) -> None:
        self._cost, self._shared = topology.link_cost, topology.shared_pairs
        self._far = topology.masks()["other_node"]
        self._own = self._cost.diagonal()
        self._cache = topology.cache_seconds
        ranks = topology.ranks
        self.memory, self.cache = np.zeros(ranks), np.zeros(ranks)
        self._links: list[Floats] = []

    def kernel(self, memory: Floats | float, cache: Floats | float = 0.0) -> "_Load":
        """Bytes that kernels read and write in their rank's memory, and repeats from its cache."""
        self.memory = self.memory + memory * self._own
        self.cache = self.cache + cache * self._cache
        return self

    def moved(self, received: Floats, lands: bool = True) -> "_Load":
        """Bytes that rank i gets from rank j ≠ i, [i, j]: from the memory of j and, if they land,
        into that of i; otherwise the kernel of i reads them as they come."""
        seconds = received * self._cost
        by_reader = np.where(self._shared, seconds, 0.0).sum(axis=1)
        passing = np.where(self._shared, 0.0, seconds)
        bytes = np.where(self._shared, 0.0, received)
        self.memory = self.memory + by_reader + bytes.sum(axis=0) * self._own
        if lands:
            self.memory = self.memory + bytes.sum(axis=1) * self._own
        for kind in (self._far, ~self._far):
            of_kind = np.where(kind, passing, 0.0)
            self._links += [of_kind.sum(axis=0), of_kind.sum(axis=1)]
        return self

    def beside(self, other: "_Load") -> "_Load":
        """Both in one phase."""
        self.memory, self.cache = self.memory + other.memory, self.cache + other.cache
        pairs = zip_longest(self._links, other._links, fillvalue=np.zeros(len(self.memory)))
        self._links = [one + of for one, of in pairs]
        return self

    def phase(self, name: str, kernel_seconds: float, wait_seconds: float) -> PhaseTime:
        """The phase of the slowest rank."""
        memory = max(float(self.memory.max()), float(self.cache.max()))
        links = max((float(each.max()) for each in self._links), default=0.0)
        return PhaseTime(name, memory, links, kernel_seconds, wait_seconds)


@dataclass(frozen=True)
class Part:
    """Tables that are fetched in one way, of so many widths: their rows, and a rank's bags."""

    widths: int
    rows: BatchRows
    bags: Bags


def step_time(
    topology: Topology,
    workload: Workload,
    sets: HolderSets,
    fetched: Part,
    pooled: Part,
    method: Method,
) -> StepTime:
    """What a step takes whose rows lie in these holder sets: of tables that are `fetched` as the
    workload says, and of those that are `pooled`. The topology of pooled tables says what their
    sums are; `method` is the replicas' AllReduce."""
    unpooled = without_pooling(topology)
    latencies = phase_latencies(unpooled, workload, fetched.widths, pooled.widths)
    if workload.training:
        held = (fetched.rows.all.rows + pooled.rows.all.rows)[sets.on_some]
        latencies |= _latencies_of_copies(unpooled) if held.any() else {}
    loads: dict[str, _Load] = {}
    if fetched.widths:
        step = _Step(unpooled, workload, sets, fetched, latencies, loads)
        step.fetch_rows()
        step.update()
    if pooled.widths and isinstance(topology, PooledTopology) and topology.nodes > 1:
        forwarding = _Step(unpooled, workload, sets, pooled, latencies, loads)
        forwarding.forward_bags(topology.vector_ratio[np.array(topology.node_of)])
        forwarding.update()
    elif pooled.widths:
        by_pointer = replace(workload, fetch="raw")
        step = _Step(unpooled, by_pointer, sets, pooled, latencies, loads)
        step.fetch_rows()
        step.update()
    kernel = unpooled.latency.kernel
    phases = [
        loads[name].phase(name, of.kernels * kernel, of.wait_seconds(unpooled))
        for name, of in latencies.items()
        if name in loads
    ]
    if workload.training and method != "none":
        phases += _sums_of_replicas(unpooled, sets, (fetched, pooled), method)
    return StepTime(tuple(phases))


class _Step:
    """The loads of a step's phases on M ranks, of one way of fetching, which are added to `loads`;
    matrices are [reader, source] or [to, from], [M, M]."""

    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        sets: HolderSets,
        part: Part,
        latencies: dict[str, PhaseLatency],
        loads: dict[str, _Load],
    ) -> None:
        self.topology, self.workload, self.sets = topology, workload, sets
        self.rows, self.bags = part.rows, part.bags
        self.once = workload.known_fetch == "distinct"
        self.far = topology.masks()["other_node"]
        self.near = topology.masks()["same_node"]
        self.proxy = topology.proxy
        self.latencies, self.loads = latencies, loads
        self.accesses = self.traffic(self.rows.read)
        self.joined: Amount | None = None  # of forwarded bags: [proxy, owner]
        self.vectors = np.zeros((topology.ranks, topology.ranks))

    def load(self) -> _Load:
        return _Load(self.topology)

    def add(self, name: str, load: _Load) -> None:
        """The bytes of a phase."""
        self.loads[name] = load if name not in self.loads else self.loads[name].beside(load)

    # Forward.

    def fetch_rows(self) -> None:
        """Rows that travel themselves, and the lookup."""
        touched = self.traffic(self.rows.of_rank)
        moved = touched if self.once else self.accesses
        copied: Floats = np.where(self.near & self.once, touched.bytes, 0.0)
        asked = moved.where(self.far)
        if "wanted" in self.latencies and self.once:
            wanted = self.of_relays(asked)
            self.add("wanted", self.load().moved(ID_BYTES * wanted.rows))
            copied = copied + wanted.bytes.T
            asked = self.by_relays(self.traffic(self.rows.of_node))
        if "ids" in self.latencies:
            self.add("ids", self.load().moved(ID_BYTES * asked.rows.T))
            # Read, and put in a row.
            self.add("serve", self.load().kernel(2 * asked.bytes.sum(axis=0)))
        if self.topology.nodes > 1:
            self.add("rows", self.load().moved(asked.bytes))
        if "copies" in self.latencies:
            self.add("copies", self.load().moved(copied))
        by_pointer = self.near & (not self.once)
        kept = self.accesses.where(~by_pointer).bytes.sum(axis=1)
        held = touched.where(~by_pointer).bytes.sum(axis=1)
        pool = self.load().moved(self.accesses.where(by_pointer).bytes, lands=False)
        self.add("pool", pool.kernel(held + self.bags.output_bytes, kept))

    def of_relays(self, asked: "Amount") -> "Amount":
        """What the relays of a node, the ranks at the owners' positions, get for its other ranks,
        [relay, rank]."""
        M = self.topology.ranks
        place = self.proxy.T * M + np.arange(M)[:, None]
        return asked.at(place).where(self.near)

    def by_relays(self, touched_in_node: "Amount") -> "Amount":
        """What relays ask of owners in other nodes for all ranks of their own, [relay, owner]: the
        mean of what these ranks expect the node to touch."""
        M = self.topology.ranks
        node_of = np.array(self.topology.node_of)
        share = 1 / np.bincount(node_of)[node_of][:, None]
        place = self.proxy.T * M + np.arange(M)
        return touched_in_node.where(self.far).times(share).at(place)

    def forward_bags(self, ratios: Floats) -> None:
        """Sums of bags that travel, with what each rank reads for its own bags and its clients'."""
        M, output = self.topology.ranks, self.bags.output_bytes
        forwarded = self.accesses.where(self.far)
        by_proxy = forwarded.at(np.arange(M)[:, None] * M + self.proxy)
        vectors = self.vectors = (
            forwarded.times(ratios).at(np.arange(M)[:, None] * M + self.proxy).bytes
        )  # [rank, proxy]
        lengths = vectors * (self.bags.number / max(output, 1.0))
        self.add("ids", self.load().moved((CODE_BYTES * by_proxy.rows + LENGTH_BYTES * lengths).T))
        for_clients = self.proxy * M + np.arange(M)
        self.joined = self.accesses.at(for_clients)  # [proxy, owner]
        from_memory = self.traffic(self.rows.of_rank).at(for_clients).bytes.diagonal()
        serve = self.load().moved(self.joined.where(self.near).bytes, lands=False)
        written = vectors.sum(axis=0) + output
        self.add("serve", serve.kernel(from_memory + written, self.joined.bytes.diagonal()))
        self.add("rows", self.load().moved(vectors))
        came = vectors.sum(axis=1)
        self.add("pool", self.load().kernel(came + 2 * np.minimum(came, output)))
        if self.workload.training:
            self.add("vectors", self.load().moved(vectors.T))

    # Backward.

    def update(self) -> None:
        """From the gradients of the output to the update of every touched row, in training."""
        if not self.workload.training:
            return
        ratio, everywhere = self.bags.value_ratio, self.sets.everywhere
        single, own = self.sets.copies == 1, self.rows.of_rank.where(~everywhere)
        given = np.full(self.topology.ranks, self.bags.output_bytes)
        relays = "node sums" in self.latencies and self.joined is None
        if self.joined is None:
            mail = self.traffic(own)
            summed = self.accesses.bytes.sum(axis=1)
        else:
            # The gradients of a node's rows are summed by the proxies there.
            forwarded = self.rows.of_position.where(single)
            mail = self.traffic(forwarded.beside(own.where(~single))).where(~self.far)
            summed = self.joined.bytes.sum(axis=1)
            given = given + self.vectors.sum(axis=0)
        of_replicas = ratio * float(self.rows.of_rank.where(everywhere).bytes.sum())
        written = self.gradient_bytes(mail).sum(axis=1) + of_replicas
        self.add("sum", self.load().kernel(given + written, ratio * summed))
        sent = self.gradient_bytes(mail.where(self.far))
        if relays:
            mates = self.gradient_bytes(self.of_relays(mail.where(self.far)))
            of_node = self.traffic(self.rows.of_node.where(single))
            sent = self.gradient_bytes(self.by_relays(of_node))
            load = self.load().moved(mates, lands=False)
            self.add("node sums", load.kernel(sent.sum(axis=1)))
        if "gradients" in self.latencies and self.joined is None:
            self.add("gradients", self.load().moved(sent.T))
        left = self.gradient_bytes(mail)
        updates = _of_owners(self.sets, np.where(single, self.rows.updates, 0.0))
        merge = self.load().moved(np.where(self.near, left, 0.0).T, lands=False)
        self.add("merge", merge.kernel(left.diagonal() + sent.sum(axis=0) + updates))
        if "totals" in self.latencies:
            self.update_copies()

    def update_copies(self) -> None:
        """The AllReduce of the rows with a copy on each node, among their holders: a part of each
        one's sums goes to each other, and comes back as totals."""
        M, N, some = self.topology.ranks, self.topology.nodes, self.sets.on_some
        position = np.zeros((M, M), dtype=bool)
        position[np.arange(M)[:, None], self.proxy] = True
        position &= self.far

        def moved(rows: Amount) -> Floats:
            """The bytes of a holder's rows between it and each other one, [to, from]."""
            held = self.sets.holds.T.astype(np.float64)
            each = rows.where(some)
            bytes = self.gradient_bytes(Amount(dot(held, each.rows), dot(held, each.bytes)))
            return np.where(position, bytes / N, 0.0)

        sums = moved(self.rows.of_node)
        self.add("copy sums", self.load().moved(sums).kernel(sums.sum(axis=0)))
        updates = dot(self.sets.holds.T.astype(np.float64), np.where(some, self.rows.updates, 0.0))
        self.add("totals", self.load().moved(moved(self.rows.of_any)).kernel(updates))

    def gradient_bytes(self, rows: "Amount") -> Floats:
        """The bytes of rows' gradients, with their slots."""
        return self.bags.value_ratio * rows.bytes + SLOT_BYTES * rows.rows

    def traffic(self, rows: "Amount") -> "Amount":
        """Rows of holder sets, each of which every rank reads, by [reader, source]."""
        M = self.topology.ranks
        place = np.arange(M) * M + self.sets.source
        every = np.broadcast_to(rows.rows[:, None], place.shape)
        bytes = np.broadcast_to(rows.bytes[:, None], place.shape)
        return Amount(every, bytes).at(place)


def _sums_of_replicas(
    topology: Topology, sets: HolderSets, parts: Sequence[Part], method: Method
) -> list[PhaseTime]:
    """The AllReduce: links inside the node, then adapters, and the kernels' memory."""
    replicated = sets.everywhere
    gradients, updates = ReplicaBytes(0.0, 0.0, 0.0, 0.0), 0.0
    for part in parts:
        ratio, rows = part.bags.value_ratio, part.rows
        there, touched = rows.all.where(replicated), rows.of_rank.where(replicated)
        ids = ID_BYTES_OF_GATHER * float(touched.rows.sum())
        of_part = (
            float(there.rows.sum()),
            float(there.bytes.sum()) * ratio,
            float(rows.of_any.where(replicated).bytes.sum()) * ratio,
            float(touched.bytes.sum()) * ratio + ids,
        )
        gradients = ReplicaBytes(*map(sum, zip(gradients, of_part, strict=True)))
        updates += float(rows.updates[replicated].sum())
    levels = level_seconds(topology, method, gradients)
    memory = _Load(topology).kernel(gradients.of_any + updates).memory.max()
    # One of its kernels, by which the replicas are updated, comes after the sums.
    least = topology.latency.kernel
    summing = (PHASES[method].kernels - 1) * least
    waits = allreduce_cost(topology, method).latency - summing - least
    return [
        PhaseTime("sums", 0.0, levels, summing, max(waits, 0.0)),
        PhaseTime("replicas", float(memory), 0.0, least, 0.0),
    ]


def _of_owners(sets: HolderSets, values: Floats) -> Floats:
    """The sums over holder sets of values [G] by their first holder, [M]."""
    found = np.bincount(sets.holds.argmax(axis=1), values, minlength=sets.holds.shape[1])
    return found.astype(np.float64, copy=False)
