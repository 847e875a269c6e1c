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

from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.cost.allreduce import (
    PHASES,
    Method,
    ReplicaBytes,
    allreduce_cost,
    exchange_seconds,
    level_seconds,
)
from oper.cost.holder_sets import HolderSets
from oper.cost.workload import Workload
from oper.topology.pooled_links import PooledTopology, proxy_ranks
from oper.topology.topology import Topology
from oper.topology.transports import COLLECTIVE, NVSHMEM

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

    def wait_seconds(self, topology: Topology) -> float:
        """Waits and exchanges, one after the other."""
        found = self.hops * topology.latency.same_node
        return found + self.exchanges * exchange_seconds(topology, self.peers)


def relays(topology: Topology, workload: Workload) -> bool:
    """Whether a row of another node comes once a node, to the rank there at its owner's position,
    of which the others get it; gradients go back the same way."""
    several = 1 < topology.nodes < topology.ranks
    return several and workload.known_fetch == "distinct" and topology.known_transport == COLLECTIVE


def phase_latencies(topology: Topology, workload: Workload, widths: int) -> dict[str, PhaseLatency]:
    """What a step of tables of so many widths does, by phase, as the runtime does it
    (row_fetcher.py, apply_gradients.py): rows and gradients of each width are asked for, summed,
    sent and applied on their own. Slots, rows and gradients are each sent after how many they are;
    the phase of the AllReduce is in allreduce.py."""
    over_nodes, in_node = topology.nodes > 1, topology.nodes < topology.ranks
    # Relays, and proxies of bags, talk to the ranks at their own position.
    by_position = relays(topology, workload) or workload.known_fetch == "pooled"
    peers = topology.ranks - topology.ranks // topology.nodes
    peers = topology.nodes - 1 if by_position else peers
    exchange = partial(PhaseLatency, peers=peers)
    fetch, transport = workload.known_fetch, topology.known_transport
    by_link = in_node and topology.of_devices
    found: dict[str, PhaseLatency] = {}
    if over_nodes and fetch == "pooled":
        found["ids"] = exchange(exchanges=2)
        found["serve"] = PhaseLatency(kernels=1, hops=by_link)
        found["rows"] = exchange(exchanges=1)
    elif over_nodes and transport == COLLECTIVE:
        if relays(topology, workload):
            found["wanted"] = PhaseLatency(kernels=widths, hops=1)
        found["ids"] = exchange(exchanges=2 * widths)
        found["serve"] = PhaseLatency(kernels=widths)
        found["rows"] = exchange(exchanges=2 * widths)
    elif over_nodes and transport == NVSHMEM:
        found["rows"] = exchange(exchanges=1)
    if fetch == "distinct" and in_node:
        found["copies"] = PhaseLatency(kernels=1, hops=by_link or relays(topology, workload))
    found["pool"] = PhaseLatency(kernels=1, hops=by_link and fetch == "raw")
    if workload.training:
        if over_nodes and fetch == "pooled":
            found["vectors"] = exchange(exchanges=1)
        found["sum"] = PhaseLatency(kernels=widths, hops=in_node)
        if relays(topology, workload):
            found["node sums"] = PhaseLatency(kernels=widths, hops=1)
        if over_nodes and fetch != "pooled":
            found["gradients"] = exchange(exchanges=4 * widths)
        found["merge"] = PhaseLatency(kernels=widths, hops=in_node)
    return found


@dataclass(frozen=True)
class Amount:
    """Rows and their bytes, of each of G holder sets, or between M ranks."""

    rows: Floats
    bytes: Floats

    def where(self, which: NDArray[np.bool_]) -> "Amount":
        """The amounts where `which` holds, and none elsewhere."""
        return Amount(np.where(which, self.rows, 0.0), np.where(which, self.bytes, 0.0))

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

    def phase(self, name: str, kernel_seconds: float, wait_seconds: float) -> PhaseTime:
        """The phase of the slowest rank."""
        memory = max(float(self.memory.max()), float(self.cache.max()))
        links = max((float(each.max()) for each in self._links), default=0.0)
        return PhaseTime(name, memory, links, kernel_seconds, wait_seconds)


def step_time(
    topology: Topology,
    workload: Workload,
    widths: int,
    sets: HolderSets,
    rows: BatchRows,
    bags: Bags,
    method: Method,
) -> StepTime:
    """What a step takes whose rows lie in these holder sets, of tables of so many widths. The
    topology of pooled tables says what their sums are; `method` is the replicas' AllReduce."""
    return _Step(topology, workload, widths, sets, rows, bags, method).time()


class _Step:
    """The phases of a step on M ranks; matrices are [reader, source] or [to, from], [M, M]."""

    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        widths: int,
        sets: HolderSets,
        rows: BatchRows,
        bags: Bags,
        method: Method,
    ) -> None:
        self.ratios: Floats | None = None
        if isinstance(topology, PooledTopology):
            self.ratios = topology.vector_ratio[np.array(topology.node_of)]
            topology = topology.unpooled
        self.topology, self.workload, self.rows, self.bags = topology, workload, rows, bags
        self.sets, self.method, self.training = sets, method, workload.training
        self.once = workload.known_fetch == "distinct"
        self.far = topology.masks()["other_node"]
        self.near = topology.masks()["same_node"]
        self.proxy = proxy_ranks(topology.node_of)
        self.latencies = phase_latencies(topology, workload, widths)
        self.phases: list[PhaseTime] = []
        self.accesses = self.traffic(rows.read)

    def time(self) -> StepTime:
        if self.ratios is not None:
            self.forward_bags(self.ratios)
        else:
            self.fetch_rows()
        if self.training:
            self.update()
        return StepTime(tuple(self.phases))

    def load(self) -> _Load:
        return _Load(self.topology)

    def add(self, name: str, load: _Load) -> None:
        """A phase by what its bytes take."""
        latency = self.latencies.get(name, PhaseLatency())
        kernels = latency.kernels * self.topology.latency.kernel
        self.phases.append(load.phase(name, kernels, latency.wait_seconds(self.topology)))

    # Forward.

    def fetch_rows(self) -> None:
        """Rows that travel themselves, and the lookup."""
        touched = self.traffic(self.rows.of_rank)
        moved = touched if self.once else self.accesses
        copied: Floats = np.where(self.near & self.once, touched.bytes, 0.0)
        asked = moved.where(self.far)
        if "wanted" in self.latencies:
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
        if self.training:
            self.add("vectors", self.load().moved(vectors.T))

    # Backward.

    def update(self) -> None:
        """From the gradients of the output to the update of every touched row."""
        ratio, single = self.bags.value_ratio, self.sets.copies == 1
        given = np.full(self.topology.ranks, self.bags.output_bytes)
        if self.ratios is None:
            mail = self.traffic(self.rows.of_rank.where(single))
            summed = self.accesses.bytes.sum(axis=1)
        else:
            # The gradients of a node's rows are summed by the proxies there.
            mail = self.traffic(self.rows.of_position.where(single)).where(~self.far)
            summed = self.joined.bytes.sum(axis=1)
            given = given + self.vectors.sum(axis=0)
        replicas = self.rows.of_rank.where(~single)
        of_replicas = ratio * float(replicas.bytes.sum())
        written = self.gradient_bytes(mail).sum(axis=1) + of_replicas
        self.add("sum", self.load().kernel(given + written, ratio * summed))
        sent = self.gradient_bytes(mail.where(self.far))
        if "node sums" in self.latencies:
            mates = self.gradient_bytes(self.of_relays(mail.where(self.far)))
            of_node = self.traffic(self.rows.of_node.where(single))
            sent = self.gradient_bytes(self.by_relays(of_node))
            load = self.load().moved(mates, lands=False)
            self.add("node sums", load.kernel(sent.sum(axis=1)))
        if "gradients" in self.latencies:
            self.add("gradients", self.load().moved(sent.T))
        left = self.gradient_bytes(mail)
        updates = _of_owners(self.sets, np.where(single, self.rows.updates, 0.0))
        merge = self.load().moved(np.where(self.near, left, 0.0).T, lands=False)
        self.add("merge", merge.kernel(left.diagonal() + sent.sum(axis=0) + updates))
        if self.method != "none":
            self.sum_replicas(~single, replicas)

    def gradient_bytes(self, rows: "Amount") -> Floats:
        """The bytes of rows' gradients, with their slots."""
        return self.bags.value_ratio * rows.bytes + SLOT_BYTES * rows.rows

    def sum_replicas(self, replicated: NDArray[np.bool_], touched: "Amount") -> None:
        """The AllReduce: links inside the node, then adapters, and the kernels' memory."""
        ratio, topology = self.bags.value_ratio, self.topology
        of_any = self.rows.of_any.where(replicated).bytes.sum() * ratio
        there = self.rows.all.where(replicated)
        levels = level_seconds(
            topology,
            self.method,
            ReplicaBytes(
                rows=float(there.rows.sum()),
                all=float(there.bytes.sum()) * ratio,
                of_any=float(of_any),
                of_rank=float(
                    touched.bytes.sum() * ratio + ID_BYTES_OF_GATHER * touched.rows.sum()
                ),
            ),
        )
        memory = of_any + float(self.rows.updates[replicated].sum())
        memory = self.load().kernel(memory).memory.max()
        # One of its kernels, by which the replicas are updated, comes after the sums.
        least = topology.latency.kernel
        summing = (PHASES[self.method].kernels - 1) * least
        waits = allreduce_cost(topology, self.method).latency - summing - least
        self.phases.append(PhaseTime("sums", 0.0, levels, summing, max(waits, 0.0)))
        self.phases.append(PhaseTime("replicas", float(memory), 0.0, least, 0.0))

    def traffic(self, rows: "Amount") -> "Amount":
        """Rows of holder sets, each of which every rank reads, by [reader, source]."""
        M = self.topology.ranks
        place = np.arange(M) * M + self.sets.source
        every = np.broadcast_to(rows.rows[:, None], place.shape)
        bytes = np.broadcast_to(rows.bytes[:, None], place.shape)
        return Amount(every, bytes).at(place)


def _of_owners(sets: HolderSets, values: Floats) -> Floats:
    """The sums over holder sets of values [G] by their first holder, [M]."""
    found = np.bincount(sets.holds.argmax(axis=1), values, minlength=sets.holds.shape[1])
    return found.astype(np.float64, copy=False)
