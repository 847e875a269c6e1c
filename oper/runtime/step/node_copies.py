"""Copies on nodes: rows that one rank of each node holds, at one position of all nodes.

The ranks of a node read such a row from its holder there, and leave their gradients in their
mailboxes for it, as for a row that it owns. The holders add them up among themselves, over the
network. A row has the same slot s at all holders, and the holder of node s mod N SUMS it.

    sums     each holder adds up the gradients that its node's mailboxes have for a row, in the
             order of its ranks, and sends the sum to the row's summing holder, which adds node by
             node, in the order of the nodes' first ranks, and its own node mailbox by mailbox
    totals   it sends the total to the other holders

So about 2(N - 1)/N of the gradients cross the network, as in a ring, in two exchanges. Each
exchange sends the numbers of rows and then their slots and gradients. All holders update their
copies by the same bits. If all ranks run on one node, against the plan, each holder reads all
gradients of a row in the mailboxes, and adds them up itself: holder by holder, and mailbox by
mailbox for each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.plan.layout import Layout
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.lost_ranks import rank_names
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.row_messages import Routes
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.runtime_plan import copied_to_nodes, node_copy_slots
from oper.runtime.tables.row_gradients import Piece, RowGradients, groups_on_host


class Separated(NamedTuple):
    """The gradients of rows of this rank, which are `groups` of each, one for a trained bucket:
    those of each part for rows without copies, and those for its copies, in the order of additions.
    """

    own: Sequence[RowGradients]
    groups: Sequence[int]
    copies: Sequence[RowGradients]


class NoCopies:
    """Copies on nodes of an engine whose rows have none."""

    def separate(
        self, parts: Sequence[RowGradients], groups: Sequence[int], action: str
    ) -> Separated:
        """Return all gradients as those of rows without copies."""
        return Separated(parts, groups, ())


class NodeCopies:
    """The copies on nodes of an engine's trained buckets. All ranks make it together, and all its
    calls are collective."""

    def __init__(
        self, memory: TableMemory, layout: Layout, buckets: Sequence[int], counters: Counters
    ) -> None:
        """`buckets` are the numbers of the trained buckets in the heap. Raise OperError if the
        ranks are on several nodes that differ from the plan's."""
        self._node, self._counters = memory.node, counters
        self._dims, self._rank = [memory.buckets[b].dim for b in buckets], memory.node.rank
        self._device = memory.heap.device
        proxies = Proxies(self._node, self._device)
        self._nodes = len(proxies.nodes)
        if self._nodes > 1:
            _check_nodes(layout, proxies.nodes)
        held = layout.holds[copied_to_nodes(layout) & layout.holds[:, self._rank]]
        # The holders of this rank's copies, in the order of the nodes.
        self._holders = np.flatnonzero(held.any(axis=0)).tolist() if len(held) else [self._rank]
        if self._nodes > 1:
            position = list(self._node.peers).index(self._rank)
            self._holders = [members[position] for members in proxies.nodes]
        others = sorted(rank for rank in self._holders if rank != self._rank)
        self._routes = Routes(proxies, others, others, self._device)
        on = self._device.torch_device
        self._slots = [_slots_of_copies(layout, memory, b).to(on) for b in buckets]

    @classmethod
    def of(
        cls,
        memory: TableMemory,
        layout: Layout,
        buckets: Sequence[int],
        tables: Sequence[int],
        counters: Counters,
    ) -> "NodeCopies | NoCopies":
        """Return the copies of an engine that trains these `tables` of the plan, by number."""
        copied = copied_to_nodes(layout)
        group, _ = layout.listed_places()
        first = layout.listed_offset
        some = any(copied[group[first[t] : first[t + 1]]].any() for t in tables)
        return cls(memory, layout, buckets, counters) if some else NoCopies()

    def separate(
        self, parts: Sequence[RowGradients], groups: Sequence[int], action: str
    ) -> Separated:
        """Add up the gradients of copies over all nodes, and separate them from other gradients.
        `parts` are the mailboxes of this rank's node, with `groups` for this rank's rows of each
        trained bucket. Errors name the `action` for which ranks waited."""
        at = groups_on_host(parts)
        by_node = [self._by_node(*of, groups) for of in zip(parts, at, strict=True)]
        own = [self._of_node(part, self._nodes) for part in by_node]
        of_buckets = range(len(groups))
        if self._nodes > 1:
            return Separated(own, of_buckets, self._over_nodes(by_node, action))
        copies = []
        for holder in self._holders:
            of_holder = [group + holder - self._rank for group in groups]
            by_node = [self._by_node(*of, of_holder) for of in zip(parts, at, strict=True)]
            copies += [self._of_node(part, 0) for part in by_node]
        return Separated(own, of_buckets, copies)

    def _over_nodes(self, parts: Sequence[RowGradients], action: str) -> Sequence[RowGradients]:
        """Return the totals of copies over all nodes, by the holder that sums them; `parts` are of
        this node, by the node that sums them."""
        buckets, others = len(self._dims), self._routes.owners
        groups = [self._holders.index(r) * buckets + b for r in others for b in range(buckets)]
        counts, received = self._routes.send_gradients(parts, groups, self._dims, action)
        mine = [self._of_node(part, self._holders.index(self._rank)) for part in parts]
        of_holders = [mine if r == self._rank else [received[r]] for r in self._holders]
        in_order = [part for of_holder in of_holders for part in of_holder]
        messages = self._routes.messages
        rows, message = messages.summed(in_order, range(buckets), self._dims)
        totals, sent = np.tile(rows, (len(others), 1)), message.repeat(len(others))
        came = self._routes.exchange_gradients(totals, sent, self._dims, action)
        self._count(counts, totals)
        return [messages.read(message, rows, self._dims), *came.values()]

    def _of_node(self, part: RowGradients, node: int) -> RowGradients:
        """Return the groups of one node from a part by node; rows that are no copies come last."""
        buckets = len(self._dims)
        groups = part.groups[:, node * buckets : (node + 1) * buckets + 1].contiguous()
        return RowGradients(part.slots, groups, part.values)

    def _by_node(self, part: RowGradients, at: Ints, groups: Sequence[int]) -> RowGradients:
        """Return a part's rows for this rank, by the node that sums them, rows that are no copies
        last, and by bucket; `at` are the part's groups on the host."""
        of_buckets: list[list[Piece]] = []
        for b, group in enumerate(groups):
            slots, gradients = part.piece(group, self._dims[b], at)
            if not len(self._slots[b]):
                none = slots[:0], gradients[:0]
                of_buckets.append([*(none for _ in range(self._nodes)), (slots, gradients)])
                continue
            copied = torch.isin(slots, self._slots[b], assume_unique=True)
            node = torch.where(copied, slots % self._nodes, self._nodes)
            chosen = [(node == n).nonzero().view(-1) for n in range(self._nodes + 1)]
            of_buckets.append([(slots[rows], gradients[rows]) for rows in chosen])
        pieces = [of_bucket[n] for n in range(self._nodes + 1) for of_bucket in of_buckets]
        on = self._device.torch_device
        return RowGradients.of_pieces(pieces, self._dims * (self._nodes + 1), on)

    def _count(self, *sent: np.ndarray) -> None:
        """Count rows that were sent to each other holder, [others, buckets] each."""
        counted = np.zeros((2, self._node.ranks), dtype=np.int64)
        for counts in sent:
            bytes = counts @ (4 * np.array(self._dims))
            counted[:, list(self._routes.owners)] += [counts.sum(axis=1), bytes]
        self._counters.add(node_copy_rows=counted[0], node_copy_bytes=counted[1])


def _slots_of_copies(layout: Layout, memory: TableMemory, bucket: int) -> torch.Tensor:
    """Return the slots of this rank's copies in a bucket's arenas, the same at all holders."""
    width = memory.buckets[bucket].width
    tables = np.flatnonzero(layout.width_of_table == width)
    return torch.from_numpy(node_copy_slots(layout, tables, memory.node.rank))


def _check_nodes(layout: Layout, nodes: Sequence[Sequence[int]]) -> None:
    """Raise OperError unless each group of copies has one holder in each of the nodes, at one
    position, which all ranks there read."""
    node_of = {rank: n for n, members in enumerate(nodes) for rank in members}
    of_rank = np.array([node_of[rank] for rank in range(layout.ranks)])
    places = {rank: n for members in nodes for n, rank in enumerate(members)}
    for group in np.flatnonzero(copied_to_nodes(layout)).tolist():
        holders = np.flatnonzero(layout.holds[group]).tolist()
        one_each = sorted(node_of[rank] for rank in holders) == list(range(len(nodes)))
        alike = len({places[rank] for rank in holders}) == 1
        if one_each and alike and (of_rank[layout.source[group]] == of_rank).all():
            continue
        running = "; ".join(rank_names(list(members)) for members in nodes)
        raise OperError(
            f"the plan keeps a copy of rows on one rank of each node ({rank_names(holders)}), and "
            f"the ranks that run are on nodes so: {running}. Start them on nodes as the plan's "
            "topology has them, all on one, or plan for the nodes that there are"
        )
