"""Global batches: the samples that all ranks' loaders yield at once, dispatched, one batch per
call.

A global batch is rank 0's m samples, then rank 1's, and so on. The samples assigned to a rank keep
this order. All ranks raise an error that one of them finds.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.runtime.comm.lost_ranks import LostRankError, rank_names, told
from oper.scheduler.loader.assigners import Assigner, Pace
from oper.scheduler.loader.batch_structure import (
    Part,
    Structure,
    choose,
    first_difference,
    from_bytes,
    join,
    to_bytes,
)
from oper.scheduler.loader.peers import Header, Peers, State

PARTS = ("load", "wait", "gather", "scoring", "exchange")


@dataclass
class Counters:
    """Counts of the samples that one rank has moved in the global batches so far, and the seconds
    of the work.

    Seconds: `load` in the rank's own loader, `wait` for the other ranks' batches, `gather` of the
    inputs of scores, `scoring` with the assignment, `exchange` of the samples.
    """

    batches: int = 0
    samples: int = 0  # assigned to this rank
    samples_moved: int = 0  # from its own loader to other ranks
    bytes_moved: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time of a part."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += perf_counter() - start

    @property
    def dispatching(self) -> float:
        """Seconds that dispatch adds to loading."""
        return sum(self.seconds[part] for part in ("gather", "scoring", "exchange"))

    def to_dict(self) -> dict[str, Any]:
        """Return the counters by name; times in milliseconds per batch."""
        times = {
            f"{part}_ms": 1e3 * spent / max(self.batches, 1) for part, spent in self.seconds.items()
        }
        return {
            "batches": self.batches,
            "samples": self.samples,
            "samples_moved": self.samples_moved,
            "bytes_moved": self.bytes_moved,
            **times,
        }


class LoaderState:
    """State that persists over epochs: the ranks, the assigner with its state, and the counters."""

    def __init__(self, peers: Peers, assigner: Assigner, pace: Pace, drop_last: bool) -> None:
        self.peers, self.pace, self.drop_last = peers, pace, drop_last
        self.assigner, self.counters = assigner, Counters()
        self.training = 0.0  # seconds of the last batch's training

    def assign(self, messages: list[torch.Tensor], samples: int, word: Header) -> Ints:
        """Return the rank of each sample of the next global batch; `word` is rank 0's header."""
        self.assigner.follow(self.pace.hear(word.effort))
        return self.assigner.assign(messages, samples, self.counters.batches)


class GlobalBatches:
    """Global batches of an epoch, of which each rank calls `next` equally often."""

    def __init__(self, own: Iterator[Any], state: LoaderState) -> None:
        self._own, self._of_all = own, state
        self._peers, self._counters = state.peers, state.counters
        self._samples = 0  # m; 0 before the first batch
        self._loaded = 0
        self._left_out = -1  # the number of the batch that was incomplete
        self._number = 0
        self._failure: BaseException | None = None  # of this rank's own

    def next(self, stopped: str | None) -> Any:
        """Return this rank's part of the next global batch; None if the epoch has ended, on all
        ranks.

        If `stopped` is given, this rank stops training and tells the others, with the reason unless
        it is empty.
        """
        while True:
            header, batch, message = self._load(stopped)
            with self._counters.timed("wait"):
                packed = self._peers.gather(header.pack(), f"load batch {self._number}")
            headers = [Header.unpack(content) for content in packed]
            if self._ends(headers, stopped is not None):
                return None
            if self._is_complete(headers):
                assert batch is not None
                return self._dispatched(headers, batch, message)
            self._left_out = self._number
            self._number += 1

    def _load(self, stopped: str | None) -> tuple[Header, Structure | None, torch.Tensor]:
        """Return this rank's header, its batch, and the batch's message for the other ranks."""
        nothing = torch.empty(0, dtype=torch.uint8)
        if stopped is not None:
            return Header(State.STOPPED, self._loaded, failure=stopped), None, nothing
        try:
            with self._counters.timed("load"):
                try:
                    yielded = next(self._own)
                except StopIteration:
                    return Header(State.ENDED, self._loaded), None, nothing
            self._loaded += 1
            batch = Structure.of(yielded)
            with self._counters.timed("gather"):
                message = self._of_all.assigner.message(batch)
        except Exception as error:
            self._failure = error
            text = told(self._peers.rank, error)
            return Header(State.FAILED, self._loaded, failure=text), None, nothing
        effort = self._of_all.pace.effort
        header = Header(
            State.BATCH, self._loaded, batch.samples, len(message), effort, batch.digest
        )
        return header, batch, message

    def _ends(self, headers: list[Header], stopped: bool) -> bool:
        """Return whether all ranks end here; raise an error if only some do."""
        by_state: dict[State, list[int]] = {}
        for rank, header in enumerate(headers):
            by_state.setdefault(header.state, []).append(rank)
        for rank in by_state.get(State.FAILED, ()):
            raise self._failure or LostRankError(headers[rank].failure)
        if stopped:
            return True
        if left := by_state.get(State.STOPPED):
            reasons = [headers[rank].failure for rank in left if headers[rank].failure]
            raise LostRankError(
                reasons[0]
                if reasons
                else f"{rank_names(left)} left the loop over the DispatchingLoader at batch "
                f"{self._number} or before, and other ranks go on: all ranks must leave it after "
                "the same batch"
            )
        ended, going = by_state.get(State.ENDED, []), by_state.get(State.BATCH, [])
        if not going:
            return True
        if self._left_out < 0 and (not ended or self._of_all.drop_last):
            return False
        if self._left_out >= 0:
            raise OperError(
                f"batch {self._left_out} was left out (drop_last), as some ranks had fewer "
                f"samples or none, but {rank_names(going)} went on after it: only the last batch "
                "may be incomplete; give all ranks' loaders equally many batches of equal size"
            )
        lengths = sorted({headers[rank].batches for rank in ended})
        raise OperError(
            f"the loader of {rank_names(ended)} ended after {', '.join(map(str, lengths))} "
            f"batches, and that of {rank_names(going)} has more: give all ranks loaders of equal "
            "length, as a DistributedSampler does, or drop_last=True if they differ in the last "
            "batch alone"
        )

    def _is_complete(self, headers: list[Header]) -> bool:
        """Return whether all ranks have a batch of m samples; raise an error if they must but do
        not."""
        if self._samples == 0:
            self._samples = max(header.samples for header in headers)
        wrong = [rank for rank, header in enumerate(headers) if header.samples != self._samples]
        if self._samples and not wrong:
            return True
        if self._of_all.drop_last:
            return False
        rank = wrong[0] if wrong else 0
        raise OperError(
            f"batch {self._number}: expected {self._samples or 'some'} samples of each rank, as "
            f"many as in the first batch, got {headers[rank].samples} of rank {rank}; make batches "
            "of equal size, or leave out a ragged last one with drop_last=True"
        )

    def _dispatched(self, headers: list[Header], batch: Structure, message: torch.Tensor) -> Any:
        """Assign the samples, exchange them, and return those that this rank trains."""
        if len({header.digest for header in headers}) > 1:
            self._raise_difference(batch)
        before = self._counters.dispatching
        try:
            with self._counters.timed("gather"):
                lengths = [header.message_bytes for header in headers]
                action = f"gather the rows of batch {self._number}"
                messages = self._peers.gather_all(message, lengths, action)
            with self._counters.timed("scoring"):
                assignment = self._of_all.assign(messages, self._samples, headers[0])
            with self._counters.timed("exchange"):
                parts = self._exchange(batch, assignment)
        except BaseException as error:
            self._peers.fail(error)
            raise
        self._number += 1
        self._counters.batches += 1
        self._counters.samples += self._samples
        self._of_all.pace.note(self._of_all.training, self._counters.dispatching - before)
        return batch.with_parts(parts, self._samples)

    def _exchange(self, batch: Structure, assignment: Ints) -> list[Part]:
        """Return the parts of this rank's samples of a global batch."""
        peers, m = self._peers, self._samples
        of_rank = assignment.reshape(peers.ranks, m)  # of each loader's samples
        targets = of_rank[peers.rank]
        chosen = [
            [
                choose(part, torch.from_numpy(np.flatnonzero(targets == rank)))
                for part in batch.parts
            ]
            for rank in range(peers.ranks)
        ]
        staying = chosen[peers.rank]
        outgoing = [to_bytes([] if r == peers.rank else parts) for r, parts in enumerate(chosen)]
        digest = hashlib.sha256(assignment.astype("<i8").tobytes()).digest()
        received = peers.exchange(outgoing, digest, self._number)
        counts = (of_rank == peers.rank).sum(axis=1).tolist()
        pieces = [
            staying if r == peers.rank else from_bytes(content, batch.parts, counts[r])
            for r, content in enumerate(received)
        ]
        self._counters.samples_moved += int((targets != peers.rank).sum())
        self._counters.bytes_moved += sum(map(len, outgoing))
        return [join(part) for part in zip(*pieces, strict=True)]

    def _raise_difference(self, batch: Structure) -> None:
        """Raise the first difference between the structures of the ranks' batches."""
        description = json.dumps(batch.description).encode()
        action = f"compare batch {self._number}"
        sizes = self._peers.gather(len(description).to_bytes(8, "little"), action)
        lengths = [int.from_bytes(size, "little") for size in sizes]
        sent = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        contents = self._peers.gather_all(sent, lengths, action)
        texts = [json.loads(content.numpy().tobytes()) for content in contents]
        raise OperError(
            f"batch {self._number}: {first_difference(dict(enumerate(texts)))}; all ranks' batches "
            "must be made of the same, and what has no samples must be equal on all ranks"
        )
