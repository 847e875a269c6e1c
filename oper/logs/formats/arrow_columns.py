"""Arrow columns of Parquet and of texts, as the log's ids, dense values, labels and times."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.logs.batches.batch import Batch, Jagged, Location
from oper.logs.batches.columns import Column, Selection
from oper.logs.batches.number_texts import NumberTexts
from oper.logs.batches.text_numbers import all_decimals, decimals, hexadecimals
from oper.logs.batches.timestamps import is_text, times_of

# An id may be as long as a field in Python's CSV reader: hashing a longer one would take seconds.
_MOST_TEXT_BYTES = 131_072
_WHOLE = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)
_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def column_of(field: Any, bags: bool = False) -> Column:
    """Return the column as which an Arrow field is read by default."""
    kind = field.type
    bags_of_list = is_list(kind)
    inner = kind.value_type if bags_of_list else kind
    if pa.types.is_dictionary(inner):
        inner = inner.value_type
    if pa.types.is_floating(inner) or pa.types.is_decimal(inner):
        role: Any = "other" if bags_of_list else "dense"
        return Column(field.name, role, reason=f"numbers, {kind}", floats=True)
    if pa.types.is_temporal(inner):
        return Column(field.name, "other", reason=f"times, {kind}")
    if pa.types.is_nested(inner):
        return Column(field.name, "other", reason=f"structures, {kind}")
    if not (is_text(inner) or any(is_kind(inner) for is_kind in _WHOLE)):
        return Column(field.name, "other", reason=f"neither whole numbers nor texts, {kind}")
    is_blank = pa.types.is_null(inner)
    return Column(
        field.name, "ids", bags=bags or bags_of_list, texts=bags or is_text(inner), blank=is_blank
    )


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type holds lists of any kind."""
    return any(is_kind(kind) for is_kind in _LISTS)


def holds_bytes(kind: Any) -> bool:
    """Return whether an Arrow type, or that of its values, is bytes that may be texts."""
    while is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) and not any(is_kind(kind) for is_kind in _STRINGS)


def batch_of(
    part: Any,
    selection: Selection,
    location: Location,
    hexadecimal: frozenset[str] = frozenset(),
    numbers: NumberTexts | None = None,
) -> Batch:
    """Return a `pa.RecordBatch` as a batch of the log; `numbers` reads those of a text file."""
    time, plain = None, False
    if selection.time is not None:
        times = part.column(selection.time)
        time, plain = times_of(times, selection.time, location, selection.time_unit)
    return Batch(
        samples=part.num_rows,
        features={
            name: ids_of(part.column(name), name, location, name in hexadecimal, numbers)
            for name in selection.features
        },
        location=location,
        label=(
            None
            if selection.label is None
            else floats_of(part.column(selection.label), selection.label, location)
        ),
        dense=(
            np.stack([floats_of(part.column(n), n, location) for n in selection.dense], axis=1)
            if selection.dense
            else None
        ),
        time=time,
        plain_time=plain,
    )


def ids_of(
    column: Any,
    name: str,
    location: Location,
    hexadecimal: bool = False,
    numbers: NumberTexts | None = None,
) -> Jagged:
    """Return the ids of an Arrow array of integers, texts, whole floats or decimals, or lists of
    them.

    Nulls and empty texts are left out. Unsigned values from 2^63 on become their two's complement,
    and are marked as `unsigned`. Raise OperError if the type or a value cannot be an id.
    """
    kind = column.type
    if is_list(kind):
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            column = column.cast(pa.large_list(kind.value_type))
        lengths = pc.fill_null(column.value_lengths(), 0).to_numpy().astype(np.int32)
        # A bad value is reported at its bag.
        inner = _scalars(column.flatten(), name, location, hexadecimal, lengths, numbers)
        return inner if inner.lengths is not None else replace(inner, lengths=lengths)
    return _scalars(column, name, location, hexadecimal, None, numbers)


def _scalars(
    column: Any,
    name: str,
    location: Location,
    hexadecimal: bool,
    lengths: NDArray[np.int32] | None,
    numbers: NumberTexts | None,
) -> Jagged:
    kind = column.type
    if pa.types.is_dictionary(kind):
        if is_text(kind.value_type):
            return _coded(column, lengths, name, location)
        column, kind = column.dictionary_decode(), kind.value_type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):  # as text files have them
        column, kind = column.cast(pa.string()), pa.string()
    if is_text(kind):
        if not hexadecimal:
            column = _decoded(column, name, location)
        return _texts(column, name, location, hexadecimal, lengths, numbers)
    if pa.types.is_decimal(kind):
        column, kind = _integers_of_decimals(column, name, location, lengths), pa.int64()
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column)
    elif not any(is_kind(kind) for is_kind in _WHOLE):
        raise OperError(
            f"{location.file}: expected integers, texts or lists of them in column {name!r}, got "
            f"{kind}; leave it out with {option('--columns')}, or write it as one of these"
        )
    jagged = _without_nulls(column, lengths)
    values = jagged.values.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        whole = (values == np.floor(values)) & (np.abs(values) < 2.0**53)
        if not whole.all():
            bad = int(np.argmin(whole))
            sample = jagged.sample_of(bad)
            raise OperError(
                f"{location.of(sample)}: expected whole numbers in column {name!r}, got "
                f"{float(values[bad])!r}; leave the column out with {option('--columns')}"
            )
    elif kind == pa.uint64():
        return Jagged(values.view(np.int64), jagged.lengths, unsigned=True)
    return Jagged(values.astype(np.int64, copy=False), jagged.lengths)


def _integers_of_decimals(
    column: Any, name: str, location: Location, lengths: NDArray[np.int32] | None
) -> Any:
    """Return decimals as int64; raise OperError if one is not a whole number of 64 bits."""
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        jagged = _without_nulls(column, lengths)
        values = jagged.values.to_pylist()
        bad = next(i for i, v in enumerate(values) if v != int(v) or not -(2**63) <= v < 2**63)
        raise OperError(
            f"{location.of(jagged.sample_of(bad))}: expected whole numbers of 64 bits in column "
            f"{name!r}, got {values[bad]}; leave the column out with {option('--columns')}"
        ) from error


def _texts(
    column: Any,
    name: str,
    location: Location,
    hexadecimal: bool,
    lengths: NDArray[np.int32] | None,
    numbers: NumberTexts | None,
) -> Jagged:
    """Return the ids of texts: integers if all texts are integers, else a dictionary."""
    if not hexadecimal:  # Hexadecimal digits are from text files, whose empty fields are null.
        sizes = pc.binary_length(column)
        if pc.min(sizes).as_py() == 0:
            column = pc.if_else(pc.equal(sizes, 0), None, column)
    jagged = _without_nulls(column, lengths)
    texts = jagged.values
    if hexadecimal:
        valid, decoded = hexadecimals(texts)
        if not valid.all():
            bad = int(np.argmin(valid))
            raise OperError(
                f"{location.of(jagged.sample_of(bad))}: expected at most 8 hexadecimal digits in "
                f"column {name!r}, got {str(texts[bad])!r}; is this a Criteo log?"
            )
        return Jagged(decoded, jagged.lengths, hexadecimal=True)
    plain = all_decimals(texts)
    if plain is not None:
        return Jagged(plain, jagged.lengths)
    coded = texts.dictionary_encode()
    if numbers is not None:

        def place(number: int) -> str:
            first = int(np.argmax(coded.indices.to_numpy() == number))
            return location.of(jagged.sample_of(first))

        distinct = numbers.read(coded.dictionary, name, place)
        coded = pa.DictionaryArray.from_arrays(coded.indices, distinct)
    return _coded(coded, jagged.lengths, name, location)


def _decoded(texts: Any, name: str, location: Location) -> Any:
    """Return texts of any Arrow type as strings; raise OperError if they are not UTF-8."""
    kind = texts.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return texts
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise OperError(
            f"{location.file}: expected texts in UTF-8 in column {name!r}, got {kind} that is not; "
            f"leave it out with {option('--columns')}, or write it as texts or whole numbers"
        ) from error


def _coded(column: Any, lengths: NDArray[np.int32] | None, name: str, location: Location) -> Jagged:
    """Return the ids of a dictionary of texts: integers if all texts are integers, else the
    dictionary."""
    texts = _decoded(column.dictionary, name, location)
    if texts is not column.dictionary:
        column = pa.DictionaryArray.from_arrays(column.indices, texts)
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if longest > _MOST_TEXT_BYTES:
        raise OperError(
            f"{location.file}: column {name!r} has a text of {longest:,} bytes, and at most "
            f"{_MOST_TEXT_BYTES:,} can be an id; leave it out with {option('--columns')}"
        )
    if texts.null_count or (len(texts) and pc.min(pc.binary_length(texts)).as_py() == 0):
        plain = column.dictionary_decode()
        column = pc.if_else(pc.equal(pc.binary_length(plain), 0), None, plain).dictionary_encode()
        texts = column.dictionary
    texts = texts.cast(pa.string())
    jagged = _without_nulls(column, lengths)
    is_integer, numbers = decimals(texts)
    if is_integer.all():
        return Jagged(numbers[jagged.values.indices.to_numpy()], jagged.lengths)
    # Files may have codes of other widths than 32 bits.
    codes = jagged.values.indices.cast(pa.int32())
    return Jagged(pa.DictionaryArray.from_arrays(codes, texts), jagged.lengths)


def _without_nulls(column: Any, lengths: NDArray[np.int32] | None) -> Jagged:
    if column.null_count == 0:
        return Jagged(column, lengths)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    kept = Jagged(np.empty(len(valid), np.int8), lengths).keep(valid)
    return Jagged(column.filter(pa.array(valid)), kept.lengths)


def floats_of(column: Any, name: str, location: Location) -> NDArray[np.float32]:
    """Return a column of numbers as float32 [samples]; nulls are 0."""
    try:
        values = pc.fill_null(column.cast(pa.float32(), safe=False), 0.0)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise OperError(
            f"{location.file}: column {name!r} of type {column.type} cannot be read as numbers "
            f"({error}); leave it out of {option('--dense')} and {option('--label')}"
        ) from error
    return values.to_numpy(zero_copy_only=False)
