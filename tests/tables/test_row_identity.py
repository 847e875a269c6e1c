"""Rows of equal numbers are the same rows, or are refused."""

import hashlib
import warnings
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError, OperWarning
from oper.logs.vocabulary import digest_of
from oper.tables.row_identity import check_same_rows
from oper.tables.table import IdRule, Table, VocabularyDigest, fingerprint

texts = st.lists(st.text(max_size=4) | st.integers(-99, 99).map(str), max_size=8, unique=True)


def content(values: list[str]) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.string())})


def table(values: list[str], rows: int = 20) -> Table:
    return Table("t", rows, ids=IdRule("vocab", vocabulary=digest_of(content(values))))


@given(texts, texts)
def test_a_vocabulary_is_the_same_or_a_prefix_or_is_refused(old: list[str], new: list[str]) -> None:
    def start(name: str, values: int) -> VocabularyDigest:
        assert name == "t"
        return digest_of(content(new), values)

    def refused(with_start: bool) -> bool:
        try:
            check_same_rows([table(old)], [table(new)], start=start if with_start else None)
        except OperError:
            return True
        return False

    assert refused(with_start=False) == (old != new)
    assert refused(with_start=True) == (old != new[: len(old)])


@given(texts, st.integers(0, 8))
def test_grown_vocabularies_are_accepted(new: list[str], kept: int) -> None:
    old = table(new[:kept])
    check_same_rows([old], [table(new)], start=lambda _, n: digest_of(content(new), n))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8, unique=True))
def test_digests_depend_on_values_and_not_on_their_type(numbers: list[int]) -> None:
    as_text = [str(number) for number in numbers]
    expected = hashlib.sha256(
        b"".join(len(text).to_bytes(8, "little") for text in as_text) + "".join(as_text).encode()
    )
    of_numbers = digest_of(pa.table({"value": pa.array(numbers, pa.int64())}))
    unsigned = pa.array([number % 2**64 for number in numbers], pa.uint64())
    assert of_numbers == VocabularyDigest(len(numbers), expected.hexdigest())
    assert of_numbers == digest_of(content(as_text)) == digest_of(pa.table({"value": unsigned}))


def test_other_rules_of_ids_are_refused() -> None:
    hashed = Table("t", 20, ids=IdRule("hash"))
    check_same_rows([hashed], [hashed])
    with pytest.raises(OperError, match="hashed to 20 rows"):
        check_same_rows([hashed], [replace(hashed, rows=21)])
    with pytest.raises(OperError, match="expected ids: hash"):
        check_same_rows([hashed], [table(["a"])])
    check_same_rows([Table("t", 20)], [table(["a"])])  # ids as they were given
    check_same_rows([Table("u", 20, ids=IdRule("hash"))], [table(["a"])])  # another table


def test_tables_without_a_recorded_vocabulary_are_named() -> None:
    before = Table("t", 20, ids=IdRule("vocab"))
    with pytest.warns(OperWarning, match="table 't': the plan does not record its vocabulary"):
        check_same_rows([before], [table(["a"])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same_rows([table(["a"])], [table(["a"])])


def test_tables_keep_their_vocabulary_in_json_and_fingerprints_leave_it_out() -> None:
    known = table(["a", "b"])
    assert Table.from_dict(known.to_dict()) == known
    plain = replace(known, ids=IdRule("vocab"))
    assert "vocabulary" not in plain.to_dict()["ids"]
    assert fingerprint([known]) == fingerprint([plain])
