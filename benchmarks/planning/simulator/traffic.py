"""What one batch moves: bytes between ranks and through memories, counted row by row.

Each rank reads its samples of the log. Nothing is expected of a distribution: rows that a rank
reads twice, bags with rows of a node, and rows that any rank touched are found in the batch itself.
A kernel takes each distinct row from memory once, and repeats from the rank's cache; a row that is
read by pointer from another rank comes once for each access.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from benchmarks.planning.simulator.log import Ints, Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.placement import Fetch, Kind, Part, Placement

ID_BYTES, CODE_BYTES, LENGTH_BYTES, SLOT_BYTES = 8, 4, 4, 8  # codes are those of forwarded bags
Bytes = NDArray[np.float64]


@dataclass
class Replicas:
    """The replicas' gradients of one kind of table in a batch: `rows` there are, of `row_bytes` and
    gradients of `vector_bytes`; `touched` of them by each rank, [M], `union` by any."""

    rows: int
    row_bytes: int
    state_bytes: int
    vector_bytes: int
    touched: Bytes
    union: int


@dataclass
class Traffic:
    """Bytes of a batch on M ranks: [M, M] from rank i to rank j, or [M] of a rank's memory or
    cache. The phases that they belong to are in iteration.py."""

    ranks: int
    wanted: Bytes = field(init=False)
    ids: Bytes = field(init=False)
    serve_moved: Bytes = field(init=False)
    serve_memory: Bytes = field(init=False)
    serve_cache: Bytes = field(init=False)
    add_moved: Bytes = field(init=False)
    answers: Bytes = field(init=False)
    copies: Bytes = field(init=False)
    pool_moved: Bytes = field(init=False)
    pool_memory: Bytes = field(init=False)
    pool_cache: Bytes = field(init=False)
    vectors: Bytes = field(init=False)
    spread: Bytes = field(init=False)
    sum_memory: Bytes = field(init=False)
    sum_cache: Bytes = field(init=False)
    node_sums_moved: Bytes = field(init=False)
    node_sums_memory: Bytes = field(init=False)
    gradients: Bytes = field(init=False)
    merge_moved: Bytes = field(init=False)
    merge_memory: Bytes = field(init=False)
    copy_sums: Bytes = field(init=False)
    copy_sums_memory: Bytes = field(init=False)
    copy_totals: Bytes = field(init=False)
    copy_totals_memory: Bytes = field(init=False)
    replicas: list[Replicas] = field(default_factory=list)

    def __post_init__(self) -> None:
        for each in fields(self):
            if not each.init:
                per_rank = each.name.endswith(("_memory", "_cache"))
                shape = (self.ranks,) if per_rank else (self.ranks, self.ranks)
                setattr(self, each.name, np.zeros(shape))


def count(
    placement: Placement, log: Log, samples: Ints, machine: Machine, training: bool
) -> Traffic:
    """The traffic of a batch: rank i has the log's samples `samples[i]`, [M, b]."""
    traffic = Traffic(machine.ranks)
    for kind, parts in placement.kinds():
        counter = _Counter(traffic, kind, parts, placement, machine, training)
        ranks = np.arange(machine.ranks).reshape(machine.nodes, machine.ranks_per_node)
        if counter.relayed:
            for node, of_node in enumerate(ranks):
                for rank in of_node:
                    counter.add(rank, log, samples[rank])
                counter.end_node(node)
        else:
            # Ranks at one position of their nodes are each other's proxies.
            for position, at_position in enumerate(ranks.T):
                for rank in at_position:
                    counter.add(rank, log, samples[rank])
                counter.end_position(position)
        counter.end()
    return traffic


class _Counter:
    """Adds what the tables of one kind move to a batch's traffic, a rank after the other."""

    def __init__(
        self,
        traffic: Traffic,
        kind: Kind,
        parts: Sequence[Part],
        placement: Placement,
        machine: Machine,
        training: bool,
    ) -> None:
        self.traffic, self.kind, self.parts = traffic, kind, parts
        self.machine, self.training = machine, training
        self.source, self.owner = placement.source, placement.owner
        self.replicated, self.copied = placement.replicated, placement.copied
        self.M = machine.ranks
        self.holder_set = np.concatenate([part.holder_set for part in parts])
        self.first = np.cumsum([0, *(len(part.holder_set) for part in parts)])
        self.node_of = machine.node_of
        # Rows that this rank, a rank of this position, and any rank have touched.
        self.mine, self.of_position, self.of_any = np.zeros((3, len(self.holder_set)), dtype=bool)
        self.owners = [np.unique(self.owner[part.holder_set]) for part in parts]
        self.touched = np.zeros(self.M)
        # Rows with a copy on each node that any rank of a node has touched.
        some = training and bool(self.copied[self.holder_set].any())
        self.of_nodes = np.zeros((machine.nodes if some else 0, len(self.holder_set)), dtype=bool)
        several = 1 < machine.nodes < machine.ranks
        self.relayed = placement.relays and several and kind.fetch is Fetch.DISTINCT
        self.asked: list[Ints] = []  # by the ranks of a node of others: row · M + source

    def add(self, rank: int, log: Log, samples: Ints) -> None:
        """Count the part of a rank."""
        kind, traffic, batch = self.kind, self.traffic, len(samples)
        rows, bags = [], []
        for n, part in enumerate(self.parts):
            ids, bag = log.bags(part.table, samples)
            rows.append(ids + self.first[n])
            bags.append(bag + n * batch)
        row = np.concatenate(rows)
        source = self.source[:, rank].astype(np.int64)
        accesses = self._by_rank(source[self.holder_set[row]])
        self.mine[row] = True
        distinct = np.flatnonzero(self.mine)
        self.mine[distinct] = False
        read = self._by_rank(source[self.holder_set[distinct]])
        output = len(self.parts) * batch * kind.vector_bytes
        if kind.fetch in (Fetch.RAW, Fetch.DISTINCT):
            if self.relayed:
                self._ask_relays(rank, distinct, source[self.holder_set[distinct]])
            self._read_rows(rank, accesses, read)
            traffic.pool_memory[rank] += output
        elif kind.fetch is Fetch.POOLED_BY_NODE:
            self._forward(rank, row, np.concatenate(bags), source, accesses, distinct)
            traffic.serve_memory[rank] += output
        else:
            self._pool_by_rank(rank, accesses, read, batch)
        if self.training:
            self._touch(rank, distinct, accesses, output)

    def _by_rank(self, ranks: Ints) -> Bytes:
        return np.bincount(ranks, minlength=self.M).astype(np.float64)

    def _read_rows(self, rank: int, accesses: Bytes, distinct: Bytes) -> None:
        """Rows that travel themselves, `accesses` and `distinct` by the rank they come from."""
        traffic, size = self.traffic, self.kind.row_bytes
        near, far = self._near_and_far(rank)
        once = self.kind.fetch is Fetch.DISTINCT
        moved = distinct if once else accesses
        if once:
            traffic.copies[:, rank] += size * np.where(near, distinct, 0)
        else:
            traffic.pool_moved[:, rank] += size * np.where(near, accesses, 0)
        if not self.relayed:
            self._ask(rank, np.where(far, moved, 0))
        held = np.where(near & (not once), 0, distinct)
        traffic.pool_memory[rank] += size * held.sum()
        traffic.pool_cache[rank] += size * np.where(near & (not once), 0, accesses).sum()

    def _ask(self, rank: int, rows: Bytes) -> None:
        """A rank asks owners in other nodes for so many rows each, [M]."""
        traffic, size = self.traffic, self.kind.row_bytes
        traffic.ids[rank] += ID_BYTES * rows
        traffic.serve_memory += 2 * size * rows  # read, and put in a row
        traffic.answers[:, rank] += size * rows

    def _ask_relays(self, rank: int, rows: Ints, source: Ints) -> None:
        """A rank tells the relays of its node which distinct rows it wants of others, and gets
        them of these."""
        traffic, node = self.traffic, self.node_of[rank]
        far = self.node_of[source] != node
        self.asked.append(rows[far] * self.M + source[far])
        of_relay = self._by_rank(self.machine.proxies(source[far], node))
        of_relay[rank] = 0  # what it gets itself
        traffic.wanted[rank] += ID_BYTES * of_relay
        traffic.copies[:, rank] += self.kind.row_bytes * of_relay
        if self.training:
            size = self.kind.vector_bytes + SLOT_BYTES
            traffic.node_sums_moved[rank] += size * of_relay

    def end_node(self, node: int) -> None:
        """What relays ask of other nodes, once all ranks of theirs have told what they want: each
        row once."""
        source = np.unique(np.concatenate(self.asked)) % self.M
        self.asked = []
        by_owner = self._by_rank(source)
        for owner in np.flatnonzero(by_owner):
            relay = self.machine.proxy(int(owner), node)
            rows = np.where(np.arange(self.M) == owner, by_owner, 0)
            self._ask(relay, rows)
            if self.training:
                self._send(relay, rows)
                size = self.kind.vector_bytes
                self.traffic.node_sums_memory[relay] += size * by_owner[owner]

    def _forward(
        self,
        rank: int,
        row: Ints,
        bag: Ints,
        source: Ints,
        accesses: Bytes,
        distinct: Ints,
    ) -> None:
        """Bags of which other nodes add up what they have; this node's part is read as raw."""
        traffic, machine, size = self.traffic, self.machine, self.kind.row_bytes
        vector = self.kind.vector_bytes
        near, _ = self._near_and_far(rank)
        read = self._by_rank(source[self.holder_set[distinct]])
        traffic.serve_moved[:, rank] += size * np.where(near, accesses, 0)
        traffic.serve_memory[rank] += size * read[rank]
        traffic.serve_cache[rank] += size * accesses[rank]
        read_node = self.node_of[source[self.holder_set[row]]]
        away = read_node != self.node_of[rank]
        # Bags by node, each once.
        pairs = np.zeros((machine.nodes, int(bag.max(initial=-1)) + 1), dtype=bool)
        pairs[read_node[away], bag[away]] = True
        forwarded = pairs.sum(axis=1)
        for node in np.flatnonzero(forwarded):
            proxy, count = machine.proxy(rank, int(node)), float(forwarded[node])
            there = np.where(self.node_of == node, accesses, 0.0)
            traffic.ids[rank, proxy] += CODE_BYTES * there.sum() + LENGTH_BYTES * count
            traffic.serve_memory[proxy] += size * read[proxy] + vector * count
            traffic.serve_cache[proxy] += size * there[proxy]
            there[proxy] = 0.0
            traffic.serve_moved[:, proxy] += size * there
            traffic.answers[proxy, rank] += vector * count
            if self.training:
                traffic.vectors[rank, proxy] += vector * count
                traffic.sum_memory[proxy] += vector * count
                traffic.sum_cache[proxy] += vector * float(accesses[self.node_of == node].sum())
        # They are added to the bags that have any.
        traffic.pool_memory[rank] += vector * (forwarded.sum() + 2 * pairs.any(axis=0).sum())

    def _pool_by_rank(self, rank: int, accesses: Bytes, read: Bytes, batch: int) -> None:
        """Bags of which every owner of a part adds up what it has, and sends all."""
        traffic, machine, size = self.traffic, self.machine, self.kind.row_bytes
        output = batch * self.kind.vector_bytes
        traffic.ids[rank] += ID_BYTES * accesses
        traffic.serve_memory += size * read
        traffic.serve_cache += size * accesses
        for owners in self.owners:
            traffic.ids[rank, owners] += LENGTH_BYTES * batch
            traffic.serve_memory[owners] += output
            sent_by = owners
            if self.kind.fetch is Fetch.POOLED_BY_RANK_AND_NODE:
                nodes = np.unique(self.node_of[owners])
                sent_by = np.array([machine.proxy(rank, int(node)) for node in nodes])
                into = np.array([machine.proxy(rank, int(n)) for n in self.node_of[owners]])
                traffic.add_moved[owners, into] += output
                traffic.spread[into, owners] += output if self.training else 0.0
            traffic.answers[sent_by, rank] += output
            traffic.pool_memory[rank] += output * (len(sent_by) + 1)
            if self.training:
                traffic.vectors[rank, sent_by] += output
                traffic.sum_memory[owners] += output
        if self.training:
            traffic.sum_cache += self.kind.vector_bytes * accesses

    def _touch(self, rank: int, distinct: Ints, accesses: Bytes, output: float) -> None:
        """Gradients of a rank: those of rows with one owner and of replicas."""
        traffic, vector = self.traffic, self.kind.vector_bytes
        sets = self.holder_set[distinct]
        self.of_any[distinct] = True
        replicas = float(self.replicated[sets].sum())
        self.touched[rank] += replicas
        if self.kind.fetch in (Fetch.RAW, Fetch.DISTINCT):
            alone = sets[~self.replicated[sets]]
            self._mail(rank, self._by_rank(self.owner[alone]))
            traffic.sum_memory[rank] += output + vector * len(distinct)
            traffic.sum_cache[rank] += vector * accesses.sum()
        elif self.kind.fetch is Fetch.POOLED_BY_NODE:
            own = self.node_of == self.node_of[rank]
            traffic.sum_memory[rank] += output + vector * replicas
            copied = self.copied[sets]
            self.of_position[distinct[~copied]] = True
            if copied.any():
                self.of_nodes[self.node_of[rank], distinct[copied]] = True
                self._mail(rank, self._by_rank(self.source[sets[copied], rank]))
                traffic.sum_memory[rank] += vector * float(copied.sum())
            traffic.sum_cache[rank] += vector * accesses[own].sum()

    def _mail(self, rank: int, rows: Bytes) -> None:
        """Gradients that a rank has for the owners of rows, [M]."""
        traffic, size = self.traffic, self.kind.vector_bytes + SLOT_BYTES
        near, far = self._near_and_far(rank)
        traffic.merge_moved[rank] += size * np.where(near, rows, 0)
        traffic.merge_memory[rank] += size * rows[rank]
        if not self.relayed:
            self._send(rank, np.where(far, rows, 0))

    def _send(self, rank: int, rows: Bytes) -> None:
        """A rank sends owners in other nodes the gradients of so many rows each, [M]."""
        size = self.kind.vector_bytes + SLOT_BYTES
        self.traffic.gradients[rank] += size * rows
        self.traffic.merge_memory += size * rows

    def end_position(self, position: int) -> None:
        """Gradients of pooled tables, once all ranks at a position have forwarded their bags: each
        proxy has those of its node's rows."""
        if not (self.training and self.kind.fetch is Fetch.POOLED_BY_NODE):
            return
        rows = np.flatnonzero(self.of_position)
        self.of_position[rows] = False
        sets = self.holder_set[rows]
        by_owner = self._by_rank(self.owner[sets[~self.replicated[sets]]])
        for node in range(self.machine.nodes):
            proxy = self.machine.proxy(position, node)
            held = np.where(self.node_of == node, by_owner, 0.0)
            self._mail(proxy, held)
            self.traffic.sum_memory[proxy] += self.kind.vector_bytes * held.sum()

    def end(self) -> None:
        """Updates: every touched row is read and written once, by its owner."""
        if not self.training:
            return
        kind = self.kind
        sets = self.holder_set[self.of_any]
        replicas = self.replicated[sets]
        rows = self._by_rank(self.owner[sets[~replicas & ~self.copied[sets]]])
        self.traffic.merge_memory += 2 * (kind.row_bytes + kind.state_bytes) * rows
        there = int(self.replicated[self.holder_set].sum())
        if there:
            sizes = (kind.row_bytes, kind.state_bytes, kind.vector_bytes)
            found = Replicas(there, *sizes, self.touched, int(replicas.sum()))
            self.traffic.replicas.append(found)

        if len(self.of_nodes):
            self._sum_copies()

    def _sum_copies(self) -> None:
        """The gradients of rows with a copy on each node: of each holder's a part goes to each
        other one, which sums it, and comes back to all."""
        machine, traffic, kind = self.machine, self.traffic, self.kind
        nodes, size = machine.nodes, kind.vector_bytes + SLOT_BYTES
        position = self.owner[self.holder_set] % machine.ranks_per_node
        for place in range(machine.ranks_per_node):
            holders = [machine.proxy(place, node) for node in range(nodes)]
            of_nodes = self.of_nodes[:, position == place]
            union = float(of_nodes.any(axis=0).sum())
            for holder, rows in zip(holders, of_nodes.sum(axis=1).tolist(), strict=True):
                others = [other for other in holders if other != holder]
                traffic.copy_sums[holder, others] += size * rows / nodes
                traffic.copy_sums_memory[holders] += size * rows / nodes
                traffic.copy_totals[holder, others] += size * union / nodes
            traffic.copy_totals_memory[holders] += 2 * (kind.row_bytes + kind.state_bytes) * union

    def _near_and_far(self, rank: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Other ranks of a rank's node, and ranks of other nodes, [M] each."""
        same = self.node_of == self.node_of[rank]
        far = ~same
        same[rank] = False
        return same, far
