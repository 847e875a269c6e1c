"""What it costs to bring rows from one set of holders to another."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.cost.charges import Charges
from oper.cost.holder_sets import HolderSets, nearest_holder_sets
from oper.plan.row_locator import RowLocator
from oper.profiling.profile import Profile
from oper.topology.topology import Topology


@dataclass(frozen=True)
class MigrationCost:
    """What it takes to bring a row from one holder set to another: every new holder copies it
    from the nearest old one."""

    nearest: Ints  # [K, M] the holder that a rank copies a row of column k from; itself if it holds
    seconds: Floats  # [K, K'] seconds per byte, summed over the new holders

    @staticmethod
    def of(before: HolderSets, after: HolderSets, topology: Topology) -> "MigrationCost":
        """Between the columns of two placements."""
        nearest = nearest_holder_sets(before.holds, topology).path.astype(np.int64)
        link = Charges.of(topology).link_seconds[np.arange(topology.ranks), nearest]
        return MigrationCost(nearest, link @ after.holds.T.astype(np.float64))


def link_bytes(
    moved_bytes: Floats, before: HolderSets, after: HolderSets, topology: Topology
) -> NDArray[np.float64]:
    """Bytes that each rank copies from each other, [M, M] (reader by source), when rows of
    `moved_bytes[k, l]` in all go from column k of `before` to column l of `after`."""
    carriage = MigrationCost.of(before, after, topology)
    matrix = np.zeros((topology.ranks, topology.ranks))
    arriving = np.where(before.holds, 0.0, moved_bytes @ after.holds.astype(np.float64))
    readers = np.broadcast_to(np.arange(topology.ranks), carriage.nearest.shape)
    np.add.at(matrix, (readers, carriage.nearest), arriving)
    return matrix


def compare_placements(
    old: RowLocator, new: RowLocator, profile: Profile, memory_bytes: Ints
) -> tuple[int, Floats]:
    """Rows that the new placement brings to ranks that did not hold them, and the memory bytes of
    rows by old and new column, float64 [K, K']; `memory_bytes` [T] is a row's of each table."""
    shape = (len(old.groups), len(new.groups))
    arrives = (~old.groups.holds).astype(int) @ new.groups.holds.T.astype(int) > 0
    moved_rows, moved_bytes = 0, np.zeros(shape)
    for table in range(len(profile.tables)):
        for before, after in zip(old.chunks(table), new.chunks(table), strict=True):
            cell = old.column[before.place] * shape[1] + new.column[after.place]
            rows = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)
            moved_rows += int(rows[arrives].sum())
            moved_bytes += rows * float(memory_bytes[table])
    return moved_rows, moved_bytes
