"""Distinct rows that batches read, compared with those of independent samples.

With s_k the share of the samples that contain row k, and samples drawn independently, one of M
ranks touches D_k = 1 − (1 − s_k)^(B/M) and all together U_k = 1 − (1 − s_k)^B of row k in a batch
of B samples (the accesses of the paper's §4.3, deduplicated; drawn without replacement if B is
below the log's samples: oper/cost/expected_reads.py). In a log's own order equal ids are close
together and batches read fewer rows. Reading the log in batches of B, cut into M parts of
consecutive samples, gives the ratios

    rank_ratio = mean distinct rows of a rank / Σ_k D_k      union_ratio = the same of all / Σ_k U_k

of each table, which plans multiply D and U by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.base import native
from oper.base.arrays import Floats, as_int64, as_tensor
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.expected_reads import expected_reads
from oper.cost.workload import Workload
from oper.logs.batches.batch import Batch, concatenate
from oper.profiling.counter_arrays import RowCounts


@dataclass(frozen=True)
class Distinct:
    """Measured distinct rows of each table [T], over `batches` batches of `batch_size` samples.

    Ratios are measured / expected; `rank_rows` and `union_rows` are the measured means a batch: of
    one rank, and of all ranks together.
    """

    batch_size: int
    ranks: int
    rank_ratio: tuple[float, ...]
    union_ratio: tuple[float, ...]
    batches: int
    rank_rows: tuple[float, ...]
    union_rows: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as JSON holds it."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Distinct":
        """Invert `to_dict`."""
        fields: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in content.items()
        }
        return cls(**fields)


class DistinctSums:
    """Distinct rows of each table, summed over full batches of `batch_size` samples."""

    def __init__(self, batch_size: int, ranks: int, tables: int) -> None:
        self.batch_size = batch_size
        self.ranks = ranks
        self.batches = 0
        self.rank_rows = np.zeros(tables)  # Σ over batches and ranks
        self.union_rows = np.zeros(tables)  # Σ over batches
        self._pending: list[Batch] = []  # samples that do not fill a batch yet
        self._held = 0

    @classmethod
    def of(cls, measured: Sequence[Distinct]) -> "DistinctSums | None":
        """Return the sums of several measurements; None if they differ in batch size or ranks."""
        first = measured[0]
        if any((d.batch_size, d.ranks) != (first.batch_size, first.ranks) for d in measured):
            return None
        sums = cls(first.batch_size, first.ranks, len(first.rank_rows))
        for d in measured:
            sums.batches += d.batches
            sums.rank_rows += d.batches * d.ranks * np.array(d.rank_rows)
            sums.union_rows += d.batches * np.array(d.union_rows)
        return sums

    def add(self, samples: Batch, table_of: Mapping[str, int]) -> None:
        """Take the next samples of the log, row ids by feature."""
        self._pending.append(samples)
        self._held += samples.samples
        if self._held < self.batch_size:
            return
        joined = concatenate(self._pending)
        whole = self._held - self._held % self.batch_size
        for start in range(0, whole, self.batch_size):
            self._add_batch(joined.slice(start, start + self.batch_size), table_of)
        self._pending = [joined.slice(whole, self._held)] if whole < self._held else []
        self._held -= whole

    def _add_batch(self, batch: Batch, table_of: Mapping[str, int]) -> None:
        of_ranks, of_all = native.ops().distinct(
            *tensors(batch, table_of), len(self.rank_rows), batch.samples, self.ranks
        )
        self.batches += 1
        self.rank_rows += of_ranks.numpy()
        self.union_rows += of_all.numpy()

    def against(self, counts: RowCounts) -> Distinct:
        """Return the measurement, with ratios to the figures expected from the counts.

        Raise OperError if the samples did not fill a batch.
        """
        if self.batches == 0:
            raise OperError(
                f"{option('--batch-size', self.batch_size)}: the log, or a part of it that is "
                f"counted by itself, has only {self._held:,} samples, not one full batch; use a "
                "smaller batch, a longer log, or larger windows or held-out parts"
            )
        rank_rows = self.rank_rows / (self.batches * self.ranks)
        union_rows = self.union_rows / self.batches
        rank_expected, union_expected = expected_rows(counts, self.batch_size, self.ranks)
        return Distinct(
            self.batch_size,
            self.ranks,
            _ratios(rank_rows, rank_expected),
            _ratios(union_rows, union_expected),
            self.batches,
            tuple(rank_rows.tolist()),
            tuple(union_rows.tolist()),
        )


def expected_rows(counts: RowCounts, batch_size: int, ranks: int) -> tuple[Floats, Floats]:
    """Return Σ_k D_k and Σ_k U_k of each table, [T] each, from the counters."""
    table, accesses, samples_with_row, rows = counts.histogram()
    workload = Workload("inference", "distinct", batch_size)
    _, touched, union = expected_reads(accesses, samples_with_row, counts.samples, workload, ranks)
    tables = len(counts.tables)
    return (
        np.bincount(table, rows * touched, minlength=tables).astype(np.float64),
        np.bincount(table, rows * union, minlength=tables).astype(np.float64),
    )


def tensors(batch: Batch, table_of: Mapping[str, int]) -> tuple[list[Any], list[Any], Any]:
    """Return a batch as the native kernels take it: by feature, ids, lengths (empty: one id a
    sample) and the table."""
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
