"""Copies on nodes: rows that one rank of each node holds, at one position of all nodes.

The ranks of a node read such a row from its holder there, and leave their gradients in their
mailboxes for it, as for a row that it owns. The holders add them up among themselves, over the
network: of a row in slot s, which is the same at all holders, the holder of node s mod N is the one
that SUMS it.

    sums     each holder adds up what its node's mailboxes have for a row, in the order of its
             ranks, and sends that to the row's summing holder, which adds node by node, in the
             order of the nodes' first ranks, of its own node mailbox by mailbox
    totals   it sends the total to the other holders

So about 2(N - 1)/N of the gradients cross the network, as in a ring, in two exchanges, each of how
many rows there are and then of their slots and gradients. All holders update their copies by the
same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oper.base.errors import OperError
from oper.plan.layout import Layout
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.lost_ranks import rank_names
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.runtime_plan import copied_to_nodes, node_copy_slots
from oper.runtime.step.access_counters import Counters
from oper.runtime.step.row_exchange import Routes, gradients_of, summed
from oper.runtime.tables.row_gradients import RowGradients


@dataclass(frozen=True)
class Separated:
    """The gradients of rows of this rank: of each part, a group for each trained bucket, `own` are
    those of its other rows; and of copies, `totals` those of all nodes, of rows that are disjoint
    between these."""

    own: Sequence[RowGradients]
    totals: Sequence[RowGradients]


class NodeCopies:
    """The copies on nodes of an engine's trained buckets. All ranks make it together, and all its
    calls are collective."""

    def __init__(
        self, memory: TableMemory, layout: Layout, buckets: Sequence[int], counters: Counters
    ) -> None:
        """`buckets` are the numbers of the trained ones in the heap. OperError where the ranks are
        on other nodes than the plan's."""
        node, self._counters = memory.node, counters
        self._node, self.buckets = node, buckets
        self._dims = [memory.buckets[b].dim for b in buckets]
        proxies = Proxies(node)
        _check_nodes(layout, proxies.nodes)
        position = list(node.peers).index(node.rank)
        self._holders = [members[position] for members in proxies.nodes]  # in the nodes' order
        others = [rank for rank in self._holders if rank != node.rank]
        self._routes = Routes(proxies, others, others)
        self._summing = [
            _summing_nodes(layout, memory, b, node.rank, len(self._holders)) for b in buckets
        ]

    @classmethod
    def of(
        cls,
        memory: TableMemory,
        layout: Layout,
        buckets: Sequence[int],
        tables: Sequence[int],
        counters: Counters,
    ) -> "NodeCopies | None":
        """Those of an engine that trains these `tables` of the plan, by number; None where none of
        their rows has any."""
        copied = copied_to_nodes(layout)
        group, _ = layout.listed_places()
        first = layout.listed_offset
        some = any(copied[group[first[t] : first[t + 1]]].any() for t in tables)
        return cls(memory, layout, buckets, counters) if some else None

    def separate(
        self, parts: Sequence[RowGradients], groups: Sequence[int], action: str
    ) -> Separated:
        """Add up the gradients of copies over all nodes, and tell those of other rows apart; of the
        `parts`, the mailboxes of this rank's node, `groups` are those of this rank's rows of each
        trained bucket. `action` says in errors what other ranks were waited for."""
        sorted_parts = [self._by_node(part, groups) for part in parts]
        buckets, nodes = len(self.buckets), len(self._holders)
        here = self._holders.index(self._node.rank)
        # The groups of a part: of each summing node, and last of rows that are no copies.
        of_nodes = [range(n * buckets, (n + 1) * buckets) for n in range(nodes + 1)]
        sent = [g for n, groups in enumerate(of_nodes[:nodes]) if n != here for g in groups]
        counts, received = self._routes.send_gradients(sorted_parts, sent, self._dims, action)
        mine = [_of_groups(part, of_nodes[here]) for part in sorted_parts]
        by_node = [mine if rank == self._node.rank else [received[rank]] for rank in self._holders]
        in_order = [part for of_node in by_node for part in of_node]
        rows, message = summed(in_order, range(buckets), self._dims)
        total = gradients_of(message, rows, self._dims)
        others = len(self._routes.owners)
        totals = np.tile(rows, (others, 1))
        came = self._routes.exchange_gradients(totals, message.repeat(others), self._dims, action)
        self._count(counts, totals)
        own = [_of_groups(part, of_nodes[nodes]) for part in sorted_parts]
        return Separated(own, [total, *came.values()])

    def _by_node(self, part: RowGradients, groups: Sequence[int]) -> RowGradients:
        """A part's rows for this rank, by the node that sums them, those that are no copies last,
        and by bucket."""
        found: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for b, group in enumerate(groups):
            (begin, end), values = part.groups[:, group : group + 2].tolist()
            slots, dim = part.slots[begin:end], self._dims[b]
            gradients = part.values[values[0] : values[0] + len(slots) * dim].view(-1, dim)
            node = self._summing[b][slots]
            nodes = range(len(self._holders) + 1)
            if not len(slots) or int(node.min()) == nodes[-1]:  # there are no copies among them
                none = slots[:0], gradients[:0]
                found.append([*(none for _ in nodes[1:]), (slots, gradients)])
                continue
            chosen = [(node == n).nonzero().view(-1) for n in nodes]
            found.append([(slots[which], gradients[which]) for which in chosen])
        pieces = [of_bucket[n] for n in range(len(self._holders) + 1) for of_bucket in found]
        sizes = [[0, *(piece[k].numel() for piece in pieces)] for k in (0, 1)]
        return RowGradients(
            torch.cat([slots for slots, _ in pieces]),
            torch.tensor(sizes).cumsum(dim=1),
            torch.cat([gradients.reshape(-1) for _, gradients in pieces]),
        )

    def _count(self, *sent: np.ndarray) -> None:
        """Count rows that were sent to each other holder, [others, buckets] each."""
        counted = np.zeros((2, self._node.ranks), dtype=np.int64)
        for counts in sent:
            bytes = counts @ (4 * np.array(self._dims))
            counted[:, list(self._routes.owners)] += [counts.sum(axis=1), bytes]
        self._counters.add(node_copy_rows=counted[0], node_copy_bytes=counted[1])


def _summing_nodes(
    layout: Layout, memory: TableMemory, bucket: int, rank: int, nodes: int
) -> torch.Tensor:
    """The node that sums the row in each slot of a bucket's arena, int64 [slots]; `nodes` of rows
    that are no copies."""
    width = memory.buckets[bucket].width
    slots = node_copy_slots(layout, np.flatnonzero(layout.width_of_table == width), rank)
    found = np.full(int(layout.slots[width, rank]), nodes)
    found[slots] = slots % nodes
    return torch.from_numpy(found)


def _of_groups(part: RowGradients, groups: range) -> RowGradients:
    """A part with some of its groups alone."""
    chosen = part.groups[:, groups.start : groups.stop + 1].contiguous()
    return RowGradients(part.slots, chosen, part.values)


def _check_nodes(layout: Layout, nodes: Sequence[Sequence[int]]) -> None:
    """OperError unless each group of copies has one holder in each of the nodes, at one position,
    which all ranks there read."""
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
            "topology has them, or plan for the nodes that there are"
        )
