"""Exchange: rows and gradients between ranks that do not share memory, over torch.distributed.

The portable transport (gloo, NCCL, MPI): two all_to_all, of sizes and of contents. Ranks that share
memory take part with nothing to send.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from oper.errors import OperError


class Exchange:
    """All-to-all of tensors among the ranks of a group; every call is collective."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: int) -> None:
        self._group, self._ranks = group, ranks

    def send(self, parts: Sequence[torch.Tensor], doing: str) -> list[torch.Tensor]:
        """Send parts[j] [n_j, *rest] to rank j; returns what each rank sent here [m_j, *rest]."""
        counts = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        received = torch.empty_like(counts)
        outgoing = torch.cat(list(parts))
        with named_failure(doing):
            dist.all_to_all_single(received, counts, group=self._group)
            sizes = received.tolist()
            incoming = outgoing.new_empty((sum(sizes), *outgoing.shape[1:]))
            dist.all_to_all_single(
                incoming, outgoing, sizes, [len(part) for part in parts], group=self._group
            )
        return list(incoming.split(sizes))

    def any(self, flag: bool, doing: str) -> bool:
        """Whether the flag is set on any rank."""
        value = torch.tensor([int(flag)])
        with named_failure(doing):
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value)

    def meet(self, doing: str) -> None:
        """Wait for all ranks."""
        self.any(False, doing)


@contextmanager
def named_failure(doing: str) -> Any:
    """Turn a failed collective into an error that says what was being done."""
    try:
        yield
    except RuntimeError as error:
        raise OperError(
            f"the ranks lost each other {doing}: {str(error).splitlines()[0]}; a rank died, "
            "stopped beyond the process group's timeout, or went another way"
        ) from error
