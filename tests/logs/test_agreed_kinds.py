"""A column whose files store it in different types is read alike, or refused."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.logs import LogOptions, open_log
from oper.profiling.profile import Profile
from tests.support.commands import oper


def _decimals(values: list[int]) -> Any:
    return pa.array([Decimal(value) for value in values], pa.decimal128(20, 0))


ARRAYS: dict[str, Callable[[list[int]], Any]] = {
    "int8": lambda values: pa.array(values, pa.int8()),
    "int64": lambda values: pa.array(values, pa.int64()),
    "uint16": lambda values: pa.array(values, pa.uint16()),
    "text": lambda values: pa.array([str(value) for value in values], pa.string()),
    "float": lambda values: pa.array([float(value) for value in values], pa.float32()),
    "double": lambda values: pa.array([*map(float, values), None], pa.float64()),
    "decimal": _decimals,
    "list": lambda values: pa.array([values], pa.list_(pa.int64())),
    "doubles": lambda values: pa.array([[*map(float, values)]], pa.list_(pa.float64())),
    "null": lambda values: pa.nulls(len(values)),
}
INTEGERS = ("int8", "int64", "uint16", "text", "list")
FLOATS = ("float", "double", "decimal")
_VALUES = st.lists(st.integers(0, 99), min_size=1, max_size=5)
_FILE = st.tuples(st.sampled_from(sorted(ARRAYS)), _VALUES)


def write(folder: Path, number: int, column: Any) -> None:
    folder.mkdir(exist_ok=True)
    table = pa.table({"a": column, "other": range(len(column))})
    pq.write_table(table, folder / f"{number}.parquet")


def ids(folder: Path) -> list[int]:
    arrays = (batch.features["a"].values for batch in open_log(folder).batches())
    return [int(value) for array in arrays for value in pa.array(array).to_pylist()]


@given(st.tuples(st.sampled_from(INTEGERS), _VALUES), st.lists(_FILE, max_size=3), st.data())
def test_whole_numbers_of_any_type_are_the_same_ids(
    tmp_path_factory: pytest.TempPathFactory,
    integers: tuple[str, list[int]],
    others: list[tuple[str, list[int]]],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("log")
    files = data.draw(st.permutations([integers, *others]))
    for number, (kind, values) in enumerate(files):
        write(folder, number, ARRAYS[kind](values))
    assert ids(folder) == [v for kind, values in files if kind != "null" for v in values]


@given(st.lists(st.tuples(st.sampled_from(FLOATS), _VALUES), min_size=1, max_size=3))
def test_floats_alone_stay_numbers(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    for number, (kind, values) in enumerate(files):
        write(folder, number, ARRAYS[kind](values))
    write(folder, len(files), pa.nulls(2))
    log = open_log(folder)
    assert (log.features, log.dense) == (("other",), ("a",))
    found = np.concatenate([np.asarray(batch.dense)[:, 0] for batch in log.batches()])
    assert sorted(found[found > 0]) == sorted(v for _, values in files for v in values if v)


@pytest.mark.parametrize("first", [True, False])
def test_a_fraction_at_the_beginning_makes_the_files_differ(tmp_path: Path, first: bool) -> None:
    write(tmp_path, 1 - first, pa.array([1.0, 2.5]))
    write(tmp_path, int(first), pa.array([1, 2]))
    with pytest.raises(OperError, match=r"other columns.*'a': .*numbers, double.*`dense`"):
        open_log(tmp_path)
    log = open_log(tmp_path, LogOptions(dense=("a",)))
    assert sum(float(np.asarray(batch.dense).sum()) for batch in log.batches()) == 6.5


def test_a_fraction_further_on_ends_the_reading(tmp_path: Path) -> None:
    write(tmp_path, 0, pa.array([1, 2]))
    write(tmp_path, 1, pa.array([*np.zeros(5000), 2.5]))
    with pytest.raises(
        OperError, match=r"1\.parquet, row 5000: expected whole numbers in column 'a', got 2\.5"
    ):
        ids(tmp_path)


def test_other_files_of_text(tmp_path: Path) -> None:
    """A line of names alone, as Spark writes it for a part without samples, decides nothing."""
    for name, text in {"1": "", "2": "5,0.5\n", "3": "6.0,1.5\n,2.5\n"}.items():
        (tmp_path / f"{name}.csv").write_text(f"a,b\n{text}")
    log = open_log(tmp_path)
    assert (log.features, log.dense) == (("a",), ("b",))
    assert ids(tmp_path) == [5, 6]
    (tmp_path / "3.csv").write_text("a,b\n6.5,1.5\n")
    with pytest.raises(OperError, match="'6\\.5' in line 2"):
        open_log(tmp_path)


def test_json_lines(tmp_path: Path) -> None:
    for number, value in enumerate(("5", "6.0", "null")):
        (tmp_path / f"{number}.jsonl").write_text(f'{{"a": {value}}}\n')
    assert ids(tmp_path) == [5, 6]


def test_a_profile_of_such_files_equals_that_of_integers(tmp_path: Path) -> None:
    for name, arrays in {"one": ("int64", "int64"), "two": ("double", "int8")}.items():
        for number, kind in enumerate(arrays):
            write(tmp_path / name, number, ARRAYS[kind]([3, 1, 3]))
        said = oper("profile", tmp_path / name, "-o", tmp_path / f"{name}.p", "--columns", "a")
        assert said.status == 0, said
    one, two = (Profile.load(tmp_path / f"{name}.p") for name in ("one", "two"))
    assert one.accesses.tolist() == two.accesses.tolist() == [0, 2, 0, 4]
