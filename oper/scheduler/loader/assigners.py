"""Assigners: from what the ranks tell each other of their samples, the rank that trains each.

By locality a sample goes to the rank that holds most of the rows that it reads. That needs no
cache: a rank holds the rows that the plan gives it, and all replicas, which therefore decide
nothing. By the caches of a host tier every rank replays the caches of all ranks: their state
follows from the batches and the assignments (Herald's snapshots), so that nothing but the rows of
the next batch is exchanged. `Pace` is how much work the assignment may take.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.scheduler.cache import CacheDivision, Caches, CacheTooSmallError
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.dispatch import Dispatcher, Policy, assign_blindly, capacities, hybrid
from oper.scheduler.laia_infrequency import Infrequency
from oper.scheduler.loader.batch_structure import Structure
from oper.scheduler.loader.plan_rows import PlanRows
from oper.scheduler.row_addresses import owner_of, slot_of, width_of

_CHUNK = 1 << 22  # rows that are translated at once
# Of `Pace`: batches after which rank 0's word holds, those that are measured then, and by how much
# and when it changes.
_DELAY = 2
_MEASURED = 2
_SLACK = 0.8  # of the time of training, below which there is time for more
_FASTEST = 0.25  # the most that the effort falls at once
_STEP = 1 / 16  # by which it rises
_LEAST = 1 / 64


class Assigner(Protocol):
    """Assigns the samples of global batches in order: first those of rank 0's loader."""

    def follow(self, effort: float) -> None:
        """Assign with this part of the work that was asked for, from 0 to 1, from now on."""

    def message(self, batch: Structure) -> torch.Tensor:
        """What all ranks must know of this rank's samples: uint8."""

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """The rank of each sample of global batch `number`, as many each; `samples` are those of
        one rank."""


class BlindAssigner:
    """Assigns samples to `ranks` by a policy that looks at nothing."""

    def __init__(self, policy: Policy, ranks: int, seed: int) -> None:
        self._policy, self._ranks, self._seed = policy, ranks, seed

    def follow(self, effort: float) -> None:
        """Nothing: there is no work to save."""

    def message(self, batch: Structure) -> torch.Tensor:
        """An empty message: the policy looks at no rows."""
        return torch.empty(0, dtype=torch.uint8)

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """The rank of each sample of global batch `number`."""
        room = capacities(samples * self._ranks, self._ranks)
        return assign_blindly(self._policy.kind, room, self._seed, number)


class LocalityAssigner:
    """Assigns samples to the `ranks` that hold most of their rows by a plan's placement."""

    def __init__(self, rows: PlanRows, ranks: int) -> None:
        self._rows, self._ranks, self._effort = rows, ranks, 1.0

    def follow(self, effort: float) -> None:
        """Assign this share of the samples exactly, and the others in order."""
        self._effort = effort

    def message(self, batch: Structure) -> torch.Tensor:
        """The reads of each sample that each rank alone could serve from its memory, int32
        [samples, M]."""
        counts, _ = self._rows.counts(batch)
        return torch.from_numpy(counts.astype(np.int32).reshape(-1).view(np.uint8))

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """The assignment with the most local reads; in ties samples stay where they are."""
        counts = np.concatenate([message.numpy().view(np.int32) for message in messages])
        return most_local(counts.reshape(-1, self._ranks), self._effort)


def most_local(counts: Ints, exactly: float = 1.0) -> Ints:
    """The ranks of M · m samples, m each, of which rank r could serve counts[s, r] reads; the share
    `exactly` of them, for which the choice matters most, are assigned exactly."""
    samples, ranks = counts.shape
    costs: Floats = -counts.astype(np.float64)
    room = np.full(ranks, samples // ranks, dtype=np.int64)
    at_home = np.repeat(np.arange(ranks), room)
    costs[np.arange(samples), at_home] -= 0.5 / (
        samples + 1
    )  # all of them together are less than one read
    return hybrid(costs, room, exactly)


class CachedRowsAssigner:
    """Assigns samples by the ranks' caches and their links to the tier, as `oper simulate` does.

    A cache is divided among rows of several widths as training divides its own: by what the first
    batch asks for, and anew, empty, where a later one does not fit.
    """

    def __init__(
        self,
        rows: PlanRows,
        tables: Sequence[int],
        policy: Policy,
        settings: CacheSettings,
        seconds_per_byte: Floats,
        seed: int,
    ) -> None:
        self._rows, self._policy, self._settings = rows, policy, settings
        cached = [rows.plan.tables[t] for t in tables]
        size = settings.bytes_of(sum(t.rows * t.memory_bytes("training") for t in cached))
        widths = len(rows.plan.layout.slots)
        of_width, self._row_bytes, self._gradient_bytes = np.zeros((3, widths), dtype=np.int64)
        self._row_bytes += 1  # widths that none of the tables has must not divide by 0
        for t, table in zip(tables, cached, strict=True):
            width = rows.plan.layout.width_of_table[t]
            of_width[width] += table.rows
            self._row_bytes[width] = table.memory_bytes("training")
            self._gradient_bytes[width] = table.row_bytes
        self._division = CacheDivision(size, of_width, self._row_bytes)
        self._caches: Caches | None = None
        infrequency = None if policy.tables is None else _PlanInfrequency(rows, tables)
        self._dispatcher = Dispatcher(policy, seconds_per_byte, seed, infrequency)

    def message(self, batch: Structure) -> torch.Tensor:
        """The rows of each sample: their numbers, int64 [samples], and their addresses."""
        addresses, lengths = self._rows.accesses(batch)
        return torch.from_numpy(np.concatenate([lengths, addresses]).view(np.uint8))

    def follow(self, effort: float) -> None:
        """Dispatch by the policy with this part of its work."""
        self._dispatcher.policy = self._policy.at(effort)

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """The assignment, after which the caches are those after training the batch."""
        given = [message.numpy().view(np.int64) for message in messages]
        addresses = np.concatenate([content[samples:] for content in given])
        lengths = np.concatenate([content[:samples] for content in given])
        offsets = np.append(0, np.cumsum(lengths))
        if self._caches is None:
            self._caches = self._make_caches(addresses)
        batch = self._caches.look_up(addresses, offsets)
        assignment = self._dispatcher.assign(self._caches, addresses, batch, number)
        try:
            self._caches.train(batch, assignment)
        except CacheTooSmallError:
            # Training gets this assignment, divides its caches anew and goes on.
            self._caches = self._make_caches(addresses)
            try:
                self._caches.train(self._caches.look_up(addresses, offsets), assignment)
            except CacheTooSmallError as error:
                raise self._too_small(error, number) from None
        return assignment

    def _make_caches(self, addresses: Ints) -> Caches:
        """Empty caches, divided among the widths by what batches ask for."""
        settings = self._settings
        return Caches(
            self._rows.plan.ranks,
            self._division.capacity(addresses).tolist(),
            self._row_bytes.tolist(),
            self._gradient_bytes.tolist(),
            settings.evict,
            settings.synchronisation,
        )

    def _too_small(self, error: CacheTooSmallError, number: int) -> OperError:
        least = self._division.least_bytes(error.needed)
        return OperError(
            f"cache {self._settings.size!r}: batch {number}: {error}; {least:,} bytes would be "
            "enough for it, and fewer samples a rank need less"
        )


class _PlanInfrequency(Infrequency):
    """The infrequency of a plan's rows: they are counted by slots, numbered through all arenas."""

    def __init__(self, rows: PlanRows, tables: Sequence[int]) -> None:
        plan: Plan = rows.plan
        slots = plan.layout.slots
        self._arena = (np.cumsum(slots) - slots.reshape(-1)).reshape(slots.shape)  # [W, M]
        table_of = np.zeros(int(slots.sum()), dtype=np.int32)
        for t in tables:
            for start in range(0, plan.tables[t].rows, _CHUNK):
                ids = torch.arange(start, min(start + _CHUNK, plan.tables[t].rows))
                addresses = rows.of_rows(ids, np.array([len(ids)]), np.array([t]))
                table_of[self.rows_of(addresses)] = t
        super().__init__(table_of, len(plan.tables), plan.ranks)

    def rows_of(self, addresses: Ints) -> Ints:
        """Return the number of each row's slot."""
        return self._arena[width_of(addresses), owner_of(addresses)] + slot_of(addresses)


class Pace:
    """How much of its work the policy does for each batch, so that batches are ready when training
    needs them: the effort, from 0 to 1.

    Rank 0 measures how long a batch takes to train and how long to dispatch. Where dispatching
    takes longer the effort falls, by how much longer it takes; where there is time it rises again,
    up to 1. Rank 0's word is in its header, and holds on all ranks from two batches later on, so
    that it is judged by the batches after these. With `fixed` the effort is always 1.
    """

    def __init__(self, fixed: bool) -> None:
        self.effort = 1.0  # for two batches later, by what this rank has measured
        self._fixed = fixed
        self._coming: deque[float] = deque([1.0] * _DELAY)
        self._measured = -_DELAY  # batches; those before the word holds do not count
        self._training = self._dispatching = 0.0

    def hear(self, effort: float) -> float:
        """Take rank 0's word, and return the effort of this batch."""
        if self._fixed:
            return 1.0
        self._coming.append(effort)
        return self._coming.popleft()

    def note(self, training: float, dispatching: float) -> None:
        """Take the seconds of a batch; `training` is 0 if none was trained yet."""
        if self._fixed or training <= 0:
            return
        self._measured += 1
        if self._measured <= 0:
            return
        self._training += training
        self._dispatching += dispatching
        if self._measured < _MEASURED:
            return
        if self._dispatching > self._training:
            fitting = max(_SLACK * self._training / self._dispatching, _FASTEST)
            self._change(max(self.effort * fitting, _LEAST))
        elif self._dispatching < _SLACK * self._training:
            self._change(min(self.effort + _STEP, 1.0))
        self._measured, self._training, self._dispatching = min(self._measured, 0), 0.0, 0.0

    def _change(self, effort: float) -> None:
        if effort != self.effort:
            self.effort, self._measured = effort, -_DELAY
