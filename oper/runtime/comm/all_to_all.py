"""All-to-all: rows and gradients between ranks that do not share memory, over torch.distributed.

The portable transport (gloo, NCCL, MPI): two all_to_all, of sizes and of contents. Ranks that share
memory take part with nothing to send.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from oper.runtime.comm.group import Group
from oper.runtime.comm.node import Node


class AllToAll:
    """All-to-all of tensors among the ranks of a group; every call is collective.

    `action` completes "rank 0 waited for rank 2 to …".
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @classmethod
    def of(cls, node: Node) -> "AllToAll | None":
        """The transport to other nodes; None where all ranks share memory."""
        return cls(node.group) if node.group and len(node.peers) < node.ranks else None

    def send(self, parts: Sequence[torch.Tensor], action: str) -> list[torch.Tensor]:
        """Send parts[j] [n_j, *rest] to rank j; returns what each rank sent here [m_j, *rest]."""
        counts = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        received = torch.empty_like(counts)
        outgoing = torch.cat(list(parts))
        self._group.run(dist.all_to_all_single, received, counts, action=action)
        sizes = received.tolist()
        incoming = outgoing.new_empty((sum(sizes), *outgoing.shape[1:]))
        self._group.run(
            dist.all_to_all_single, incoming, outgoing, sizes, counts.tolist(), action=action
        )
        return list(incoming.split(sizes))
