"""Assigners of samples to ranks, from messages in which the ranks describe their samples.

By locality a sample goes to the rank that holds most of the rows that it reads. This works without
a cache: a rank holds the rows that the plan gives it, and all replicas, which therefore decide
nothing. By the caches of a host tier every rank replays the caches of all ranks: their state
follows from the batches and the assignments (Herald's snapshots), so only the rows of the next
batch are exchanged. `Pace` limits the work of the assignment.
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

_CHUNK = 1 << 22  # rows translated at once
# For `Pace`: batches after which rank 0's effort applies, batches that are then measured, and the
# size and condition of a change.
_DELAY = 2
_MEASURED = 2
_SLACK = 0.8  # share of the training time below which there is time for more
_FASTEST = 0.25  # lowest factor by which the effort falls at once
_STEP = 1 / 16  # by which the effort rises
_LEAST = 1 / 64


class Assigner(Protocol):
    """Assigner of the samples of global batches in order: first those of rank 0's loader."""

    def follow(self, effort: float) -> None:
        """Do this part of the requested work, from 0 to 1, from now on."""

    def message(self, batch: Structure) -> torch.Tensor:
        """Return the description of this rank's samples for all ranks: uint8."""

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """Return the rank of each sample of global batch `number`, equally many per rank; `samples`
        is the number of one rank's samples."""


class BlindAssigner:
    """Assigner to `ranks` ranks by a policy that ignores rows and caches."""

    def __init__(self, policy: Policy, ranks: int, seed: int) -> None:
        self._policy, self._ranks, self._seed = policy, ranks, seed

    def follow(self, effort: float) -> None:
        """Do nothing: there is no work to save."""

    def message(self, batch: Structure) -> torch.Tensor:
        """Return an empty message: the policy ignores rows."""
        return torch.empty(0, dtype=torch.uint8)

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """Return the rank of each sample of global batch `number`."""
        room = capacities(samples * self._ranks, self._ranks)
        return assign_blindly(self._policy.kind, room, self._seed, number)


class LocalityAssigner:
    """Assigner of samples to the ranks that hold most of their rows by a plan's placement."""

    def __init__(self, rows: PlanRows, ranks: int) -> None:
        self._rows, self._ranks, self._effort = rows, ranks, 1.0

    def follow(self, effort: float) -> None:
        """Assign this share of the samples exactly, and the others in order."""
        self._effort = effort

    def message(self, batch: Structure) -> torch.Tensor:
        """Return the number of reads of each sample that each rank alone could serve from its
        memory, int32 [samples, M]."""
        counts, _ = self._rows.counts(batch)
        return torch.from_numpy(counts.astype(np.int32).reshape(-1).view(np.uint8))

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """Return the assignment with the most local reads; in ties samples stay on their rank."""
        counts = np.concatenate([message.numpy().view(np.int32) for message in messages])
        return most_local(counts.reshape(-1, self._ranks), self._effort)


def most_local(counts: Ints, exactly: float = 1.0) -> Ints:
    """Return the ranks of M · m samples, m each; rank r could serve counts[s, r] reads of sample s.
    The share `exactly` of the samples, for which the choice matters most, is assigned exactly."""
    samples, ranks = counts.shape
    costs: Floats = -counts.astype(np.float64)
    room = np.full(ranks, samples // ranks, dtype=np.int64)
    at_home = np.repeat(np.arange(ranks), room)
    costs[np.arange(samples), at_home] -= 0.5 / (samples + 1)  # their total is less than one read
    return hybrid(costs, room, exactly)


class CachedRowsAssigner:
    """Assigner of samples by the ranks' caches and their links to the tier, like `oper simulate`.

    A cache is divided among rows of several widths like training's: by the rows of the first batch,
    and again, empty, if a later batch does not fit.
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
        self._row_bytes += 1  # avoids division by 0 for widths that none of the tables has
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
        """Return the rows of each sample: their numbers, int64 [samples], and their addresses."""
        addresses, lengths = self._rows.accesses(batch)
        return torch.from_numpy(np.concatenate([lengths, addresses]).view(np.uint8))

    def follow(self, effort: float) -> None:
        """Do this part of the policy's work from now on."""
        self._dispatcher.policy = self._policy.at(effort)

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """Return the assignment, and advance the caches to their state after training the batch."""
        contents = [message.numpy().view(np.int64) for message in messages]
        addresses = np.concatenate([content[samples:] for content in contents])
        lengths = np.concatenate([content[:samples] for content in contents])
        offsets = np.append(0, np.cumsum(lengths))
        if self._caches is None:
            self._caches = self._make_caches(addresses)
        batch = self._caches.look_up(addresses, offsets)
        assignment = self._dispatcher.assign(self._caches, addresses, batch, number)
        try:
            self._caches.train(batch, assignment)
        except CacheTooSmallError:
            # Training gets this assignment, divides its caches again and continues.
            self._caches = self._make_caches(addresses)
            try:
                self._caches.train(self._caches.look_up(addresses, offsets), assignment)
            except CacheTooSmallError as error:
                raise self._too_small(error, number) from None
        return assignment

    def _make_caches(self, addresses: Ints) -> Caches:
        """Return empty caches, divided among the widths by the rows that batches read."""
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
    """Infrequency of a plan's rows, which are counted by slots, numbered through all arenas."""

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
    """Effort of the policy: the part of its work, from 0 to 1, that it does for each batch, so that
    batches are ready when training needs them.

    Rank 0 measures the times of training and of dispatching a batch. If dispatching takes longer,
    the effort falls by that ratio; if there is time, it rises again, up to 1. Rank 0 announces the
    effort in its header, and all ranks apply it from two batches later on, so it is judged by the
    batches after these. With `fixed` the effort is always 1.
    """

    def __init__(self, fixed: bool) -> None:
        self.effort = 1.0  # for two batches later, by this rank's measurements
        self._fixed = fixed
        self._coming: deque[float] = deque([1.0] * _DELAY)
        self._measured = -_DELAY  # batches; those before the announced effort applies do not count
        self._training = self._dispatching = 0.0

    def hear(self, effort: float) -> float:
        """Take rank 0's announced effort, and return the effort of this batch."""
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
