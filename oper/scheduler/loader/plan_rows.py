"""Rows that a batch's samples read, by their addresses in a plan.

Here the address of a row is equal on all ranks: width << 56 | owner << 40 | slot; a row that all
ranks hold, at one slot, counts as rank 0's. Invalid ids read row 0; the tables decide when the
batch trains whether they are an error.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.plan.address_map import LOCAL, AddressMap, unpack
from oper.plan.layout import SLOT_BITS
from oper.plan.plan import Plan
from oper.runtime.memory.runtime_plan import FLAT_BYTES
from oper.scheduler.loader.batch_structure import Structure
from oper.scheduler.row_addresses import WIDTH_SHIFT, sample_major
from oper.tables.table import Table


class Accesses(NamedTuple):
    """Accesses of a batch, sample after sample, and in a sample feature after feature."""

    addresses: Ints  # [N]
    lengths: Ints  # [samples]


class PlanRows:
    """Rows of some tables of a plan, which must be for training.

    `features` [table's name] are the features that read it; the plan's unless given. Tables without
    features are left out.
    """

    def __init__(
        self, plan: Plan, tables: Sequence[int], features: Mapping[str, Sequence[str]] | None
    ) -> None:
        for name in features or ():
            plan.table_index(name)
        self.plan = plan
        self.features = [
            (feature, t) for t in tables for feature in _features(plan.tables[t], features)
        ]
        if not self.features:
            raise OperError(
                f"features {dict(features or {})!r}: none of them reads a table whose rows decide "
                "where samples go; name the features by table"
            )
        # A row that is LOCAL to two ranks is LOCAL to all: plans for training have no other copies.
        ranks = range(min(plan.ranks, 2))
        self._maps = [AddressMap.of(plan, rank).flattened(FLAT_BYTES) for rank in ranks]

    def accesses(self, batch: Structure) -> Accesses:
        """Return the rows that a batch reads; raise OperError, which names a feature that it
        lacks."""
        read = self._read(batch)
        addresses = self.of_rows(read.rows, read.sizes, read.tables)
        return Accesses(addresses[sample_major(read.lengths)], read.lengths.sum(axis=0))

    def counts(self, batch: Structure) -> tuple[Ints, int]:
        """Return the number of reads of each sample that each rank alone could serve from its
        memory, [samples, M], and the number of reads that every rank could serve."""
        read = self._read(batch)
        owner, _, everywhere = self._located(read.rows, read.sizes, read.tables)
        features, samples = read.lengths.shape
        sample = np.repeat(np.tile(np.arange(samples), features), read.lengths.reshape(-1))
        cell = (sample * self.plan.ranks + owner)[~everywhere]
        counts = np.bincount(cell, minlength=samples * self.plan.ranks)
        return counts.reshape(samples, self.plan.ranks), int(everywhere.sum())

    def of_rows(self, rows: torch.Tensor, sizes: Ints, tables: Ints) -> Ints:
        """Return the addresses of rows, of which `sizes[n]` are of table `tables[n]` each."""
        owner, slot, _ = self._located(rows, sizes, tables)
        width = np.repeat(self.plan.layout.width_of_table[tables], sizes)
        return width << WIDTH_SHIFT | owner << SLOT_BITS | slot

    def _located(
        self, rows: torch.Tensor, sizes: Ints, tables: Ints
    ) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Return the owner of each row, its slot there, and a mask of the rows that all ranks
        hold."""
        offsets = torch.from_numpy(np.append(0, np.cumsum(sizes)))
        segments = torch.from_numpy(tables)
        located = [
            address_map.translate_features(rows, offsets, segments) for address_map in self._maps
        ]
        owner, slot = (part.numpy() for part in unpack(located[0]))
        local = [owner == LOCAL] + [(unpack(other)[0] == LOCAL).numpy() for other in located[1:]]
        return np.where(local[0], 0, owner), slot, np.logical_and.reduce(local)

    def _read(self, batch: Structure) -> "_Read":
        ids, lengths, tables = [], [], []
        for feature, table in self.features:
            occurrences = batch.features.get(feature, ())
            if not occurrences:
                name = self.plan.tables[table].name
                has = ", ".join(list(batch.features)[:6])
                raise OperError(
                    f"table {name!r}: its feature {feature!r} is not in the batch, which has "
                    f"{has}; give DispatchingLoader the model's: features={{table: [feature, …]}}"
                )
            for values, of_sample in occurrences:
                ids.append(values)
                lengths.append(of_sample.numpy())
                tables.append(table)
        sizes = np.array([len(values) for values in ids])
        of_all = torch.cat(ids).long()
        most = np.array([self.plan.tables[t].rows for t in tables], dtype=np.int64)
        limit = torch.from_numpy(np.repeat(most, sizes))
        rows = torch.where((of_all < 0) | (of_all >= limit), 0, of_all)
        return _Read(rows, np.stack(lengths).astype(np.int64), sizes, np.array(tables))


class _Read(NamedTuple):
    """Rows that a batch reads, one feature after the other: feature f reads `sizes[f]` rows of
    table `tables[f]`, sample s lengths[f, s] of them."""

    rows: torch.Tensor  # int64 [N]
    lengths: Ints  # [F, samples]
    sizes: Ints  # [F]
    tables: Ints  # [F]


def _features(table: Table, features: Mapping[str, Sequence[str]] | None) -> Sequence[str]:
    return table.columns if features is None else features.get(table.name, ())
