"""JSON is written for people too: what holds objects on lines of its own, and numbers on one."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from oper.files.json_file import (
    canonical_json,
    parse_json,
    read_json,
    with_matrix_texts,
    write_json,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
)


@given(VALUES)
def test_what_is_written_is_what_is_read(tmp_path_factory: Any, content: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "content.json"
    write_json(path, content)
    assert json.loads(path.read_text(encoding="utf-8")) == content


def test_objects_are_indented_and_numbers_are_not(tmp_path: Path) -> None:
    content = {"tables": [{"name": "a", "rows": [1, 2]}, {"name": "b"}], "matrix": [[1, 2], [3]]}
    write_json(tmp_path / "c.json", content)
    assert read_json(tmp_path / "c.json") == content
    assert (tmp_path / "c.json").read_text(encoding="utf-8").splitlines() == [
        "{",
        ' "tables": [',
        "  {",
        '   "name": "a",',
        '   "rows": [1, 2]',
        "  },",
        "  {",
        '   "name": "b"',
        "  }",
        " ],",
        ' "matrix": [[1, 2], [3]]',
        "}",
    ]


def test_a_key_twice_among_many_is_found_at_once() -> None:
    keys = [*(f'"{number}": 0' for number in range(100_000)), '"99999": 1']
    begun = time.process_time()
    with pytest.raises(ValueError, match="'99999' twice"):
        parse_json("{" + ", ".join(keys) + "}")
    assert time.process_time() - begun < 5


_FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1e-05, 1e16, 1e22, 5e-324])
_MATRICES = st.lists(
    st.lists(_FLOATS, max_size=3) | st.lists(st.integers(), max_size=2), max_size=3
)
_JSON = st.recursive(
    st.none() | st.integers() | _FLOATS | st.text(max_size=3) | _MATRICES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=3), _JSON, max_size=4))
def test_matrices_are_written_as_python_writes_lists_of_lists(content: dict[str, Any]) -> None:
    canonical = "".join(canonical_json(with_matrix_texts(content)))
    assert canonical == json.dumps(content, sort_keys=True, separators=(",", ":"))


@given(npst.arrays(np.float64, st.tuples(st.integers(0, 4), st.integers(0, 4)), elements=_FLOATS))
def test_arrays_are_written_as_lists(matrix: np.ndarray) -> None:
    text = with_matrix_texts({"a": [{"matrix": matrix, "vector": matrix.ravel()}]})["a"][0]
    assert text["matrix"] == json.dumps(matrix.tolist())
    assert json.dumps(text["vector"]) == json.dumps(matrix.ravel().tolist())
