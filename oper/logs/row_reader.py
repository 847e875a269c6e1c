"""A log as batches of row ids, by the rules that a profile or plan carries."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from oper.logs.batches.batch import Batch, Jagged, concatenate
from oper.logs.batches.log_options import LogKeywords, LogOptions
from oper.logs.log import Log, open_log
from oper.logs.row_ids import IdMapper
from oper.logs.table_discovery import Prepared, matched, prepare, tell_left_out
from oper.logs.vocabulary import vocabulary_of
from oper.tables.table import Table, with_missing


class RowReader:
    """Reader of a log as row ids of `prepared.tables`.

    The features of batches are keyed by the tables' features, in the order of the tables; by
    FEATURE@TABLE if several tables share a feature, as in TorchRec.
    """

    def __init__(self, log: Log, prepared: Prepared) -> None:
        self.tables = prepared.tables
        self._log = log
        self._mappers = [
            IdMapper(
                table,
                vocabulary_of(prepared.vocabularies[table.name])
                if table.name in prepared.vocabularies
                else None,
                log.options.on_bad_id,
            )
            # Rules without a missing value take that of the options.
            for table in with_missing(prepared.tables, log.options.missing)
        ]
        matches = matched(log, prepared.tables)
        readers = Counter(feature for _, feature, _ in matches)
        self._columns = {
            feature if readers[feature] == 1 else f"{feature}@{prepared.tables[index].name}": (
                index,
                column,
            )
            for index, feature, column in matches
        }

    @property
    def tables_of(self) -> dict[str, int]:
        """Key of a batch's features -> index of the table whose rows it holds."""
        return {key: index for key, (index, _) in self._columns.items()}

    @property
    def bagged(self) -> tuple[bool, ...]:
        """Per table, True if a sample may read several of its rows (bags, or several features)."""
        columns: list[list[str]] = [[] for _ in self.tables]
        for index, column in self._columns.values():
            columns[index].append(column)
        return tuple(len(of) > 1 or any(c in self._log.bags for c in of) for of in columns)

    @property
    def skipped(self) -> dict[str, int]:
        """Table name -> ids skipped so far because it has no such row; only tables with any."""
        return {m.table.name: m.skipped for m in self._mappers if m.skipped}

    def batches(self, batch_size: int | None = None, ids_only: bool = False) -> Iterator[Batch]:
        """Yield batches of row ids, of exactly `batch_size` samples if given (fewer in the last).

        `ids_only` leaves out label and dense values. Raise OperError if an id is not a row of its
        table, unless such ids are skipped.
        """
        mapped = map(self._map, self._log.batches(self._needed(), ids_only))
        return mapped if batch_size is None else _exact(mapped, batch_size)

    def _needed(self) -> list[str]:
        return list(dict.fromkeys(column for _, column in self._columns.values()))

    def _map(self, batch: Batch) -> Batch:
        rows: dict[str, Jagged] = {
            key: self._mappers[index].map(batch.features[column], column, batch.location)
            for key, (index, column) in self._columns.items()
        }
        return replace(batch, features=rows)


def _exact(batches: Iterator[Batch], batch_size: int) -> Iterator[Batch]:
    pending: list[Batch] = []
    held = 0
    for batch in batches:
        pending.append(batch)
        held += batch.samples
        if held < batch_size:
            continue
        joined = concatenate(pending)
        whole = held - held % batch_size
        for start in range(0, whole, batch_size):
            yield joined.slice(start, start + batch_size)
        pending = [joined.slice(whole, held)] if whole < held else []
        held -= whole
    if held:
        yield concatenate(pending)


def read(
    paths: Any,
    tables: Sequence[Table] | None = None,
    *,
    folder: Path | str | None = None,
    batch_size: int | None = None,
    **reading: Unpack[LogKeywords],
) -> Iterator[Batch]:
    """Yield batches of row ids of a log, ready for training (`Batch.to_kjt`).

    Args:
        paths: files of the log or folders of them, in order; or batches of `KeyedJaggedTensor`s.
        tables: the tables of a plan or profile. None: one for each column of ids, as inferred by
            `oper profile`.
        folder: the folder of the plan or profile, with the vocabularies. None: missing numbers of
            rows and vocabularies are taken from the log.
        batch_size: samples of each batch except the last; None: the reader's batches.
        reading: how to read the log, by the names of the commands' options: columns, rows,
            missing, label and others.

    Raises:
        OperError: the log is empty or damaged, or an id is not a row of its table.
    """
    log = open_log(paths, LogOptions.of(reading))
    prepared = (
        prepare(log, tables) if tables is None or folder is None else Prepared.load(tables, folder)
    )
    tell_left_out(prepared.left_out)
    return RowReader(log, prepared).batches(batch_size)
