"""Groups: collectives of all ranks, which end in time and say which rank failed, died or is late.

Over torch.distributed a rank that failed and lives on is not noticed, one that died is noticed
without its name, and one that stopped after the group's timeout. Here waits are taken in slices,
between which ranks read each other's notices (failure_store.py). Who is left out of a collective
that does not end, and why it failed, is found out when that happens; a collective that ends costs
what it costs without.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm.deadline import Deadline
from oper.runtime.comm.failure_store import FailureStore
from oper.runtime.comm.lost_ranks import (
    LostRankError,
    did_not_come,
    died,
    pronoun,
    rank_names,
    told,
)

SLICE_SECONDS = 0.1  # between looks at the others, and at signals
_NOTICE_SECONDS = 0.5  # between looks at notices
_NO_STORE = (
    "the process group's store, which rank 0 serves where no launcher does, does not answer either"
)
_TAG = 0x6F706572  # of our messages, apart from the user's: "oper"


class Group:
    """All ranks of a process group, for collectives that each must end within the deadline.

    `processes` are the ids of those ranks' processes that can be seen from here.
    """

    def __init__(self, group: dist.ProcessGroup, deadline_seconds: float) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.deadline_seconds = deadline_seconds
        self._group = group
        self.processes: dict[int, int] = {}
        self._notices = FailureStore(group)
        self._looked = 0.0

    def run(
        self, collective: Callable[..., Any], *arguments: Any, doing: str, **options: Any
    ) -> None:
        """A collective of torch.distributed's. `doing` completes "rank 0 waited for rank 2 to …".

        LostRankError names ranks that failed, died, or did not come. The process group cannot be
        used after that, or after a KeyboardInterrupt.
        """
        began, patience = time.monotonic(), Deadline(self.deadline_seconds)
        try:
            work = collective(*arguments, group=self._group, async_op=True, **options)
            while not _ends(work, SLICE_SECONDS):
                if patience.ended():
                    self._give_up(work, doing)
                    return
                if time.monotonic() - began >= _NOTICE_SECONDS:
                    self.look(doing)
        except RuntimeError as error:  # of the transport
            lost = self._lost(doing, error)
            self.fail(lost)
            raise lost from error
        except BaseException as error:
            self.fail(error)  # before the others see this rank disconnect
            self._abandon()
            raise

    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """The message, of one length, of every rank."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        boxes = torch.empty(self.ranks * len(message), dtype=torch.uint8)
        # Not an all_gather: where all ranks have to do with all, each sees of each that it died.
        self.run(dist.all_to_all_single, boxes, mine.repeat(self.ranks), doing=doing)
        return [box.numpy().tobytes() for box in boxes.split(len(message))]

    def fail(self, error: BaseException) -> None:
        """Let all ranks that wait, now or later, raise for this error of this rank's."""
        self._notices.fail(told(self.rank, error))

    def look(self, doing: str) -> None:
        """Tell the others that this rank waits, and raise LostRankError if one has failed; both
        at most twice a second."""
        if time.monotonic() - self._looked >= _NOTICE_SECONDS:
            self._looked = time.monotonic()
            _raise(self._notices.beat(doing))

    def check(self) -> None:
        """LostRankError if a rank has failed."""
        _raise(self._notices.failure())

    def _give_up(self, work: Any, doing: str) -> None:
        """Raise at the deadline, and name those who are not waiting themselves; unless the work
        ends while that is found out."""
        first = self._notices.beats()
        for _ in range(3):  # in one of which those who wait say so
            if _ends(work, _NOTICE_SECONDS):
                return
            self.look(doing)
        last = self._notices.beats()
        others = [r for r in range(self.ranks) if r != self.rank]
        late = [r for r in others if first.get(r) == last.get(r)]
        if late:
            text = did_not_come(late, self.deadline_seconds, self.rank, doing, self.processes)
            _raise(f"{text}; {_NO_STORE}" if self._notices.lost else text)
        reasons = {r: beat.partition(" ")[2] for r, beat in sorted(last.items())}
        waits = "; ".join(f"rank {r} for others to {what}" for r, what in reasons.items())
        _raise(
            f"all ranks wait, and not for the same ({waits}): they must call what all ranks take "
            "part in alike and in the same order"
        )

    def _lost(self, doing: str, error: RuntimeError) -> OperError:
        """Why a collective failed."""
        failure = self._notices.failure()
        if failure:
            return LostRankError(failure)
        dead = [r for r in range(self.ranks) if r != self.rank and self._is_disconnected(r)]
        if dead and self._notices.lost:  # they may have given up, and could not say so
            return LostRankError(
                f"{rank_names(dead)} disconnected, while rank {self.rank} waited for "
                f"{pronoun(dead)} to {doing}; {_NO_STORE}"
            )
        if dead:
            return LostRankError(died(dead, self.rank, doing))
        return LostRankError(
            f"the ranks lost each other, while rank {self.rank} waited for others to {doing}: "
            f"{str(error).splitlines()[0]}"
        )

    def _is_disconnected(self, rank: int) -> bool:
        # What has been disconnected takes no message; others keep it, and nobody asks for it.
        try:
            dist.isend(torch.zeros(1), group=self._group, group_dst=rank, tag=_TAG)
        except RuntimeError:
            return True
        return False

    def _abandon(self) -> None:
        """End what is under way: the group's destructor, at the end of the process, would wait
        for it. gloo has no abort, and disconnects when it has waited too long for a message."""
        for rank in {*range(self.ranks)} - {self.rank}:
            with contextlib.suppress(RuntimeError):
                work: Any = dist.irecv(torch.empty(1), group=self._group, group_src=rank, tag=_TAG)
                work.wait(timedelta(milliseconds=1))


def _ends(work: Any, seconds: float) -> bool:
    """Whether a collective is done within so long; RuntimeError says why it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it raises again, unless the collective was done in this moment
    return True


def _raise(text: str) -> None:
    if text:
        raise LostRankError(text)
