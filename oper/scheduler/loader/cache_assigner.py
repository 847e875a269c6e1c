"""Dispatch by what caches of a host tier hold: every rank replays the caches of all ranks.

Their state follows from the batches and the assignments (Herald's snapshots): nothing but the rows
of the next batch is exchanged.
"""

from collections.abc import Sequence

import numpy as np
import torch

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.scheduler.cache import Caches, CacheTooSmallError
from oper.scheduler.cache_capacity import CacheDivision
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.dispatch import Dispatcher, Policy
from oper.scheduler.infrequency import Infrequency
from oper.scheduler.loader.batch_structure import Structure
from oper.scheduler.loader.plan_rows import PlanRows
from oper.scheduler.row_addresses import owner_of, slot_of, width_of


class CachedRowsAssigner:
    """By the caches of `ranks` and their links to the tier, as `oper simulate` does.

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
        self._rows, self._settings = rows, settings
        cached = [rows.plan.tables[t] for t in tables]
        size = settings.bytes_of(sum(t.rows * t.memory_bytes("training") for t in cached))
        widths = len(rows.plan.layout.slots)
        of_width, self._row_bytes, self._gradient_bytes = np.zeros((3, widths), dtype=np.int64)
        self._row_bytes += 1  # of widths that none of the tables has
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

    def follow(self, policy: Policy) -> None:
        """Dispatch by another α, or number of tables, from now on."""
        self._dispatcher.policy = policy

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
    """The same of rows by their addresses: slots are numbered through all arenas."""

    def __init__(self, rows: PlanRows, tables: Sequence[int]) -> None:
        plan: Plan = rows.plan
        slots = plan.layout.slots
        self._arena = (np.cumsum(slots) - slots.reshape(-1)).reshape(slots.shape)  # [W, M]
        self._table_of = np.zeros(int(slots.sum()), dtype=np.int32)
        super().__init__(np.array([0] * len(plan.tables) + [int(slots.sum())]), plan.ranks)
        for t in tables:
            for start in range(0, plan.tables[t].rows, _CHUNK):
                ids = torch.arange(start, min(start + _CHUNK, plan.tables[t].rows))
                addresses = rows.of_rows(ids, np.array([len(ids)]), np.array([t]))
                self._table_of[self.rows_of(addresses)] = t

    def rows_of(self, addresses: Ints) -> Ints:
        """The number of each row's slot."""
        return self._arena[width_of(addresses), owner_of(addresses)] + slot_of(addresses)

    def tables_of(self, addresses: Ints) -> Ints:
        """The table of each row."""
        return self._table_of[self.rows_of(addresses)].astype(np.int64)


_CHUNK = 1 << 22  # rows that are translated at once
