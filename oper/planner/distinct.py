"""How many distinct rows batches really read, against what independent samples would.

With s_k the share of the samples that contain row k, and samples drawn independently, one of M
ranks touches D_k = 1 − (1 − s_k)^(B/M) and all together U_k = 1 − (1 − s_k)^B of row k in a batch
of B samples (paper §4.3's accesses, deduplicated; without replacement where B is below the log's
samples: `oper.cost.expected`). In a log's own order ids crowd together and batches read fewer
rows. Walking the log in batches of B, cut into M parts of consecutive samples, gives the ratios

    rank_ratio = mean distinct rows of a rank / Σ_k D_k      union_ratio = the same of all / Σ_k U_k

of each table, by which plans multiply D and U.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oper import native
from oper.cost import Workload, expected
from oper.planner.scan import histogram
from oper.tensors import as_int64, as_tensor

if TYPE_CHECKING:
    from oper.logs.batch import Batch
    from oper.planner.profile import Profile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Distinct:
    """Measured distinct rows per table, over `batches` batches of `batch_size` samples.

    Ratios are measured over expected; `rank_rows` and `union_rows` are the measured means: rows
    one rank reads in a batch, and rows all ranks together read.
    """

    batch_size: int
    ranks: int
    rank_ratio: tuple[float, ...]
    union_ratio: tuple[float, ...]
    batches: int
    rank_rows: tuple[float, ...]
    union_rows: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON holds it."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Distinct":
        """The inverse of `to_dict`."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in content.items()})


@dataclass
class DistinctSums:
    """Distinct rows per table summed over batches, int64 [T]: what measuring accumulates."""

    batch_size: int
    ranks: int
    batches: int
    rank_rows: Floats  # Σ over batches and ranks
    union_rows: Floats  # Σ over batches

    @classmethod
    def zeros(cls, batch_size: int, ranks: int, tables: int) -> "DistinctSums":
        return cls(batch_size, ranks, 0, np.zeros(tables), np.zeros(tables))

    @classmethod
    def of(cls, measured: Sequence[Distinct]) -> "DistinctSums | None":
        """The sums behind several measurements, None where they are not of one batch size."""
        first = measured[0]
        if any((d.batch_size, d.ranks) != (first.batch_size, first.ranks) for d in measured):
            return None
        sums = cls.zeros(first.batch_size, first.ranks, len(first.rank_rows))
        for d in measured:
            sums.batches += d.batches
            sums.rank_rows += d.batches * d.ranks * np.array(d.rank_rows)
            sums.union_rows += d.batches * np.array(d.union_rows)
        return sums

    def add(self, batch: "Batch", table_of: dict[str, int]) -> None:
        """Count one batch of exactly `batch_size` samples of row ids."""
        of_ranks, of_all = native.ops().distinct(
            *tensors(batch, table_of), len(self.rank_rows), batch.samples, self.ranks
        )
        self.batches += 1
        self.rank_rows += of_ranks.numpy()
        self.union_rows += of_all.numpy()

    def against(self, profile: "Profile") -> Distinct:
        """The measurement, its ratios taken against what the profile's counters let expect."""
        rank_rows = self.rank_rows / (self.batches * self.ranks)
        union_rows = self.union_rows / self.batches
        rank_expected, union_expected = expected_rows(profile, self.batch_size, self.ranks)
        return Distinct(
            self.batch_size,
            self.ranks,
            _ratios(rank_rows, rank_expected),
            _ratios(union_rows, union_expected),
            self.batches,
            tuple(rank_rows.tolist()),
            tuple(union_rows.tolist()),
        )


def expected_rows(profile: "Profile", batch_size: int, ranks: int) -> tuple[Floats, Floats]:
    """Σ_k D_k and Σ_k U_k per table, [T] each, from the counters alone."""
    table, accesses, containing, rows = histogram(
        profile.accesses, profile.containing, profile.offsets, profile.containing_offsets
    )
    workload = Workload("inference", "distinct", batch_size)
    _, touched, union = expected(accesses, containing, profile.samples, workload, ranks)
    tables = len(profile.tables)
    return (
        np.bincount(table, rows * touched, minlength=tables),
        np.bincount(table, rows * union, minlength=tables),
    )


def tensors(batch: "Batch", table_of: dict[str, int]) -> tuple[list[Any], list[Any], Any]:
    """A batch as the native kernels take it: ids, lengths (empty: one each), table, by column."""
    features = [batch.features[key] for key in table_of]
    types = {ids.values.dtype for ids in features}
    wanted = types.pop() if types in ({np.dtype(np.int32)}, {np.dtype(np.int64)}) else np.int64
    empty = np.empty(0, dtype=np.int32)
    return (
        [as_tensor(np.asarray(ids.values, dtype=wanted)) for ids in features],
        [as_tensor(empty if ids.lengths is None else ids.lengths) for ids in features],
        as_int64(np.fromiter(table_of.values(), np.int64, len(table_of))),
    )


def _ratios(measured: Floats, predicted: Floats) -> tuple[float, ...]:
    ratio = np.divide(measured, predicted, out=np.ones_like(measured), where=predicted > 0)
    return tuple(ratio.tolist())
