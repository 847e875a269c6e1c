"""Cost of bringing rows from one holder set to another.

In: holder sets of two placements, their rows. Out: `MigrationCost` a byte, `Migration` in all.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot, whole_dot
from oper.cost.holder_sets import HolderSets
from oper.cost.read_charges import Charges
from oper.plan.row_locator import RowLocator, count_rows
from oper.topology.topology import Topology


@dataclass(frozen=True)
class MigrationCost:
    """Cost of bringing a row from one of K holder sets to one of K': every new holder copies it
    from the nearest old one."""

    nearest: Ints  # [K, M] the holder that a rank copies from; the rank itself if it is one
    seconds: Floats  # [K, K'] seconds per byte, summed over the new holders

    @staticmethod
    def of(before: HolderSets, after: HolderSets, topology: Topology) -> "MigrationCost":
        """Return the cost between the columns of two placements."""
        return MigrationCost.by_links(before, after, Charges.of(topology).link_seconds)

    @staticmethod
    def by_links(before: HolderSets, after: HolderSets, links: Floats) -> "MigrationCost":
        """Return the cost by the seconds per byte of each link, [M, M], reader by source; a rank's
        own rows take none."""
        nearest = np.where(before.holds[:, None], links, np.inf).argmin(axis=2)
        link = links[np.arange(len(links)), nearest]
        return MigrationCost(nearest, dot(link, after.holds.T.astype(np.float64)))


@dataclass(frozen=True)
class Migration:
    """Rows and bytes to move from one plan to another. Rows that the old plan does not have are
    placed: there is nothing to copy."""

    rows: int  # that some rank copies from another
    # [M, M], reader by source; from slot to slot of a rank on the diagonal. Where ranks are gone,
    # further columns are those that they had in the old plan.
    bytes_by_link: Floats
    placed_rows: int = 0
    placed_bytes: float = 0.0  # of all their copies

    @property
    def link_bytes(self) -> float:
        """Bytes over links."""
        return float(self.bytes_by_link.sum() - np.trace(self.bytes_by_link))

    def seconds(self, topology: Topology) -> float:
        """Return a rank's mean seconds for its copies, including copies between its own slots."""
        prices = with_gone_ranks(Charges.of(topology).copy_seconds, self.bytes_by_link.shape[1])
        return float((self.bytes_by_link * prices).sum()) / topology.ranks

    @property
    def local_bytes(self) -> float:
        """Bytes from slot to slot of a rank."""
        return float(np.trace(self.bytes_by_link))

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `oper replan --json`, but `seconds`, which depend on the
        topology."""
        return {
            "moved_rows": self.rows,
            "moved_bytes": self.link_bytes,
            "local_bytes": self.local_bytes,
            "bytes_by_link": self.bytes_by_link.tolist(),
            "placed_rows": self.placed_rows,
            "placed_bytes": self.placed_bytes,
        }


def with_gone_ranks(prices: Floats, sources: int) -> Floats:
    """Return the seconds per byte [M, sources] from ranks that are gone as well. No topology has
    their links: a rank reads from them as from the rank that is the dearest for it to read from."""
    gone = np.repeat(prices.max(axis=1, keepdims=True), sources - len(prices), axis=1)
    return np.concatenate([prices, gone], axis=1)


class MovedRows(NamedTuple):
    """Rows that some rank copies from another, and the memory bytes of rows by old and new column,
    [K, K']."""

    rows: int
    bytes: Floats


def link_bytes(
    moved_bytes: Floats, before: HolderSets, after: HolderSets, cost: MigrationCost
) -> NDArray[np.float64]:
    """Return the bytes that each rank copies from each other, [M, M] (reader by source), when rows
    of `moved_bytes[k, l]` in all go from column k of `before` to column l of `after`, as `cost` has
    them go."""
    ranks = before.holds.shape[1]
    matrix = np.zeros((ranks, ranks))
    arriving = np.where(before.holds, 0.0, dot(moved_bytes, after.holds.astype(np.float64)))
    readers = np.broadcast_to(np.arange(ranks), cost.nearest.shape)
    np.add.at(matrix, (readers, cost.nearest), arriving)
    return matrix


def compare_placements(
    old: RowLocator, new: RowLocator, after: HolderSets, memory_bytes: Ints
) -> MovedRows:
    """Return the rows that move between two placements of T tables; `after` are the new placement's
    holder sets, and `memory_bytes` [T] is the memory of a row of each table."""
    shape = (len(old.holder_sets), len(after))
    arrives = whole_dot((~old.holder_sets.holds).astype(int), after.holds.T.astype(int)) > 0
    moved_rows, moved_bytes = 0, np.zeros(shape)
    column_before = old.holder_set_of.astype(np.int32)
    for table in range(len(memory_bytes)):
        rows = np.zeros(shape, dtype=np.int64)
        for then, now in zip(old.chunks(table), new.chunks(table), strict=True):
            count_rows(now, new.holder_set_of, column_before[then.extent], rows)
        moved_rows += int(rows[arrives].sum())
        moved_bytes += rows * float(memory_bytes[table])
    return MovedRows(moved_rows, moved_bytes)
