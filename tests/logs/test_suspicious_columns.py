"""Times and numbers of samples among the columns of ids are warned of, whatever the rule of ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from tests.support.commands import oper

SAMPLES = 20_000
RULES = [(), ("--ids", "dense"), ("--ids", "vocab"), ("--ids", "hash:100")]
random = np.random.default_rng(0)
seconds = 1_400_000_000 + random.integers(0, 9_000, SAMPLES) * 3_600
DOUBTFUL = {
    "seconds": (seconds, "in seconds since 1970"),
    "milliseconds": (seconds * 1000 + 7, "in milliseconds since 1970"),
    "texts": ([f"2024-01-{d % 28 + 1:02d} 10:00" for d in range(SAMPLES)], "are dates such as"),
    "number": (np.arange(SAMPLES) + 5, "count up, from sample to sample"),
    "shuffled": (random.permutation(SAMPLES), "different"),
    "name": ([f"s{n}" for n in range(SAMPLES)], "different"),
}
PLAIN = {
    "ids": random.integers(0, 9_000, SAMPLES),
    "hashes": random.integers(0, 9_000, SAMPLES) * 477_218 % 2**32,
    "text": [f"t{n % 900}" for n in range(SAMPLES)],
    "years": 2000 + np.arange(SAMPLES) % 25,
}


@pytest.mark.parametrize("name", DOUBTFUL)
@pytest.mark.parametrize("rule", RULES)
def test_columns_that_are_hardly_features(tmp_path: Path, name: str, rule: tuple[str, ...]) -> None:
    values, words = DOUBTFUL[name]
    said = profiled(tmp_path, {"user": PLAIN["ids"], name: values}, rule)
    if said.status == 2:  # too large a table, or texts as row numbers
        assert name in ("seconds", "milliseconds", "texts", "name")
        assert rule in RULES[:2]
        return
    lines = [line for line in said.errors.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1, said.errors
    assert f"column {name!r}" in lines[0]
    assert words in lines[0] or "different" in lines[0]
    chosen = profiled(tmp_path, {"user": PLAIN["ids"], name: values}, (*rule, "--columns", "user"))
    assert (chosen.status, chosen.errors) == (0, "")


@pytest.mark.parametrize("rule", RULES[2:])
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_columns_that_are_features(tmp_path: Path, rule: tuple[str, ...], form: str) -> None:
    said = profiled(tmp_path, PLAIN, rule, form)
    assert (said.status, said.errors) == (0, "")


@pytest.mark.parametrize("rule", RULES)
def test_few_samples_with_times(tmp_path: Path, rule: tuple[str, ...]) -> None:
    said = profiled(tmp_path, {"a": [1] * 12, "at": seconds[:12] * 1000}, rule, "csv")
    assert said.status == 2 or "'at': its first 12 values are dates from 20" in said.errors
    assert (said.status == 2) == (rule == RULES[1])


@pytest.mark.parametrize("rule", RULES[2:])
def test_few_of_a_large_dictionary_and_bags_of_dates(tmp_path: Path, rule: tuple[str, ...]) -> None:
    few = pa.DictionaryArray.from_arrays(
        pa.array(random.integers(0, 500, SAMPLES), pa.int32()),
        pa.array([f"n{n}" for n in range(100_000)]),
    )
    bags = pa.array([[f"2024-01-{d % 28 + 1:02d}", "2024-02-01"] for d in range(SAMPLES)])
    said = profiled(tmp_path, {"few": few, "visits": bags}, rule)
    assert (said.status, said.errors) == (0, "")


def profiled(folder: Path, columns: dict[str, Any], more: tuple[str, ...], form: str = "") -> Any:
    write = pacsv.write_csv if form == "csv" else pq.write_table
    write(pa.table(columns), folder / "log")
    return oper("profile", folder / "log", "-o", folder / "p", "--force", *more)
