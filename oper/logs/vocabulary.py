"""Vocabularies: raw value -> row, by descending count, then value; row 0 is every other value.

Row 0 stands for unseen values, for values counted fewer than `min_count` times, and for those
beyond the table's rows. With equal counts, integers come before texts. A vocabulary is saved as
Parquet: `value` (int64, uint64 if the log's integers are unsigned, or text if any value is a text),
`count`, `row`.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError, one_line
from oper.logs.batches.batch import Jagged
from oper.logs.batches.text_numbers import decimals, hash64
from oper.tables.table import VocabularyDigest

_MOST_NAME_BYTES = 255  # Linux takes no longer names of files.


class Vocabulary:
    """The rows of a table's known values; `len` is the number of rows, row 0 included."""

    def __init__(self, integers: Ints, integer_rows: Ints, texts: Any, text_rows: Ints) -> None:
        """Take distinct integers int64 [k] and texts `pa.StringArray` [l], with their rows."""
        order = np.argsort(integers)
        self._integers, self._integer_rows = integers[order], integer_rows[order]
        hashes = hash64(texts)
        order = np.argsort(hashes)
        self._hashes, self._text_rows = hashes[order], text_rows[order]
        self._texts = texts.take(pa.array(order))
        same = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        if len(same):
            one, other = (self._texts[int(same[0]) + i].as_py() for i in (0, 1))
            raise OperError(
                f"the texts {one!r} and {other!r} have the same 64-bit hash, so a vocabulary "
                "cannot tell them apart; rename one in the log"
            )
        self._rows = 1 + len(integers) + len(texts)

    def __len__(self) -> int:
        return self._rows

    def rows_of_integers(self, values: Ints) -> Ints:
        """Return the row of each integer: int64 [n]."""
        return self._look_up(self._integers, self._integer_rows, values)[0]

    def rows_of_texts(self, texts: Any) -> Ints:
        """Return the row of each text (`pa.StringArray` without integers): int64 [n]."""
        rows, position, known = self._look_up(self._hashes, self._text_rows, hash64(texts))
        if known.any():
            # An unseen text may have the hash of a known one, so compare the texts themselves.
            at = np.flatnonzero(known)
            same = pc.equal(texts.take(pa.array(at)), self._texts.take(pa.array(position[at])))
            rows[at[~same.to_numpy(zero_copy_only=False)]] = 0
        return rows

    @staticmethod
    def _look_up(
        keys: NDArray[Any], rows: Ints, values: NDArray[Any]
    ) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        if not len(keys):
            nothing = np.zeros(len(values), np.int64)
            return nothing, nothing, np.zeros(len(values), bool)
        position = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
        known = keys[position] == values
        return np.where(known, rows[position], 0), position, known


class ValueCounter:
    """Counter of the values of one table, in memory proportional to its distinct values."""

    def __init__(self) -> None:
        self.unsigned = False  # integers are the two's complement of unsigned ones
        self._parts: dict[str, list[Any]] = {"integers": [], "texts": []}
        self._merged = {"integers": 0, "texts": 0}
        self._pending = {"integers": 0, "texts": 0}

    def add(self, ids: Jagged) -> None:
        """Count a batch's values: int64, or a dictionary of texts without nulls."""
        values = ids.values
        self.unsigned |= ids.unsigned
        if not isinstance(values, pa.DictionaryArray):
            counted = pc.value_counts(pa.array(values))
            self._append("integers", counted.field("values"), counted.field("counts"))
            return
        counts = np.bincount(values.indices.to_numpy(), minlength=len(values.dictionary))
        is_integer, integers = decimals(values.dictionary)
        self._append("integers", pa.array(integers), pa.array(counts[is_integer]))
        text = pa.array(~is_integer)
        self._append("texts", values.dictionary.filter(text), pa.array(counts[~is_integer]))

    def totals(self, which: str) -> tuple[Any, NDArray[np.int64]]:
        """Return the distinct values and the count of each, of "integers" or "texts"."""
        self._merge(which)
        if not self._parts[which]:
            kind = pa.int64() if which == "integers" else pa.string()
            return pa.array([], kind), np.empty(0, np.int64)
        table = self._parts[which][0]
        return table["value"].combine_chunks(), table["count"].to_numpy()

    def _append(self, which: str, values: Any, counts: Any) -> None:
        seen = counts.cast(pa.int64())
        used = pc.greater(seen, 0)
        part = pa.table({"value": values, "count": seen}).filter(used)
        if not len(part):
            return
        self._parts[which].append(part)
        self._pending[which] += len(part)
        # Merging once the pending part is as large as the merged one is amortised O(1) a value;
        # 2^20 keeps small vocabularies from merging in every batch.
        if self._pending[which] > max(1 << 20, self._merged[which]):
            self._merge(which)

    def _merge(self, which: str) -> None:
        if not self._pending[which]:
            return
        parts = pa.concat_tables(self._parts[which])
        summed = parts.group_by("value").aggregate([("count", "sum")])
        summed = summed.rename_columns(["value", "count"]).combine_chunks()
        self._parts[which], self._merged[which] = [summed], len(summed)
        self._pending[which] = 0


def ranked(counter: ValueCounter, min_count: int, rows: int) -> Any:
    """Return the vocabulary as an Arrow table: value, count, row; at most `rows` − 1 values, 0:
    all."""
    integers, integer_counts = counter.totals("integers")
    texts, text_counts = counter.totals("texts")
    order = pc.sort_indices(texts)
    texts, text_counts = texts.take(order), text_counts[order.to_numpy()]
    numbers = integers.to_numpy()
    if counter.unsigned and not len(texts):
        numbers = numbers.view(np.uint64)
    by_value = np.argsort(numbers)
    counts = np.concatenate([integer_counts[by_value], text_counts])
    kept = np.flatnonzero(counts >= min_count)
    best = kept[np.argsort(-counts[kept], kind="stable")]
    best = best[: rows - 1] if rows else best
    value = pa.array(numbers[by_value])
    if len(texts):
        value = pa.concat_arrays([value.cast(pa.string()), texts.cast(pa.string())])
    return pa.table(
        {
            "value": value.take(pa.array(best)),
            "count": pa.array(counts[best]),
            "row": pa.array(np.arange(1, len(best) + 1)),
        }
    )


def vocabulary_of(content: Any) -> Vocabulary:
    """Return the vocabulary of an Arrow table that `ranked` made."""
    value = content["value"].combine_chunks()
    rows = content["row"].to_numpy()
    if value.type in (pa.int64(), pa.uint64()):
        nothing = pa.array([], pa.string())
        return Vocabulary(value.to_numpy().view(np.int64), rows, nothing, np.empty(0, np.int64))
    is_integer, integers = decimals(value)
    texts = value.filter(pa.array(~is_integer))
    return Vocabulary(integers, rows[is_integer], texts, rows[~is_integer])


def digest_of(content: Any, values: int | None = None) -> VocabularyDigest:
    """Return the digest of a vocabulary, or of its first `values` values.

    The digest is of the values' lengths in bytes and of their text, because a vocabulary of whole
    numbers holds them as texts once it gets a text; unsigned ones are signed there.
    """
    column = content["value"].slice(0, values).combine_chunks()
    signed = column.view(pa.int64()) if column.type == pa.uint64() else column
    texts = signed.cast(pa.large_string())
    digest = hashlib.sha256(pc.binary_length(texts).to_numpy().astype("<i8").tobytes())
    _, ends, data = texts.buffers()
    if data is not None and len(texts):
        bounds = np.frombuffer(ends, "<i8")
        digest.update(memoryview(data)[bounds[texts.offset] : bounds[texts.offset + len(texts)]])
    return VocabularyDigest(len(texts), digest.hexdigest())


def file_names(tables: Sequence[str]) -> dict[str, str]:
    """Return the file name of each table's vocabulary, by the table's name, made safe for a file
    system."""
    result: dict[str, str] = {}
    taken: set[str] = set()
    # Number of tables so far whose safe name is this one.
    numbers: Counter[str] = Counter()
    for name in tables:
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".") or "_"
        safe = _shortened(safe, ".parquet")
        while name not in result:
            numbers[safe] += 1
            end = f"~{numbers[safe]}.parquet" if numbers[safe] > 1 else ".parquet"
            if (candidate := _shortened(safe, end) + end) not in taken:
                result[name] = candidate
        taken.add(result[name])
    return result


def _shortened(start: str, end: str) -> str:
    """Return the start of a file's name, so that there is room for its end."""
    return start.encode()[: _MOST_NAME_BYTES - len(end)].decode("utf-8", "ignore")


def save_vocabularies(folder: Path | str, contents: dict[str, Any]) -> None:
    """Write `vocab/TABLE.parquet` for each table that has one, below a folder that is being
    written."""
    inside = Path(folder) / "vocab"
    if contents:
        inside.mkdir(parents=True, exist_ok=True)
    for name, file in file_names(list(contents)).items():
        pq.write_table(contents[name], inside / file, compression="zstd")


def load_vocabularies(folder: Path | str, tables: Sequence[str]) -> dict[str, Any]:
    """Read the vocabularies that `save_vocabularies` wrote for the same tables, in the same
    order."""
    contents = {}
    for name, file in file_names(tables).items():
        path = Path(folder) / "vocab" / file
        try:
            content = pq.read_table(path)
            names = content.column_names  # This fails if damage made one of them not a text.
        except FileNotFoundError as error:
            raise OperError(
                f"{path}: is missing; table {name!r} needs its vocabulary: copy or write it again"
            ) from error
        except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
            raise OperError(
                f"{path}: is not a readable vocabulary ({one_line(error)}); copy or write it again"
            ) from error
        if names != ["value", "count", "row"]:
            raise OperError(
                f"{path}: expected the columns value, count and row, got {', '.join(names)}"
            )
        types = [content.schema.field(n).type for n in ("count", "row")]
        rows = content["row"]
        if (
            types != [pa.int64(), pa.int64()]
            or content["value"].type not in (pa.int64(), pa.uint64(), pa.string())
            or any(column.null_count for column in content.columns)
            or not np.array_equal(rows.to_numpy(), np.arange(1, len(rows) + 1))
            or pc.count_distinct(content["value"]).as_py() != len(rows)
        ):
            raise OperError(
                f"{path}: is no vocabulary of distinct values for rows 1 to {len(rows):,}; it was "
                "changed: copy or write it again"
            )
        contents[name] = content
    return contents
