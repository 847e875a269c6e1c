"""Ranks that exchange samples: separate collectives, which end in time and name the failed rank.

For each global batch: headers with each rank's state; a message for the scores; the samples, with a
digest of the assignment. They run over a separate gloo group, so that they may overlap the
collectives of a training step.
"""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm.group import Group, own_gloo_group
from oper.runtime.comm.lost_ranks import LostRankError, rank_names

_HEADER = struct.Struct("=Bqqqd16s600s")


class State(IntEnum):
    """State of a rank before the next global batch."""

    BATCH = 0
    ENDED = 1  # its loader has no more
    STOPPED = 2  # its training loop ended earlier
    FAILED = 3


@dataclass(frozen=True)
class Header:
    """Message of a rank before a global batch."""

    state: State
    batches: int  # yielded by its loader so far, including this one
    samples: int = 0
    message_bytes: int = 0  # size of the message for the scores
    effort: float = 1.0  # rank 0's effort for a later batch
    digest: bytes = b""  # of the batch's structure
    failure: str = ""

    def pack(self) -> bytes:
        """Return the header as bytes, of one length for all headers."""
        text = self.failure.encode()[:600]
        return _HEADER.pack(
            self.state, self.batches, self.samples, self.message_bytes, self.effort, self.digest,
            text,
        )  # fmt: skip

    @classmethod
    def unpack(cls, content: bytes) -> "Header":
        """Read the bytes of `pack`."""
        state, batches, samples, message, effort, digest, text = _HEADER.unpack(content)
        failure = text.rstrip(b"\0").decode(errors="replace")
        return cls(State(state), batches, samples, message, effort, digest, failure)


class _Interruptible(Group):
    """Group whose waits end when this process does."""

    def __init__(self, group: dist.ProcessGroup, deadline_seconds: float) -> None:
        super().__init__(group, deadline_seconds)
        self.abandoned = threading.Event()

    def heartbeat(self, action: str, left: float) -> None:
        if self.abandoned.is_set():
            raise LostRankError(f"rank {self.rank} left: its script ended, or gave its loader up")
        super().heartbeat(action, left)


class Peers:
    """All ranks of a process group, over a new separate group; a single rank without a group."""

    def __init__(self, group: "dist.ProcessGroup | None", deadline_seconds: float) -> None:
        """Make the new group; all ranks of `group` call this together."""
        self.rank, self.ranks = 0, 1
        self.deadline_seconds = deadline_seconds
        self.failure: BaseException | None = None  # after a failure the group is unusable
        self._group: _Interruptible | None = None
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise OperError("this process is no member of the process group that was given")
        if group is None or dist.get_world_size(group) == 1:
            return
        self._group = _Interruptible(
            own_gloo_group(
                dist.get_process_group_ranks(group), deadline_seconds, "DispatchingLoader"
            ),
            deadline_seconds,
        )
        self.rank, self.ranks = self._group.rank, self._group.ranks

    def gather(self, message: bytes, action: str) -> list[bytes]:
        """Return every rank's message; all have one length."""
        if self._group is None:
            return [message]
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        messages = self.gather_all(sent, [len(message)] * self.ranks, action)
        return [box.numpy().tobytes() for box in messages]

    def gather_all(
        self, message: torch.Tensor, lengths: Sequence[int], action: str
    ) -> list[torch.Tensor]:
        """Return the messages of all ranks, uint8, whose lengths all ranks know."""
        if self._group is None:
            return [message]
        # all_to_all, not all_gather: it reaches every other rank, so each notices a dead rank.
        return self._all_to_all(message.repeat(self.ranks), [len(message)] * self.ranks, lengths,
                                action)  # fmt: skip

    def exchange(
        self, parts: Sequence[torch.Tensor], digest: bytes, number: int
    ) -> list[torch.Tensor]:
        """Send `parts[j]`, uint8, to rank j, and return the parts that each rank sent here. Raise
        OperError on all ranks if their digests (8 bytes) of the assignment of batch `number`
        differ."""
        if self._group is None:
            return list(parts)
        own_digest = int.from_bytes(digest[:8], "big", signed=True)
        sizes = torch.tensor([[len(part), own_digest] for part in parts], dtype=torch.int64)
        received = torch.empty_like(sizes)
        self._run(dist.all_to_all_single, received, sizes, action=f"assign batch {number}")
        ranks_with: dict[int, list[int]] = {}
        for rank, digest_of_rank in enumerate(received[:, 1].tolist()):
            ranks_with.setdefault(digest_of_rank, []).append(rank)
        if len(ranks_with) > 1:
            groups = "; ".join(
                f"{rank_names(ranks)}: {digest_of_rank & (1 << 64) - 1:016x}"
                for digest_of_rank, ranks in ranks_with.items()
            )
            raise OperError(
                f"batch {number}: the ranks assigned its samples differently, and the digests of "
                f"their assignments are {groups}; give all ranks the same OPER, NumPy and machine "
                "type, and let nothing change a DispatchingLoader's settings"
            )
        return self._all_to_all(
            torch.cat(list(parts)),
            sizes[:, 0].tolist(),
            received[:, 0].tolist(),
            f"exchange the samples of batch {number}",
        )

    def fail(self, error: BaseException) -> None:
        """Make the other ranks raise an error that only this rank knows."""
        self.failure = self.failure or error
        if self._group is not None:
            self._group.fail(error)

    def abandon(self) -> None:
        """End the wait of another thread of this process."""
        if self._group is not None:
            self._group.abandoned.set()

    def _all_to_all(
        self, message: torch.Tensor, sent: Sequence[int], received: Sequence[int], action: str
    ) -> list[torch.Tensor]:
        incoming = torch.empty(sum(received), dtype=torch.uint8)
        self._run(
            dist.all_to_all_single, incoming, message, list(received), list(sent), action=action
        )
        return list(incoming.split(list(received)))

    def _run(self, *arguments: object, action: str) -> None:
        assert self._group is not None
        try:
            self._group.run(*arguments, action=action)  # type: ignore[arg-type]
        except BaseException as error:
            self.failure = self.failure or error
            raise
