"""Exchange: rows and gradients between ranks that do not share memory, over torch.distributed.

The portable transport (gloo, NCCL, MPI): two all_to_all, of sizes and of contents. Ranks that share
memory take part with nothing to send.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from oper.errors import OperError


class Exchange:
    """All-to-all of tensors among the ranks of a group; every call is collective."""

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: int, deadline_seconds: float
    ) -> None:
        self._group, self._ranks = group, ranks
        self._deadline = timedelta(seconds=deadline_seconds)

    def send(self, parts: Sequence[torch.Tensor], doing: str) -> list[torch.Tensor]:
        """Send parts[j] [n_j, *rest] to rank j; returns what each rank sent here [m_j, *rest]."""
        counts = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        received = torch.empty_like(counts)
        outgoing = torch.cat(list(parts))
        self._finish(dist.all_to_all_single, received, counts, doing=doing)
        sizes = received.tolist()
        incoming = outgoing.new_empty((sum(sizes), *outgoing.shape[1:]))
        self._finish(
            dist.all_to_all_single, incoming, outgoing, sizes, counts.tolist(), doing=doing
        )
        return list(incoming.split(sizes))

    def any(self, flag: bool, doing: str) -> bool:
        """Whether the flag is set on any rank."""
        value = torch.tensor([int(flag)])
        self._finish(dist.all_reduce, value, dist.ReduceOp.MAX, doing=doing)
        return bool(value)

    def meet(self, doing: str) -> None:
        """Wait for all ranks."""
        self.any(False, doing)

    def _finish(self, collective: Callable[..., Any], *arguments: Any, doing: str) -> None:
        """A collective, within the deadline."""
        try:
            collective(*arguments, group=self._group, async_op=True).wait(self._deadline)
        except RuntimeError as error:
            raise OperError(
                f"the ranks lost each other {doing}: {str(error).splitlines()[0]}; a rank died, "
                f"did not come within {self._deadline.total_seconds():g} s, or failed: see the "
                "errors of the others"
            ) from error
