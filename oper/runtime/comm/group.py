"""Groups: collectives of all ranks, which end in time and say which rank failed, died or is late.

torch.distributed does not notice a rank that failed and lives on, does not name a rank that died,
and notices a stopped rank only after the group's timeout. Here waits are taken in slices, between
which ranks read the failure store (failure_store.py). If a collective does not end, the missing
ranks and the reason are found only then; a collective that ends costs nothing extra.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from oper.base.errors import OperError, first_line, one_line
from oper.base.units import positive_seconds
from oper.runtime.comm import process_end
from oper.runtime.comm.deadline import COMPARE_SECONDS, HEARTBEAT_SECONDS, SLICE_SECONDS, Deadline
from oper.runtime.comm.failure_store import FailureStore
from oper.runtime.comm.lost_ranks import (
    LostRankError,
    all_wait,
    did_not_come,
    died,
    is_stopped,
    of_collection,
    pronoun,
    rank_names,
    told,
)
from oper.runtime.comm.wait_marks import mark_wait

_NO_STORE = (
    "the process group's store, which rank 0 serves where no launcher does, does not answer either"
)
_POLL_SECONDS = 20e-6  # between two looks at a device's work
_TAG = 0x6F706572  # of our messages, apart from the user's: "oper"


class Seen(Protocol):
    """Facts about other ranks that are known without the store, such as about the ranks of this
    host."""

    def leave_words(self, failure: str) -> None:
        """Let them know, once this rank has ended, why it failed."""

    def lost(self, ranks: Collection[int], action: str) -> str:
        """Return why ranks that were waited for are gone; "" if none is known to be."""

    def waits(self) -> dict[int, str]:
        """Return the last wait mark of each of them."""

    def words(self) -> str:
        """Return why a rank has failed, which may not have ended yet; "" if none has said so."""


class Group:
    """All ranks of a process group, for collectives that each must end within the deadline.

    `processes` are the ids of those ranks' processes that can be seen from here; `table` is the
    first table of the collection that waits here.
    """

    def __init__(self, group: dist.ProcessGroup, deadline_seconds: float, table: str = "") -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.deadline_seconds = positive_seconds(deadline_seconds, "deadline_seconds")
        self._group, self.name, self._table = group, group.group_name, table
        self.members: list[int] = dist.get_process_group_ranks(group)  # by their number in the job
        self.processes: dict[int, int] = {}
        self._seen: Callable[[], Seen | None] = lambda: None  # of the ranks of this host
        # Takes in messages that ranks of this host have sent for later: they do not wait for room.
        self.take_in: Callable[[], object] = lambda: None
        self._failures = FailureStore(group)
        process_end.let_threads_finish()
        self._last_heartbeat = 0.0

    def run(
        self, collective: Callable[..., Any], *arguments: Any, action: str, **options: Any
    ) -> None:
        """Run a collective of torch.distributed. `action` completes "rank 0 waited for rank 2 to
        …".

        LostRankError names ranks that failed, died, or did not come. The process group cannot be
        used after that error or after a KeyboardInterrupt.
        """
        self.start(collective, *arguments, action=action, **options)()

    def start(
        self, collective: Callable[..., Any], *arguments: Any, action: str, **options: Any
    ) -> Callable[[], None]:
        """Begin a collective as `run` does. Return a function that waits for its end, within the
        deadline from the call on, and raises as `run` does. It must be called, before the next
        collective ends."""
        with self._failing(action):
            work = collective(*arguments, group=self._group, async_op=True, **options)
        # Work on tensors of a device is done when the device is.
        on_device = any(isinstance(a, torch.Tensor) and a.device.type != "cpu" for a in arguments)
        return lambda: (
            self._finish_on_device(work, action)
            if on_device
            else self._finish(work, action, _ended)
        )

    def _finish_on_device(self, work: Any, action: str) -> None:
        try:
            self._finish(work, action, _ended_on_device)
        except BaseException:
            # Otherwise the device, and whoever frees its memory, waits for the other ranks until
            # NCCL's own timeout.
            with contextlib.suppress(RuntimeError):
                self._group._get_backend(torch.device("cuda")).abort()
            raise

    def _finish(self, work: Any, action: str, ended: Callable[[Any, float], bool]) -> None:
        began, deadline = time.monotonic(), Deadline(self.deadline_seconds)
        waiting = of_collection(action, self._table)
        with self._failing(action):
            while not ended(work, SLICE_SECONDS):
                self.take_in()
                mark_wait(waiting)
                left = deadline.left()
                if deadline.seen is None and left <= COMPARE_SECONDS:
                    deadline.seen = self._waits(left)
                if left <= -HEARTBEAT_SECONDS:  # ranks that came in time have given one
                    _raise(self._late(deadline.seen, action))
                if time.monotonic() - began >= HEARTBEAT_SECONDS:
                    self.heartbeat(waiting, left)

    @contextlib.contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """Tell the other ranks of an error inside, and replace an error of the transport by its
        cause."""
        try:
            yield
        except RuntimeError as error:  # of the transport
            lost = self._lost(action, error)
            self.fail(lost)
            raise lost from error
        except BaseException as error:
            self.fail(error)  # before the others see that this rank disconnects
            self._abandon()
            raise

    def gather(self, message: bytes, action: str) -> list[bytes]:
        """Return the message of every rank; all messages have one length."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        boxes = torch.empty(self.ranks * len(message), dtype=torch.uint8)
        # all_to_all, not all_gather: it reaches every other rank, so that each notices a dead one.
        self.run(dist.all_to_all_single, boxes, mine.repeat(self.ranks), action=action)
        return [box.numpy().tobytes() for box in boxes.split(len(message))]

    def store(self) -> Any:
        """Return a new connection to the group's store, for a thread of its own."""
        store: Any = self._group.get_group_store()
        return store.clone()

    def fail(self, error: BaseException) -> None:
        """Let all ranks that wait, now or later, raise for this error of this rank."""
        if seen := self._seen():
            seen.leave_words(told(self.rank, error))
        self._failures.fail(told(self.rank, error), passed_on=isinstance(error, LostRankError))

    def see(self, seen: Seen) -> None:
        """Ask `seen` about lost ranks before asking the store, which may be lost too."""
        self._seen = weakref.ref(seen)

    def heartbeat(self, action: str, left: float) -> None:
        """Tell the others that this rank waits, for `left` seconds more, and raise LostRankError if
        one has failed; both at most twice a second."""
        if time.monotonic() - self._last_heartbeat >= HEARTBEAT_SECONDS:
            self._last_heartbeat = time.monotonic()
            if seen := self._seen():
                _raise(seen.words())
            _raise(self._failures.heartbeat(action, left))

    def check(self) -> None:
        """Raise LostRankError if a rank has failed."""
        _raise(self._failures.failure())

    def _late(self, first: dict[int, str] | None, action: str) -> str:
        """Return the text on the ranks that are not waiting themselves: they have given no
        heartbeat since the `first` were read."""
        last = self._waits(0.0)
        others = [r for r in range(self.ranks) if r != self.rank]

        def text(late: list[int]) -> str:
            return did_not_come(late, self.deadline_seconds, self.rank, action, self.processes)

        if first is None or last is None:  # then name stopped ranks, if any can be seen
            stopped = [r for r in others if is_stopped(self.processes.get(r))]
            return f"{text(stopped or others)}; {_NO_STORE}"
        if late := [r for r in others if first.get(r) == last.get(r)]:
            seen = self._seen()
            if seen and all(seen.lost([r], action) for r in late):
                return seen.lost(late, action)
            return text(late)
        reasons = {r: beat.partition(" ")[2] for r, beat in sorted(last.items())}
        return all_wait(reasons)

    def _waits(self, left: float) -> dict[int, str] | None:
        """Return the last heartbeat of each rank, or, for ranks of this node, its wait mark; None
        if the store does not answer and some ranks are on other nodes."""
        marks = seen.waits() if (seen := self._seen()) else {}
        if len(marks) == self.ranks:
            return marks
        beats = self._failures.heartbeats(left)
        return None if beats is None else beats | marks

    def _lost(self, action: str, error: RuntimeError) -> OperError:
        """Return the error that says why a collective failed."""
        others = [r for r in range(self.ranks) if r != self.rank]
        for wait in (0.0, SLICE_SECONDS):  # a process that ends closes its connections first
            time.sleep(wait)
            if (seen := self._seen()) and (text := seen.lost(others, action)):
                return LostRankError(text)
        failure = self._failures.failure()
        if failure:
            return LostRankError(failure)
        dead = [r for r in others if self._is_disconnected(r)]
        if dead and self._failures.lost:  # they may have given up, and could not say so
            return LostRankError(
                f"{rank_names(dead)} disconnected, while rank {self.rank} waited for "
                f"{pronoun(dead)} to {action}; {_NO_STORE}"
            )
        if dead:
            return LostRankError(died(dead, self.rank, action))
        return LostRankError(
            f"the ranks lost each other, while rank {self.rank} waited for others to {action}: "
            f"{first_line(error)}"
        )

    def _is_disconnected(self, rank: int) -> bool:
        # A rank that is disconnected takes no message; others keep it unread.
        try:
            dist.isend(torch.zeros(1), group=self._group, group_dst=rank, tag=_TAG)
        except RuntimeError:
            return True
        return False

    def _abandon(self) -> None:
        """End the running collective: the group's destructor, at the end of the process, would wait
        for it. gloo has no abort, and disconnects when it has waited too long for a message."""
        for rank in {*range(self.ranks)} - {self.rank}:
            with contextlib.suppress(RuntimeError):
                work: Any = dist.irecv(torch.empty(1), group=self._group, group_src=rank, tag=_TAG)
                work.wait(timedelta(milliseconds=1))


def own_gloo_group(ranks: Sequence[int], deadline_seconds: float, what: str) -> dist.ProcessGroup:
    """Return a further gloo group of these ranks of the job, in their order, for `what` they all
    make: it stands in no order with the collectives of others. Raise OperError if not all come in
    time."""
    # Before 2.12 torch sorts ranks, has no groups in another order and does not know the argument.
    order: dict[str, Any] = {"sort_ranks": False} if sorted(ranks) != list(ranks) else {}
    try:
        own = dist.new_group(
            list(ranks),
            # Our own deadline comes first, because it names the missing ranks.
            timeout=timedelta(seconds=deadline_seconds + 60),
            backend="gloo",
            # Ranks that are not in the group have no part in making it.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            **order,
        )
    except RuntimeError as error:
        raise OperError(
            f"rank {list(ranks).index(dist.get_rank())} made its {what}, and not all other ranks "
            f"of {len(ranks)} did so in time, or they made other process groups before it: make it "
            f"on all ranks, and process groups on all in the same order ({one_line(error)})"
        ) from error
    assert own is not None
    return own


def _ended(work: Any, seconds: float) -> bool:
    """Say whether a collective ends within `seconds`; RuntimeError says why it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it raises again, unless the collective was done in this moment
    return True


def _ended_on_device(work: Any, seconds: float) -> bool:
    """Return whether a collective of NCCL is done. Its own `wait` would wait without end, or end
    the process: the host asks, and then has the device's later work wait."""
    deadline = Deadline(seconds)
    while not work.is_completed():
        if deadline.ended():
            return False
        time.sleep(_POLL_SECONDS)
    work.wait()
    return True


def _raise(text: str) -> None:
    if text:
        raise LostRankError(text)
