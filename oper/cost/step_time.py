"""Step time by phase: the seconds of each phase of the runtime, from the expected reads of a rank's
batch.

The objective (objective.py), by which plans are compared and certified, adds up the time of every
byte. A step is shorter than that, because memories and links work at once and repeats come from a
cache; and longer, because every phase has its latency, moves ids and slots, and reads outputs and
gradients that no placement changes. Between two phases ranks wait for each other:

    wanted     ranks tell the relays of their node which distinct rows of other nodes they want
    ids        ranks, or relays for all of their node, ask the owners of other nodes for rows, or
               ranks forward the bags of pooled tables
    serve      owners gather the rows; the rows of forwarded bags are added up
    rows       rows, or sums of bags, come from other nodes
    copies     distinct rows of the node's other ranks, and the rows that its relays got
    pool       the lookup: bags are added up from received rows and from the rank's own
    vectors    gradients of forwarded bags go back
    sum        the gradients of each row are summed into the mailbox
    node sums  relays add up their node's gradients of rows of other nodes
    gradients  to other nodes' owners, after the slots of their rows
    merge      owners read the mailboxes of their node, and update each touched row
    copy sums  for rows with a copy on each node, the sums of all nodes go to one holder
    totals     which sends the total to the others; all update their copies
    sums       the replicas' AllReduce
    replicas   the update of the replicas that any rank touched

A phase takes its waits and exchanges, and then the time of the busiest resource for its bytes, or
the fixed time of its kernels if that is longer (a short kernel's time includes its work):

    memory   of a rank: bytes that its kernels read and write, that it sends and that arrive
    cache    of a rank: all bytes that its kernels read; the memory reads repeated rows once
    link     of a rank to its node, each way: rows by pointer once for each access, copies once
    adapter  of a rank to other nodes, each way

In shared memory a reader reads rows of the other ranks with its own share of the bandwidth, and
there are no links. Latency is that of kernels (on CPU ranks operators), waits for the ranks of a
node, and exchanges between nodes. The AllReduce's two levels move their bytes one after the other,
over links and then over adapters. Translation and sort of a batch are left out, because they are
done a batch ahead. All figures are expectations, so identical ranks take equally long; in a real
batch the slowest rank takes longer than the mean.
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

# In order; the phases of the AllReduce come after them.
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

ID_BYTES = SLOT_BYTES = 8  # of a row that is requested, and of one whose gradient is sent
CODE_BYTES, LENGTH_BYTES = 4, 4  # of an access that is forwarded, and of its bag
ID_BYTES_OF_GATHER = 4  # next to a gradient that is gathered


@dataclass(frozen=True)
class PhaseTime:
    """Phase and its seconds on the slowest rank: waits and exchanges first, then memory or cache,
    and links or adapters, all of which work at once, but at least the seconds of its kernels."""

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
        """Seconds without waits and exchanges."""
        return max(self.memory_seconds, self.link_seconds, self.kernel_seconds)


@dataclass(frozen=True)
class StepTime:
    """Step time and its phases. The seconds of a phase count as memory, links or kernels, whichever
    take the longest, so that the three parts add up to the whole; kernels count as latency, like
    waits."""

    DERIVED: ClassVar = ("seconds", "memory_seconds", "link_seconds", "latency_seconds")

    phases: tuple[PhaseTime, ...]

    @property
    def seconds(self) -> float:
        return self.memory_seconds + self.link_seconds + self.latency_seconds

    @property
    def memory_seconds(self) -> float:
        """Seconds of the phases in which memories or caches are the busiest."""
        return sum(p.busy_seconds for p in self.phases if p.memory_seconds == p.busy_seconds)

    @property
    def link_seconds(self) -> float:
        """Seconds of the phases in which links or adapters are the busiest."""
        return sum(
            p.busy_seconds
            for p in self.phases
            if p.memory_seconds < p.busy_seconds == p.link_seconds
        )

    @property
    def latency_seconds(self) -> float:
        """Seconds of waits and exchanges, and of the phases in which kernels take the longest."""
        short = [p for p in self.phases if p.kernel_seconds > max(p.memory_seconds, p.link_seconds)]
        return sum(p.wait_seconds for p in self.phases) + sum(p.kernel_seconds for p in short)


class PhaseLatency(NamedTuple):
    """Fixed work of one rank in a phase: kernels that are started (operators that are called), hops
    in its node, and exchanges with `peers` ranks of other nodes. A hop is a wait for the ranks of
    the node or, over a link, for the first row that is read by pointer."""

    kernels: int = 0
    hops: int = 0
    exchanges: int = 0
    peers: int = 0

    def beside(self, other: "PhaseLatency") -> "PhaseLatency":
        """Return both in one phase: ranks wait for each other once."""
        return PhaseLatency(
            self.kernels + other.kernels,
            max(self.hops, other.hops),
            self.exchanges + other.exchanges,
            max(self.peers, other.peers),
        )

    def wait_seconds(self, topology: Topology) -> float:
        """Return the seconds of waits and exchanges, one after the other."""
        hop_seconds = self.hops * topology.latency.same_node
        return hop_seconds + self.exchanges * exchange_seconds(topology, self.peers)


def phase_latencies(
    topology: Topology, workload: Workload, widths: int, pooled_widths: int = 0
) -> dict[str, PhaseLatency]:
    """Return the fixed work of the runtime in each phase, for tables of `widths` widths whose rows
    travel and pooled tables of `pooled_widths` widths. The phase of the AllReduce is in
    allreduce.py."""
    of_rows = _latencies_of_rows(topology, workload, widths) if widths else {}
    if not pooled_widths:
        return of_rows
    if topology.nodes == 1:  # rows of pooled tables come by pointer
        pooled = _latencies_of_rows(topology, replace(workload, fetch="raw"), pooled_widths)
    else:
        pooled = _latencies_of_bags(topology, workload, pooled_widths)
    phases = [name for name in PHASE_NAMES if name in of_rows or name in pooled]
    none = PhaseLatency()
    return {name: of_rows.get(name, none).beside(pooled.get(name, none)) for name in phases}


def latency_seconds(
    topology: Topology, workload: Workload, widths: int, pooled_widths: int = 0
) -> float:
    """Return the fixed latency of a step, excluding the AllReduce, in seconds."""
    of_phases = phase_latencies(topology, workload, widths, pooled_widths).values()
    kernels = sum(of.kernels for of in of_phases) * topology.latency.kernel
    return kernels + sum(of.wait_seconds(topology) for of in of_phases)


def _latencies_of_rows(
    topology: Topology, workload: Workload, widths: int
) -> dict[str, PhaseLatency]:
    """Return the latencies of tables whose rows travel (copied_rows.py, relayed_rows.py,
    row_exchange.py): rows are copied, and gradients summed and applied, by width, and cross between
    nodes in messages of all widths."""
    over_nodes, in_node = topology.nodes > 1, topology.nodes < topology.ranks
    fetch, transport = workload.known_fetch, topology.known_transport
    through = relayed(topology, fetch == "distinct")
    relays = isinstance(through, RelayedTopology)
    peers = topology.ranks - topology.ranks // topology.nodes
    if isinstance(through, RelayedTopology):
        peers = through.most_peers
    by_link = in_node and topology.of_devices
    latencies: dict[str, PhaseLatency] = {}
    if over_nodes and transport == COLLECTIVE:
        if relays:
            latencies["wanted"] = PhaseLatency(kernels=1, hops=1)
        # The number of slots, then the slots; then the rows, with their accesses.
        latencies["ids"] = PhaseLatency(exchanges=2, peers=peers)
        latencies["serve"] = PhaseLatency(kernels=widths)
        latencies["rows"] = PhaseLatency(kernels=0 if relays else 1, exchanges=1, peers=peers)
    elif over_nodes and transport == NVSHMEM:
        latencies["rows"] = PhaseLatency(exchanges=1, peers=peers)
    if fetch == "distinct" and in_node:
        latencies["copies"] = PhaseLatency(kernels=1, hops=by_link or relays)
    latencies["pool"] = PhaseLatency(kernels=1, hops=by_link and fetch == "raw")
    if workload.training:
        latencies["sum"] = PhaseLatency(kernels=widths, hops=in_node)
        if relays:
            latencies["node sums"] = PhaseLatency(kernels=1)
        if over_nodes:  # the number of gradients, then the gradients
            kernels = 0 if relays else 1
            latencies["gradients"] = PhaseLatency(kernels, exchanges=2, peers=peers)
        latencies["merge"] = PhaseLatency(kernels=widths, hops=in_node)
    return latencies


def _latencies_of_bags(
    topology: Topology, workload: Workload, widths: int
) -> dict[str, PhaseLatency]:
    """Return the latencies of pooled tables on several nodes (pooled_bags.py), whose proxies
    exchange with the ranks at the same position."""
    in_node = topology.nodes < topology.ranks
    exchange = partial(PhaseLatency, peers=topology.nodes - 1)
    latencies = {
        "ids": exchange(exchanges=2),
        "serve": PhaseLatency(kernels=1, hops=in_node and topology.of_devices),
        "rows": exchange(exchanges=1),
        "pool": PhaseLatency(kernels=1),
    }
    if workload.training:
        latencies["vectors"] = exchange(exchanges=1)
        latencies["sum"] = PhaseLatency(kernels=widths, hops=in_node)
        latencies["merge"] = PhaseLatency(kernels=widths, hops=in_node)
    return latencies


def _latencies_of_copies(topology: Topology) -> dict[str, PhaseLatency]:
    """Return the latencies of rows with a copy on each node (node_copies.py)."""
    kernels, exchanges = NODE_COPIES.kernels // 2, NODE_COPIES.exchanges // 2
    phase = PhaseLatency(kernels, exchanges=exchanges, peers=topology.nodes - 1)
    return {"copy sums": phase, "totals": phase}


@dataclass(frozen=True)
class Amount:
    """Numbers of rows and their bytes, in each of G holder sets or between M ranks."""

    rows: Floats
    bytes: Floats

    def where(self, which: NDArray[np.bool_]) -> "Amount":
        """Return the amounts that `which` selects, and 0 elsewhere."""
        return Amount(np.where(which, self.rows, 0.0), np.where(which, self.bytes, 0.0))

    def beside(self, other: "Amount") -> "Amount":
        """Return the sum of both."""
        return Amount(self.rows + other.rows, self.bytes + other.bytes)

    def times(self, factor: Floats) -> "Amount":
        """Return the amounts times `factor`."""
        return Amount(self.rows * factor, self.bytes * factor)

    def at(self, place: NDArray[np.integer]) -> "Amount":
        """Return the sums of the amounts at each place i·M + j of a matrix, [M, M]."""
        M = place.shape[-1]

        def summed(values: Floats) -> Floats:
            found = np.bincount(place.ravel(), values.ravel(), minlength=M * M)
            return found.astype(np.float64, copy=False).reshape(M, M)

        return Amount(summed(self.rows), summed(self.bytes))


@dataclass(frozen=True)
class BatchRows:
    """Expected figures, in an iteration, of the rows of G holder sets, or of one row of each."""

    all: Amount  # of the tables
    read: Amount  # by all accesses of a rank
    of_rank: Amount  # touched by a rank, each once
    of_node: Amount  # by any rank of a node
    of_position: Amount  # by any of the ranks at one position of their nodes
    of_any: Amount  # by any rank
    updates: Floats  # bytes of of_any with their optimizer state, read and written

    @property
    def figures(self) -> Floats:
        """All figures, [13, G], each linear in rows."""
        amounts = [getattr(self, f.name) for f in fields(self)[:-1]]
        return np.stack([*(of for a in amounts for of in (a.rows, a.bytes)), self.updates])

    @staticmethod
    def is_bytes() -> NDArray[np.bool_]:
        """Return whether each of the figures is in bytes; the others are rows, [13]."""
        return np.array([*(False, True) * (len(fields(BatchRows)) - 1), True])

    @staticmethod
    def of_figures(figures: Floats) -> "BatchRows":
        """Return the rows with these `figures`."""
        amounts = [Amount(figures[n], figures[n + 1]) for n in range(0, len(figures) - 1, 2)]
        names = [f.name for f in fields(BatchRows)[:-1]]
        return BatchRows(**dict(zip(names, amounts, strict=True)), updates=figures[-1])


@dataclass(frozen=True)
class Bags:
    """A rank's bags in an iteration: their number, and the bytes of their sums, float32.
    value_ratio: bytes of a float32 vector, such as a row's gradient, per byte of a row."""

    number: float
    output_bytes: float
    value_ratio: float


class _Load:
    """Seconds of each rank's resources for the bytes of one phase, [M] each."""

    def __init__(self, topology: Topology) -> None:
        self._cost, self._shared = topology.link_cost, topology.shared_pairs
        self._far = topology.masks()["other_node"]
        self._own = self._cost.diagonal()
        self._cache = topology.cache_seconds
        ranks = topology.ranks
        self.memory, self.cache = np.zeros(ranks), np.zeros(ranks)
        self._links: list[Floats] = []

    def kernel(self, memory: Floats | float, cache: Floats | float = 0.0) -> "_Load":
        """Add bytes that kernels read and write in their rank's memory, and repeats from its
        cache."""
        self.memory = self.memory + memory * self._own
        self.cache = self.cache + cache * self._cache
        return self

    def moved(self, received: Floats, lands: bool = True) -> "_Load":
        """Add bytes that rank i gets from rank j ≠ i, [i, j]: from the memory of j and, if `lands`,
        into that of i; otherwise the kernel of i reads them directly."""
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
        """Add the load of `other`, in the same phase."""
        self.memory, self.cache = self.memory + other.memory, self.cache + other.cache
        pairs = zip_longest(self._links, other._links, fillvalue=np.zeros(len(self.memory)))
        self._links = [one + of for one, of in pairs]
        return self

    def phase(self, name: str, kernel_seconds: float, wait_seconds: float) -> PhaseTime:
        """Return the phase on the slowest rank."""
        memory = max(float(self.memory.max()), float(self.cache.max()))
        links = max((float(seconds.max()) for seconds in self._links), default=0.0)
        return PhaseTime(name, memory, links, kernel_seconds, wait_seconds)


@dataclass(frozen=True)
class Part:
    """Tables of one fetch, with `widths` distinct widths: their rows, and a rank's bags."""

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
    """Return the time of a step whose rows lie in these holder sets: of tables that are `fetched`
    by the workload's fetch, and of those that are `pooled`. The topology of pooled tables has the
    ratios of their sums; `method` is the replicas' AllReduce."""
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
    """Loads of a step's phases on M ranks, for one fetch, which are added to `loads`; matrices are
    [reader, source] or [to, from], [M, M]."""

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
        """Add the bytes of a phase."""
        self.loads[name] = load if name not in self.loads else self.loads[name].beside(load)

    # Forward.

    def fetch_rows(self) -> None:
        """Add the loads of rows that travel, and of the lookup."""
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
            # Read, and gathered.
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
        """Return the amounts that the relays of a node, the ranks at the owners' positions, get for
        its other ranks, [relay, rank]."""
        M = self.topology.ranks
        place = self.proxy.T * M + np.arange(M)[:, None]
        return asked.at(place).where(self.near)

    def by_relays(self, touched_in_node: "Amount") -> "Amount":
        """Return the amounts that relays request from owners in other nodes for all ranks of their
        node, [relay, owner]: the mean over these ranks of the rows that each expects the node to
        touch."""
        M = self.topology.ranks
        node_of = np.array(self.topology.node_of)
        share = 1 / np.bincount(node_of)[node_of][:, None]
        place = self.proxy.T * M + np.arange(M)
        return touched_in_node.where(self.far).times(share).at(place)

    def forward_bags(self, ratios: Floats) -> None:
        """Add the loads of sums of bags that travel, with each rank's reads for its own bags and
        its clients'."""
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
        """Add the loads from the gradients of the output to the update of every touched row, in
        training."""
        if not self.workload.training:
            return
        ratio, everywhere = self.bags.value_ratio, self.sets.everywhere
        single, unreplicated = self.sets.copies == 1, self.rows.of_rank.where(~everywhere)
        output_gradients = np.full(self.topology.ranks, self.bags.output_bytes)
        relays = "node sums" in self.latencies and self.joined is None
        if self.joined is None:
            mail = self.traffic(unreplicated)
            summed = self.accesses.bytes.sum(axis=1)
        else:
            # The gradients of a node's rows are summed by the proxies there.
            forwarded = self.rows.of_position.where(single)
            mail = self.traffic(forwarded.beside(unreplicated.where(~single))).where(~self.far)
            summed = self.joined.bytes.sum(axis=1)
            output_gradients = output_gradients + self.vectors.sum(axis=0)
        of_replicas = ratio * float(self.rows.of_rank.where(everywhere).bytes.sum())
        written = self.gradient_bytes(mail).sum(axis=1) + of_replicas
        self.add("sum", self.load().kernel(output_gradients + written, ratio * summed))
        sent = self.gradient_bytes(mail.where(self.far))
        if relays:
            peers = self.gradient_bytes(self.of_relays(mail.where(self.far)))
            of_node = self.traffic(self.rows.of_node.where(single))
            sent = self.gradient_bytes(self.by_relays(of_node))
            load = self.load().moved(peers, lands=False)
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
        """Add the AllReduce of the rows with a copy on each node, among their holders: each holder
        sends a part of its sums to each other holder, and gets it back as totals."""
        M, N, some = self.topology.ranks, self.topology.nodes, self.sets.on_some
        position = np.zeros((M, M), dtype=bool)
        position[np.arange(M)[:, None], self.proxy] = True
        position &= self.far

        def moved(rows: Amount) -> Floats:
            """Return the bytes of a holder's rows between it and each other holder, [to, from]."""
            held = self.sets.holds.T.astype(np.float64)
            held_rows = rows.where(some)
            bytes = self.gradient_bytes(
                Amount(dot(held, held_rows.rows), dot(held, held_rows.bytes))
            )
            return np.where(position, bytes / N, 0.0)

        sums = moved(self.rows.of_node)
        self.add("copy sums", self.load().moved(sums).kernel(sums.sum(axis=0)))
        updates = dot(self.sets.holds.T.astype(np.float64), np.where(some, self.rows.updates, 0.0))
        self.add("totals", self.load().moved(moved(self.rows.of_any)).kernel(updates))

    def gradient_bytes(self, rows: "Amount") -> Floats:
        """Return the bytes of rows' gradients, with their slots."""
        return self.bags.value_ratio * rows.bytes + SLOT_BYTES * rows.rows

    def traffic(self, rows: "Amount") -> "Amount":
        """Return the rows of holder sets, each of which every rank reads, by [reader, source]."""
        M = self.topology.ranks
        place = np.arange(M) * M + self.sets.source
        every = np.broadcast_to(rows.rows[:, None], place.shape)
        bytes = np.broadcast_to(rows.bytes[:, None], place.shape)
        return Amount(every, bytes).at(place)


def _sums_of_replicas(
    topology: Topology, sets: HolderSets, parts: Sequence[Part], method: Method
) -> list[PhaseTime]:
    """Return the phases of the AllReduce: links inside the node, then adapters, and the kernels'
    memory."""
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
    """Return the sums over holder sets of values [G] by their first holder, [M]."""
    sums = np.bincount(sets.holds.argmax(axis=1), values, minlength=sets.holds.shape[1])
    return sums.astype(np.float64, copy=False)
