"""YAML that is made to take the reader's time or memory, or that is not what it looks like."""

import time
from pathlib import Path

import pytest

from oper.base.errors import OperError
from oper.files.yaml_file import Document
from oper.tables.table_file import load_tables
from oper.topology.topology import Topology

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "its aliases stand for more than 100,000 values"),
        (MERGES, "its aliases stand for more than 100,000 values"),
        ("a: &a [*a]", "line 1: an anchor holds an alias of itself"),
        ("a: &a {b: *a}", "line 1: an anchor holds an alias of itself"),
        ("[" * 100_000, "nested"),
        ("a: " + "{a: " * 100_000, "nested"),
        ("a: " + "9" * 5_000, "line 1: a number of 5,000 characters"),
        ("a: 0x" + "f" * 5_000, "line 1: a number of 5,002 characters"),
        ("a:\n- " + ":".join(["1"] * 3_000), "line 2: a number of 5,999 characters"),
        ("a: 2001-99-99", "ValueError"),
        ("a: !!timestamp x", "AttributeError"),
        ("a: !!bool x", "KeyError"),
        ("a: !<tag:yaml.org,2002:int> ''", "IndexError"),
        ("a: !!int +", "IndexError"),
        ("a: !!float", "IndexError"),
        ("a: !!int 0x", "ValueError"),
        ("? [a, b]\n: 1", "line 1: expected a name as a key, got a sequence"),
        ('!!python/object/apply:os.system ["true"]', "could not determine a constructor"),
        ("a: 1\na: 2", "'a' is given twice"),
    ],
)
def test_documents_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    begun = time.process_time()
    for read in (Document.read, load_tables, lambda path: Topology.load(str(path))):
        with pytest.raises(OperError, match=message) as raised:
            read(tmp_path / "x.yaml")
        assert "\n" not in str(raised.value)
    assert time.process_time() - begun < 10


def test_anchors_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "- &a {name: a, rows: 4, dim: 8}\n- {<<: *a, name: b}\n- {<<: *a, name: c, dim: 16}\n"
    )
    tables = load_tables(tmp_path / "x.yaml")
    assert [(t.name, t.rows, t.dim) for t in tables] == [("a", 4, 8), ("b", 4, 8), ("c", 4, 16)]


@pytest.mark.parametrize(
    ("key", "rate"),
    [
        (key, rate)
        for key in ("allreduce_bandwidth", "bandwidth", "latency_seconds")
        for rate in ("yes", "true", "no", ".inf", ".nan", "-1", "0", "1.0e-320", "[]")
        if (key, rate) != ("latency_seconds", "0")  # which is none, and fine
    ],
)
def test_bandwidths_that_are_none(tmp_path: Path, key: str, rate: str) -> None:
    values = {"allreduce_bandwidth": "1.0e+9", "bandwidth": "1.0e+9", "latency_seconds": "1.0e-6"}
    values[key] = rate
    values["bandwidth"] = f"{{local: {values['bandwidth']}}}"
    lines = [f"{name}: {value}" for name, value in values.items()]
    (tmp_path / "x.yaml").write_text("\n".join(["node_of: [0]", *lines]))
    with pytest.raises(OperError, match=r"x\.yaml, line"):
        Topology.load(str(tmp_path / "x.yaml"))
