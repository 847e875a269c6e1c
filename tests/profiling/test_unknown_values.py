"""Accesses of values that a vocabulary does not know, against a count by hand."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oper
from oper.base.errors import OperNotice
from oper.profiling.profile import Profile, merge
from oper.profiling.profile_summary import summarise
from oper.profiling.unknown_values import tell_unknown_values
from tests.support.examples import examples

values = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30)


@given(values, values)
@examples(20)
def test_unknown_values_are_counted_as_by_hand(
    tmp_path_factory: pytest.TempPathFactory, known: list[str], later: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    for name, column in (("known", known), ("later", later)):
        pq.write_table(pa.table({"f": column, "n": [0] * len(column)}), folder / f"{name}.parquet")
    first = oper.profile(folder / "known.parquet")
    assert isinstance(first, Profile)
    second = oper.profile(folder / "later.parquet", first, folder / "second")
    assert isinstance(second, Profile)
    by_hand = sum(value not in known for value in later)
    expected = {"f": by_hand} if by_hand else {}
    assert first.unknown_accesses == {}
    assert second.unknown_accesses == Profile.load(folder / "second").unknown_accesses == expected
    assert merge([first, second]).unknown_accesses == expected
    assert summarise([second]).to_dict()["unknown_accesses"] == expected


def test_the_share_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"f": ["a", "b", "b"]}), tmp_path / "known.parquet")
    pq.write_table(pa.table({"f": list("aaxby" + 20 * "b")}), tmp_path / "later.parquet")
    first = oper.profile(tmp_path / "known.parquet")
    second = oper.profile(tmp_path / "later.parquet", first)
    assert isinstance(second, Profile)
    assert Counter("aaxby" + 20 * "b").total() == 25
    with pytest.warns(OperNotice, match="8% of accesses are of values .* row 0"):
        tell_unknown_values(second)
