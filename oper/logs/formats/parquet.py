"""Parquet files with one column per feature, scalar or list."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from oper.base.errors import OperError, one_line
from oper.logs.batches.batch import Batch, Location
from oper.logs.batches.columns import Column, KnownSize, Selection
from oper.logs.formats.arrow_columns import batch_of, column_of, holds_bytes, ids_of

_PEEK_ROWS = 1000  # The first bytes of a column tell whether they are texts.
# Arrow raises its own errors, and these if a schema or the size of a page is damaged.
_DAMAGE = (OSError, ValueError, KeyError, MemoryError, OverflowError, pa.ArrowException)


class ParquetSource(KnownSize):
    """One Parquet file, read with the memory of one row group's selected columns."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        with self._open() as file:
            self.samples = file.metadata.num_rows
            self.columns = tuple(self._column(f, file) for f in file.schema_arrow)

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in file order."""
        wanted = [*selection.features, *selection.dense]
        wanted += [c for c in (selection.label, selection.time) if c is not None]
        first = 0
        with self._open() as file:
            parts = file.iter_batches(
                batch_size=selection.batch_rows, columns=list(dict.fromkeys(wanted))
            )
            while True:
                try:
                    part = next(parts, None)
                    if part is None:
                        return
                    batch = batch_of(part, selection, Location(self.name, first))
                except _DAMAGE as error:
                    raise self._damaged(first, error) from error
                yield batch
                first += part.num_rows

    def _column(self, field: Any, file: Any) -> Column:
        """Return the column of a field; bytes are ids only if the first values are texts in UTF-8.

        Some writers store texts as bytes, so only the values tell texts from other bytes.
        """
        column = column_of(field)
        if column.kind != "ids" or not holds_bytes(field.type):
            return column
        try:
            for part in file.iter_batches(batch_size=_PEEK_ROWS, columns=[field.name]):
                ids_of(part.column(0), field.name, Location(self.name))
                break
        except OperError:
            return Column(field.name, "other", reason=f"bytes that are not texts, {field.type}")
        except _DAMAGE as error:
            raise self._damaged(0, error) from error
        return column

    def _damaged(self, first: int, error: Exception) -> OperError:
        return OperError(
            f"{self._path}, after row {first}: is damaged or truncated ({one_line(error)}); copy "
            "or write it again"
        )

    def _open(self) -> Any:
        try:
            file = pq.ParquetFile(self._path, pre_buffer=False)
            file.schema_arrow.names  # noqa: B018  names that are no text show only when asked for
            return file
        except _DAMAGE as error:
            raise OperError(
                f"{self._path}: is not a readable Parquet file ({one_line(error)}); it is "
                "damaged or truncated: copy or write it again"
            ) from error
