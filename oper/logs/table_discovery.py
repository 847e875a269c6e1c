"""Sizes and vocabularies of tables, which must be known before a log can be read as rows.

Without tables, one is inferred for each of the log's features: columns of row ids (integers below
2^31) are dense with rows = largest + 1 over the whole log; texts, Criteo's raw fields and larger
integers get a vocabulary. Given tables without rows get them in the same way.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oper.base.defaults import DIM, DTYPE, OPTIMIZER
from oper.base.errors import OperError, OperNotice, OperWarning
from oper.base.formatting import format_bytes
from oper.base.spoken import option
from oper.logs.batches.columns import match_feature
from oper.logs.log import Log
from oper.logs.odd_values import odd_values
from oper.logs.row_ids import missing_is, without
from oper.logs.suspicious_columns import ALL_DISTINCT, MANY_VALUES, Look, first_look
from oper.logs.vocabulary import (
    ValueCounter,
    digest_of,
    load_vocabularies,
    ranked,
    save_vocabularies,
)
from oper.tables.table import IdRule, Table, VocabularyDigest, check_names, with_missing

# Larger integers are taken for hashes, not rows: a table of 2^31 rows of 64 fp32 is 512 GiB.
_MOST_DENSE_ROWS = 1 << 31


# A column is more likely a time, a number of the sample or a hash than a feature if its table would
# have so many more rows than there are ids, or if most of its rows would be below the smallest id.
# Its beginning may tell as well (suspicious_columns.py).
_MANY_ROWS, _SPARSE = 10_000_000, 100
# A table that is so much larger than the log, from 64 MiB of counters on, is refused if the user
# did not name its column, and else causes a warning.
_REFUSED_ROWS = 1 << 24
_COUNTER_BYTES = 4
_MOST_NAMES = 20  # columns that a notice of left-out columns names


@dataclass(frozen=True)
class Prepared:
    """Tables whose numbers of rows are all known, and vocabularies by table name.

    left_out: the reason of each column of the log that is in no table, unless the user named tables
    or columns.
    """

    tables: tuple[Table, ...]
    vocabularies: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def save_vocabularies(self, folder: Path | str) -> None:
        """Write the vocabularies to `vocab/TABLE.parquet` below `folder`."""
        save_vocabularies(folder, self.vocabularies)

    def vocabulary_start(self, table: str, values: int) -> VocabularyDigest | None:
        """Return the digest of the first values of a table's vocabulary, if that is known."""
        vocabulary = self.vocabularies.get(table)
        return None if vocabulary is None else digest_of(vocabulary, values)

    @classmethod
    def load(cls, tables: Sequence[Table], folder: Path | str | None) -> "Prepared":
        """Read the vocabularies of a profile's or plan's tables from its folder; raise OperError if
        one is not its table's."""
        names = [t.name for t in tables if t.ids.kind == "vocab"]
        if names and folder is None:
            raise OperError(
                f"table {names[0]!r}: its ids need a vocabulary; pass the folder of the profile "
                "or plan it was saved in"
            )
        vocabularies = load_vocabularies(folder, names) if names and folder is not None else {}
        recorded = []
        for table in tables:
            known = table.ids.vocabulary
            digest = digest_of(vocabularies[table.name]) if table.name in vocabularies else None
            if known not in (None, digest):
                raise OperError(
                    f"{folder}: table {table.name!r}: expected the vocabulary of {known.values:,} "
                    "values by which the table was counted, got another one; copy or write the "
                    "folder again"
                )
            recorded.append(replace(table, ids=replace(table.ids, vocabulary=digest)))
        return cls(tuple(recorded), vocabularies)


def numbered_tables(tables: Sequence[Table], prepared: Callable[[], Prepared]) -> tuple[Table, ...]:
    """Return the tables with the digests of their vocabularies. Earlier versions of oper did not
    record these: they are then taken from the vocabularies, if `prepared` can read them."""
    if all(table.ids.vocabulary or table.ids.kind != "vocab" for table in tables):
        return tuple(tables)
    try:
        return prepared().tables
    except OperError:  # for example for a monitor's counts, which have no vocabularies
        return tuple(tables)


def matched(log: Log, tables: Sequence[Table]) -> tuple[tuple[int, str, str], ...]:
    """Return (table's index, its feature, the log's column) for every feature of every table.

    Raise OperError if the log has no column for a feature.
    """
    result = []
    features = dict.fromkeys(log.nameable)  # found at once, however many there are
    for index, table in enumerate(tables):
        for feature in table.columns:
            column = match_feature(feature, features)
            if column is None:
                raise OperError(
                    f"{log.names[0]}: has no ids {feature!r}, which index table {table.name!r}; it "
                    f"has {', '.join(log.features)}: name the column in the table's `features`"
                )
            result.append((index, feature, column))
    return tuple(result)


def prepare(
    log: Log,
    tables: Sequence[Table] | None = None,
    *,
    dim: int = DIM,
    dtype: str = DTYPE,
    optimizer: str = OPTIMIZER,
    min_count: int = 1,
    all_columns: bool = False,
    advance: Callable[[int], None] = lambda samples: None,
) -> Prepared:
    """Complete `tables`, or infer them all, from the whole log.

    The log's missing value becomes part of the rules. `dim`, `dtype`, `optimizer` and `min_count`
    are for inferred tables. `all_columns`: the user did not choose the columns of `tables` either.
    Then an OperWarning names columns that are hardly features, with any rule of ids, and columns of
    times are left out, unless the log's options name its columns. `advance` is called with the
    number of samples read.
    """
    whole = log.whole()
    inferred = tables is None
    all_columns |= inferred
    unnamed = all_columns and not log.options.columns
    if tables is not None:
        if not tables:
            raise OperError("the tables of a log: none were given; pass None to infer them")
        check_names(tables, "the tables of a log")
    if all_columns and not log.features:
        raise log.no_ids()
    if tables is None:
        tables = [
            Table(
                name,
                0,
                dim,
                dtype,
                optimizer,
                ids=IdRule("vocab" if name in log.raw else "dense", min_count),
            )
            for name in log.features
        ]
    # Doubts are of wrong separators and the like, which choosing columns does not mend.
    doubts = log.doubts(_distinct(matched(log, tables)))
    for name, doubt in doubts.items():
        warnings.warn(f"column {name!r}: {doubt}", OperWarning, stacklevel=2)
    completed = with_missing(tables, log.options.missing)
    looks = first_look(whole, {t.name: t.ids.missing for t in completed}) if unnamed else {}
    # --values names the columns too.
    others = {n: look.time for n, look in looks.items() if look.time and not log.options.values}
    tables = _without(completed, others, log)
    findings: dict[str, str] = {}  # why a column is hardly a feature, by its name
    tables = _sized(whole, tables, inferred, looks, findings, advance)
    counters = _counters(whole, tables, advance)
    for name, counter in counters.items():
        odd = odd_values(counter, _MOST_DENSE_ROWS)
        by_default = inferred and name not in log.raw  # has a vocabulary by its values alone
        if odd is None or (odd.kind == "large" and not by_default):
            continue
        columns = [c for i, _, c in matched(log, tables) if tables[i].name == name]
        missing = next(t.ids.missing for t in tables if t.name == name)
        value, place = odd.first(whole.batches(columns, ids_only=True), missing)
        if unnamed and odd.kind == "fraction":
            others[name] = odd.reason(value, place)
        elif unnamed and by_default and odd.kind == "stray" and odd.certain:
            raise OperError(odd.refusal(name, value, place))
        elif doubts.keys().isdisjoint(columns):  # A doubt may explain them.
            warnings.warn(
                f"column {name!r}: {odd.warning(value, place)}", OperWarning, stacklevel=2
            )
    tables = _without(tables, others, log)
    contents = {
        table.name: ranked(counters[table.name], table.ids.min_count, table.rows)
        for table in tables
        if table.ids.kind == "vocab"
    }
    for name, content in contents.items() if unnamed else ():
        ids = pc.sum(content["count"]).as_py() or 0
        if len(content) > max(MANY_VALUES, ALL_DISTINCT * ids):
            findings[name] = (
                f"{len(content):,} of its {ids:,} values are different, and become a table of "
                f"{len(content) + 1:,} rows, nearly all of them read once"
            )
    hashed = {table.name for table in tables if table.ids.kind == "hash"}
    for name, look in looks.items():
        if look.different and name in hashed:
            findings.setdefault(name, _different(look))
        if look.finding:
            findings.setdefault(name, look.finding)
    for name, finding in findings.items():
        warnings.warn(
            f"column {name!r}: {finding}; if it is a time or the number of a sample, leave it out: "
            f"name the columns of ids with {option('--columns')}",
            OperWarning,
            stacklevel=2,
        )
    known = tuple(
        _with_vocabulary(t, contents[t.name]) if t.name in contents else t for t in tables
    )
    return Prepared(known, contents, log.left_out | others if all_columns else {})


def _with_vocabulary(table: Table, content: Any) -> Table:
    """Return the table with its vocabulary's rows and digest; raise OperError if the table has
    already been counted by another vocabulary."""
    digest, before = digest_of(content), table.ids.vocabulary
    if before not in (None, digest):
        raise OperError(
            f"table {table.name!r}: expected its vocabulary of {before.values:,} values, got its "
            "description alone, and the log gives another vocabulary; give the profile or plan "
            "that the tables are of, or its folder"
        )
    rows = table.rows or 1 + digest.values
    return replace(table, rows=rows, ids=replace(table.ids, vocabulary=digest))


def tell_left_out(left_out: Mapping[str, str], stacklevel: int = 3) -> None:
    """Name the columns that are in no table, the first of them with each reason."""
    by_reason: dict[str, list[str]] = {}
    for column, reason in left_out.items():
        by_reason.setdefault(reason, []).append(column or "''")
    if by_reason:
        parts = [f"{_some(columns)} ({reason})" for reason, columns in by_reason.items()]
        warnings.warn(
            f"left out: {_some(parts)}; name the columns of ids with {option('--columns')}",
            OperNotice,
            stacklevel=stacklevel,
        )


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f", … {more:,} more" if more > 0 else "")


def _different(look: Look) -> str:
    return f"nearly all of its first {look.different:,} values are different"


def _sized(
    log: Log,
    tables: Sequence[Table],
    inferred: bool,
    looks: Mapping[str, Look],
    found: dict[str, str],
    advance: Callable[[int], None],
) -> tuple[Table, ...]:
    """Return the tables with numbers of rows for dense ones that lack them; inferred ones may need
    a vocabulary.

    `looks` are those of columns that the user did not name; the reason for which one is hardly a
    feature is added to `found`.
    """
    open_tables = {i for i, t in enumerate(tables) if t.rows == 0 and t.ids.kind == "dense"}
    if not open_tables:
        return tuple(tables)
    columns = [m for m in matched(log, tables) if m[0] in open_tables]
    largest = dict.fromkeys(open_tables, -1)
    smallest = dict.fromkeys(open_tables, _MOST_DENSE_ROWS)
    vocabulary: set[int] = set()
    seen = dict.fromkeys(open_tables, 0)
    samples = 0
    for batch in log.batches(_distinct(columns), ids_only=True):
        for index, _, column in columns:
            ids = without(batch.features[column], tables[index].ids.missing)
            if isinstance(ids.values, pa.DictionaryArray):
                if not inferred:
                    sample = ids.sample_of(0)
                    raise OperError(
                        f"{batch.location.of(sample)}: column {column!r} holds texts; table "
                        f"{tables[index].name!r} with `ids: dense` needs whole numbers: give it "
                        "`ids: vocab`, or `ids: hash` with its rows"
                    )
                vocabulary.add(index)
            elif len(ids.values):
                seen[index] += len(ids.values)
                low, high = ids.bounds()
                if low < 0 and log.options.on_bad_id == "error":
                    bad = int(np.argmin(ids.values))
                    raise OperError(
                        f"{batch.location.of(ids.sample_of(bad))}: expected row ids of at least 0 "
                        f"in column {column!r}, for table {tables[index].name!r}, got {low}; "
                        f"{missing_is(low)} if it stands for a missing id, or give the table "
                        "`ids: vocab`"
                    )
                largest[index] = max(largest[index], high)
                smallest[index] = min(smallest[index], low)
        samples += batch.samples
        advance(batch.samples)
    result = list(tables)
    for index in open_tables:
        table = tables[index]
        if inferred and (index in vocabulary or largest[index] >= _MOST_DENSE_ROWS):
            result[index] = replace(table, ids=replace(table.ids, kind="vocab"))
        else:
            # A table whose ids never occur still gets one row.
            rows = max(1, largest[index] + 1)
            result[index] = replace(table, rows=rows)
            if rows > max(_REFUSED_ROWS, _SPARSE * samples):
                # Columns of bags are not times, nor the samples' numbers.
                if table.name in looks and table.name not in log.bags:
                    _refuse_huge(log.names[0], table.name, rows, samples)
                warnings.warn(
                    f"table {table.name!r}: gets {rows:,} rows, as its largest id is {rows - 1:,}, "
                    f"and {format_bytes(_COUNTER_BYTES * rows)} of counters, and the log has "
                    f"{samples:,} samples; if so many are not meant, correct that id, or pass "
                    f"{option('--ids', 'vocab')}, which counts only the values that occur",
                    OperWarning,
                    stacklevel=3,
                )
                continue
            few = _SPARSE * seen[index] < rows or smallest[index] > rows // 2
            look = looks.get(table.name)
            if look and rows > _MANY_ROWS and few:
                found[table.name] = (
                    f"its {seen[index]:,} ids go from {smallest[index]:,} to {largest[index]:,}, "
                    f"and become a table of {rows:,} rows, most of them unread"
                )
            # A table with fewer rows than that is read again and again later in the log.
            elif look and look.different and rows > ALL_DISTINCT * seen[index]:
                found[table.name] = _different(look)
    return tuple(result)


def _refuse_huge(file: str, column: str, rows: int, samples: int) -> None:
    """Raise OperError for the table of a column that the user did not choose, which would be far
    larger than the log."""
    raise OperError(
        f"{file}: column {column!r} would be a table of {rows:,} rows, as its largest id is "
        f"{rows - 1:,}, and the log has {samples:,} samples; if it is a time or the number of a "
        f"sample, name the columns of ids without it with {option('--columns')}, and with it if "
        f"its values are row ids; {option('--ids', 'vocab')} counts only the values that occur"
    )


def _distinct(columns: Sequence[tuple[int, str, str]]) -> list[str]:
    return list(dict.fromkeys(column for _, _, column in columns))


def _without(tables: Sequence[Table], left_out: Mapping[str, str], log: Log) -> tuple[Table, ...]:
    """Return the tables whose columns are not left out; raise OperError if there are none."""
    kept = tuple(table for table in tables if table.name not in left_out)
    if not kept:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in left_out.items())
        raise OperError(
            f"{log.names[0]}: expected a column of ids, got only columns that are left out: "
            f"{reasons}; name the columns of ids with {option('--columns')}"
        )
    return kept


def _counters(
    log: Log, tables: Sequence[Table], advance: Callable[[int], None]
) -> dict[str, ValueCounter]:
    """Return the counts of the values of each table that has a vocabulary, by its name; of tables
    of hashes whose columns may hold texts, those of the first batch."""
    counters = {table.name: ValueCounter() for table in tables if table.ids.kind == "vocab"}
    hashed = {t.name for t in tables if t.ids.kind == "hash"}
    for names, batches in ((set(counters), None), (hashed, 1)):
        columns = [m for m in matched(log, tables) if tables[m[0]].name in names]
        if batches:
            columns = [m for m in columns if m[2] in log.texts]
        if not columns:
            continue
        for batch in islice(log.batches(_distinct(columns), ids_only=True), batches):
            for index, _, column in columns:
                table = tables[index]
                counter = counters.setdefault(table.name, ValueCounter())
                counter.add(without(batch.features[column], table.ids.missing))
            if not batches:
                advance(batch.samples)
    return counters
