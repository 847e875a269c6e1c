"""Values to rows: hash, decimals and hexadecimals against plain Python, vocabularies, rules."""

import collections
import itertools
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.logs.batches.batch import Jagged, Location
from oper.logs.batches.text_numbers import decimals, hash64, hexadecimals
from oper.logs.row_ids import IdMapper, without
from oper.logs.vocabulary import (
    ValueCounter,
    file_names,
    load_vocabularies,
    ranked,
    save_vocabularies,
    vocabulary_of,
)
from oper.profiling.profile import Profile
from oper.tables.table import IdRule, Table
from tests.support.commands import oper

MASK = (1 << 64) - 1
LOCATION = Location("log.csv", 10, "line")

texts = st.lists(st.text(max_size=30) | st.from_regex("-?[0-9]{1,20}", fullmatch=True), max_size=20)
bags = st.lists(st.lists(st.integers(-3, 9), max_size=4), max_size=8)


def fmix64(h: int) -> int:
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & MASK
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return h ^ h >> 33


def reference_hash(text: str) -> int:
    data = text.encode()
    h = fmix64(len(data) * 0x9E3779B97F4A7C15 & MASK)
    for start in range(0, len(data), 8):
        h = fmix64(h ^ int.from_bytes(data[start : start + 8], "little"))
    return h


def reference_integer(text: str) -> int | None:
    if re.fullmatch("-?[0-9]{1,19}", text) and abs(int(text)) < 1 << 63:
        return int(text)
    return None


def jagged(lists: list[list[int]]) -> Jagged:
    values = np.array([v for bag in lists for v in bag], dtype=np.int64)
    return Jagged(values, np.array([len(bag) for bag in lists], dtype=np.int32))


def lists_of(ids: Jagged) -> list[list[int]]:
    ends = ids.offsets()
    return [ids.values[a:b].tolist() for a, b in itertools.pairwise(ends)]


def coded(values: list[str]) -> pa.DictionaryArray:
    return pa.array(values, pa.string()).dictionary_encode()


@given(texts)
def test_hash64_is_the_stated_one(values: list[str]) -> None:
    # A slice of a longer array begins inside Arrow's buffers.
    array = pa.array(["first", *values], pa.string())[1:]
    assert hash64(array).tolist() == [reference_hash(v) for v in values]


def test_hash64_never_changes() -> None:
    """Rows in saved plans depend on these numbers."""
    found = hash64(pa.array(["", "a", "123456789"])).tolist()
    assert found == [0, 0xEF7DF5C0DA8CE366, 0xFDE170C6AC3800A4]


@given(texts)
def test_decimals(values: list[str]) -> None:
    is_integer, integers = decimals(pa.array(values, pa.string()))
    expected = [reference_integer(v) for v in values]
    assert is_integer.tolist() == [e is not None for e in expected]
    assert integers.tolist() == [e for e in expected if e is not None]


@pytest.mark.parametrize(
    "value", ["0x1F", "+1", " 1", "1.0", "1e3", "", "-", "9223372036854775808"]
)
def test_what_is_no_decimal(value: str) -> None:
    assert decimals(pa.array([value]))[0].tolist() == [False]


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=20), st.booleans(), st.booleans())
def test_hexadecimals(numbers: list[int], upper: bool, padded: bool) -> None:
    values = [(f"{n:08x}" if padded else f"{n:x}") for n in numbers]
    values = [v.upper() for v in values] if upper else values
    for kind in (pa.string(), pa.binary()):
        valid, found = hexadecimals(pa.array(values, kind))
        assert valid.all()
        assert found.tolist() == numbers


@pytest.mark.parametrize("value", ["", "123456789", "xyz", "12 4", "-1", "é"])
def test_what_is_no_hexadecimal(value: str) -> None:
    assert hexadecimals(pa.array([value]))[0].tolist() == [False]


@given(bags, st.data())
def test_jagged_against_lists(lists: list[list[int]], data: st.DataObject) -> None:
    ids = jagged(lists)
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    assert lists_of(ids.slice(start, stop)) == lists[start:stop]
    assert lists_of(ids.keep(ids.values >= 0)) == [[v for v in bag if v >= 0] for bag in lists]
    owners = [sample for sample, bag in enumerate(lists) for _ in bag]
    assert [ids.sample_of(i) for i in range(len(owners))] == owners


@given(bags)
def test_missing_values_are_no_ids(lists: list[list[int]]) -> None:
    expected = [[v for v in bag if v != -1] for bag in lists]
    assert lists_of(without(jagged(lists), "-1")) == expected


def test_missing_texts() -> None:
    raw = Jagged(coded(["a", "none", "7", "none", "07"]))
    assert np.diff(without(raw, "none").offsets()).tolist() == [1, 0, 1, 0, 1]
    # 07 is the integer 7, whatever its column's type.
    assert np.diff(without(raw, "7").offsets()).tolist() == [1, 1, 0, 1, 0]


@given(bags, st.integers(1, 6))
def test_dense_skips_and_counts(lists: list[list[int]], rows: int) -> None:
    mapper = IdMapper(Table("t", rows), on_bad_id="skip")
    found = lists_of(mapper.map(jagged(lists), "c", LOCATION))
    expected = [[v for v in bag if 0 <= v < rows] for bag in lists]
    assert found == expected
    assert mapper.skipped == sum(map(len, lists)) - sum(map(len, expected))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (Jagged(np.array([0, 4, 5])), ["line 12", "'c'", "5", "'t'", "5 rows", "at least 6"]),
        (Jagged(np.array([0, -7])), ["line 11", "-7", "missing='-7'"]),
        (jagged([[1], [], [0, 9]]), ["line 12", "9"]),
        (
            Jagged(coded(["1", "b", "2"])),
            ["line 11", "'b'", "vocab", "on_bad_id='skip'"],
        ),
    ],
)
def test_dense_errors(raw: Jagged, words: list[str]) -> None:
    mapper = IdMapper(Table("t", 5), on_bad_id="error")
    with pytest.raises(OperError) as raised:
        mapper.map(raw, "c", LOCATION)
    for word in ["log.csv", *words]:
        assert word in str(raised.value)


def test_texts_that_no_id_has_are_no_errors() -> None:
    """A slice of a dictionary keeps texts that it does not use."""
    mapper = IdMapper(Table("t", 5), on_bad_id="error")
    assert mapper.map(Jagged(coded(["x", "1"]).slice(1)), "c", LOCATION).values.tolist() == [1]


@given(texts, st.integers(1, 1000))
def test_hash_rule_is_the_same_for_texts_and_integers(values: list[str], rows: int) -> None:
    mapper = IdMapper(Table("t", rows, ids=IdRule("hash")))
    expected = []
    for value in values:
        integer = reference_integer(value)
        expected.append((reference_hash(value) if integer is None else integer) % rows)
    found = mapper.map(Jagged(coded(values)), "c", LOCATION).values
    assert found.tolist() == expected
    integers = [v for v in map(reference_integer, values) if v is not None]
    as_integers = mapper.map(Jagged(np.array(integers, np.int64)), "c", LOCATION).values
    assert as_integers.tolist() == [v % rows for v in integers]


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "-3", "7", "07", "é", "10"]), max_size=20)),
    st.lists(st.lists(st.integers(-3, 10), max_size=20)),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_vocabulary_against_a_counter(
    text_batches: list[list[str]],
    integer_batches: list[list[int]],
    min_count: int,
    rows: int,
) -> None:
    counter = ValueCounter()
    expected: collections.Counter[int | str] = collections.Counter()
    for texts_given in text_batches:
        counter.add(Jagged(coded(texts_given)))
        for text in texts_given:
            integer = reference_integer(text)
            expected[text if integer is None else integer] += 1
    for integers_given in integer_batches:
        counter.add(Jagged(np.array(integers_given, dtype=np.int64)))
        expected.update(integers_given)

    def order(item: tuple[int | str, int]) -> tuple[int, bool, int | str]:
        return -item[1], isinstance(item[0], str), item[0]

    kept = sorted(((v, n) for v, n in expected.items() if n >= min_count), key=order)
    kept = kept[: rows - 1] if rows else kept
    content = ranked(counter, min_count, rows)
    assert [str(v) for v in content["value"].to_pylist()] == [str(v) for v, _ in kept]
    assert content["count"].to_pylist() == [n for _, n in kept]
    vocabulary = vocabulary_of(content)
    assert len(vocabulary) == len(kept) + 1

    row_of = {value: row for row, (value, _) in enumerate(kept, start=1)}
    asked: list[str | int] = [*expected, "unseen", 99, -99]
    mapper = IdMapper(Table("t", len(kept) + 1, ids=IdRule("vocab")), vocabulary)
    by_text = mapper.map(Jagged(coded([str(v) for v in asked])), "c", LOCATION).values
    assert by_text.tolist() == [row_of.get(v, 0) for v in asked]
    numbers = [v for v in asked if isinstance(v, int)]
    by_number = mapper.map(Jagged(np.array(numbers, np.int64)), "c", LOCATION).values
    assert by_number.tolist() == [row_of.get(v, 0) for v in numbers]


def test_counts_merge_beyond_the_buffer() -> None:
    counter = ValueCounter()
    rng = np.random.default_rng(1)
    batches = [rng.integers(0, 1 << 19, 1 << 18) for _ in range(8)]
    for batch in batches:
        counter.add(Jagged(batch))
    values, counts = counter.totals("integers")
    order = np.argsort(values.to_numpy())
    expected_values, expected = np.unique(np.concatenate(batches), return_counts=True)
    assert np.array_equal(values.to_numpy()[order], expected_values)
    assert np.array_equal(counts[order], expected)


def test_vocabularies_are_saved_under_safe_names(tmp_path: Path) -> None:
    counter = ValueCounter()
    counter.add(Jagged(np.array([5, 5, 6])))
    content = ranked(counter, 1, 0)
    names = ["a/b", "a_b", "../c"]
    save_vocabularies(tmp_path, dict.fromkeys(names, content))
    assert len(list((tmp_path / "vocab").iterdir())) == 3
    loaded = load_vocabularies(tmp_path, names)
    assert all(loaded[n].equals(content) for n in names)
    (tmp_path / "vocab" / "a_b.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(OperError, match=r"a_b\.parquet"):
        load_vocabularies(tmp_path, names)


def test_files_of_vocabularies_have_names_of_their_own_that_file_systems_take() -> None:
    long = [letter * 10_000 for letter in "aaжж/"] + ["a" * 10_000 + "b", "a" * 247]
    alike = ["a/b", "a_b", "a/b~2", "a?b"]
    short = [f"c{i}" for i in range(3)]
    names = list(dict.fromkeys([*long, *alike, *short]))
    made = file_names(names)
    assert list(made) == names
    assert len(set(made.values())) == len(names)
    assert all(len(file.encode()) <= 255 for file in made.values())
    assert [made[n] for n in ("a/b", "a_b", "a/b~2", "a?b")] == [
        f"{start}.parquet" for start in ("a_b", "a_b~2", "a_b_2", "a_b~3")
    ]
    assert [made[n] for n in short] == [f"{n}.parquet" for n in short]


def test_a_long_name_of_a_column(tmp_path: Path) -> None:
    name = "n" * 10_000
    (tmp_path / "log.csv").write_text(f"{name},b\nx,1\ny,2\n")
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p")
    assert said.status == 0, said
    assert Profile.load(tmp_path / "p").prepared().vocabularies[name].num_rows == 2
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / name)
    assert said.status == 2
    assert "File name too long" in said.errors
    assert "free space" not in said.errors


def test_a_vocabulary_that_is_not_the_tables_own() -> None:
    with pytest.raises(OperError, match="none was given"):
        IdMapper(Table("t", 3, ids=IdRule("vocab")))
    content = pa.table({"value": [4, 5, 6], "count": [1, 1, 1], "row": [1, 2, 3]})
    with pytest.raises(OperError, match="3 rows"):
        IdMapper(Table("t", 3, ids=IdRule("vocab")), vocabulary_of(content))
