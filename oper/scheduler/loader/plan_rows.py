"""The rows that a batch's samples read, by their addresses in a plan.

The address of a row is here the same on all ranks: width << 56 | owner << 40 | slot, where a row
that all ranks hold, at one slot, counts as rank 0's. Ids that are no rows read row 0; whether they
are an error is for the tables to say when the batch trains.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.plan.address_map import LOCAL, AddressMap, unpack
from oper.plan.layout import SLOT_BITS
from oper.plan.plan import Plan
from oper.scheduler.cache import WIDTH_SHIFT
from oper.scheduler.loader.batch_structure import Structure
from oper.tables.table import Table


class Accesses(NamedTuple):
    """Accesses of a batch, sample after sample, and in a sample feature after feature."""

    addresses: Ints  # [N]
    lengths: Ints  # [samples]
    everywhere: Ints  # [N] 1 where all ranks hold the row


class PlanRows:
    """The rows of some tables of a plan, which must be one for training.

    `features` [table's name] are the features that read it; those of the plan's tables unless
    given. Tables without any are left out.
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
        maps = range(min(plan.ranks, 2))
        self._maps = [AddressMap.of(plan, rank) for rank in maps]

    def accesses(self, batch: Structure) -> Accesses:
        """The rows that a batch reads. OperError names a feature that it lacks."""
        ids, lengths, tables = [], [], []
        for feature, table in self.features:
            found = batch.features.get(feature, ())
            if not found:
                name = self.plan.tables[table].name
                has = ", ".join(list(batch.features)[:6])
                raise OperError(
                    f"table {name!r}: its feature {feature!r} is not in the batch, which has "
                    f"{has}; give DispatchingLoader the model's: features={{table: [feature, …]}}"
                )
            rows = self.plan.tables[table].rows
            for values, of_sample in found:
                ids.append(torch.where((values < 0) | (values >= rows), 0, values).long())
                lengths.append(of_sample.numpy().astype(np.int64))
                tables.append(table)
        sizes = np.array([len(values) for values in ids])
        order = _sample_major(np.stack(lengths))
        addresses, everywhere = self.of_rows(torch.cat(ids), sizes, np.array(tables))
        return Accesses(addresses[order], np.stack(lengths).sum(axis=0), everywhere[order])

    def of_rows(self, rows: torch.Tensor, sizes: Ints, tables: Ints) -> tuple[Ints, Ints]:
        """The addresses of rows, of which `sizes[n]` are of table `tables[n]` each, and 1 where
        all ranks hold the row."""
        offsets = torch.from_numpy(np.append(0, np.cumsum(sizes)))
        segments = torch.from_numpy(tables)
        found = [given.translate_features(rows, offsets, segments) for given in self._maps]
        owner, slot = (part.numpy() for part in unpack(found[0]))
        local = [(unpack(addresses)[0] == LOCAL).numpy() for addresses in found]
        owner = np.where(local[0], 0, owner)
        width = np.repeat(self.plan.layout.width_of_table[tables], sizes)
        everywhere = np.logical_and.reduce(local).astype(np.int64)
        return width << WIDTH_SHIFT | owner << SLOT_BITS | slot, everywhere


def owners(addresses: Ints) -> Ints:
    """The rank that holds each row, 0 for those that all hold."""
    return (addresses & (1 << WIDTH_SHIFT) - 1) >> SLOT_BITS


def _features(table: Table, features: Mapping[str, Sequence[str]] | None) -> Sequence[str]:
    return table.columns if features is None else features.get(table.name, ())


def _sample_major(lengths: Ints) -> Ints:
    """Where the accesses of features, one feature after the other, with lengths [F, samples], are
    when all of a sample's come together: positions [N]."""
    flat = lengths.reshape(-1)
    starts = (np.cumsum(flat) - flat).reshape(lengths.shape).T.reshape(-1)
    counts = lengths.T.reshape(-1)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
