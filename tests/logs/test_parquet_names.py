"""Files whose columns have names that are no text are refused, and nothing breaks later."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.base.errors import OperError
from oper.logs import open_log
from oper.logs.vocabulary import load_vocabularies


def test_parquet_with_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"value": [1, 2]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"value", b"va\x80ue"))
    with pytest.raises(OperError, match="is not a readable Parquet file"):
        open_log(path)


def test_vocabulary_with_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "vocab").mkdir()
    path = tmp_path / "vocab" / "C1.parquet"
    content = {"value": ["x"], "count": [3], "row": [1]}
    pq.write_table(pa.table(content), path, store_schema=False)
    assert load_vocabularies(tmp_path, ["C1"])
    path.write_bytes(path.read_bytes().replace(b"value", b"va\x80ue"))
    with pytest.raises(OperError, match="is not a readable vocabulary"):
        load_vocabularies(tmp_path, ["C1"])


def test_arrays_with_line_breaks_in_their_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "log.npz", **dict.fromkeys(("spars\n", "dense"), np.zeros(2)))  # type: ignore[arg-type]
    with pytest.raises(OperError, match=r"holds 'spars\\n', dense; name the arrays") as error:
        open_log(tmp_path / "log.npz")
    assert "\n" not in str(error.value)
