"""Logs that are made to take time or memory, and values that are shown as they are."""

import gzip
import struct
import time
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import oper
from oper.base.errors import OperError, OperWarning
from oper.logs import LogOptions, open_log, prepare, read
from oper.logs.formats import decompression
from oper.profiling.table_options import TableOptions
from oper.tables.table import IdRule, Table


def refused(
    path: Path, message: str, options: LogOptions | None = None, tables: Any = None
) -> None:
    begun = time.process_time()
    tracemalloc.start()
    with pytest.raises(OperError, match=message) as raised:
        for _ in read(path, tables, **vars(options or LogOptions())):
            pass
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(raised.value)
    assert time.process_time() - begun < 20
    assert most < 1 << 30


def npy(shape: tuple[int, ...], descr: str = "<i8", body: bytes = b"") -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    header += b" " * (-(11 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy((500, 10**9)), "by its header there are 4,000,000,000,128"),
        (npy((-1, 26)), "expected an array of numbers, got"),
        (npy((5, 3), "|V0"), r"got \|V0 of shape"),
        (npy((5, 3), "<M8[s]", bytes(120)), "expected an array of numbers, got"),
        (npy((1, 10**5), "<i8", bytes(8 * 10**5)), "at most 65,536 columns"),
        (npy((), "<i8", bytes(8)), "expected an array of numbers, got"),
        (b"\x93NUMPY\x01\x00\xff\x03" + b"(" * 1023, "not a readable array"),
    ],
)
def test_arrays_whose_headers_are_not_theirs(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    refused(tmp_path / "x.npy", message)


@pytest.mark.parametrize(
    "more",
    [
        {"dense": np.zeros(4, "V0")},
        {"dense": np.array(["a"] * 4)},
        {"labels": np.zeros((4, 2))},
        {"labels": np.zeros(4, "V4")},
    ],
)
def test_dense_values_and_labels_that_are_no_numbers(tmp_path: Path, more: Any) -> None:
    np.savez(tmp_path / "x.npz", sparse=np.zeros((4, 2), int), **more)
    refused(tmp_path / "x.npz", "x.npz, array '(dense|labels)': expected .*, got")


def test_zip_bombs(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, size in (("item", 160_000_000), ("lengths", 1)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(npy((size,)))
                for _ in range(8 * size // (1 << 23) + 1):
                    file.write(bytes(min(1 << 23, 8 * size)))
    options = LogOptions(values=("item",), lengths=("lengths",))
    refused(path, "bytes unpack to 1,2.* or more", options)


def test_gzip_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompression, "MOST_BYTES", 1 << 26)
    lines = b"1,2\n" * (1 << 20)
    with gzip.open(tmp_path / "x.csv.gz", "wb", 6) as file:
        file.write(b"a,b\n")
        for _ in range(40):
            file.write(lines)
    refused(tmp_path / "x.csv.gz", "bytes unpack to", tables=[Table("a", 9), Table("b", 9)])
    (tmp_path / "x.pt.gz").write_bytes(gzip.compress(b"PK" + bytes(1 << 27), 6))
    refused(tmp_path / "x.pt.gz", "bytes unpack to")


def test_lines_without_an_end(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.csv.gz", "wb", 1) as file:
        file.write(b"a,b\n1,")
        for _ in range(100):
            file.write(b"1" * (1 << 20))
    refused(tmp_path / "x.csv.gz", "line 2: is longer than 67,108,864 bytes")
    with gzip.open(tmp_path / "y.csv.gz", "wb", 1) as file:
        for _ in range(100):
            file.write(b"\n" * (1 << 20))
    refused(tmp_path / "y.csv.gz", "not a log in a known format")


def test_fields_that_are_too_long(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1," + "x" * 200_000 + "\n2,y\n")
    refused(tmp_path / "x.csv", "column 'b' has a text of 200,000 bytes, and at most 131,072")
    (tmp_path / "y.csv").write_text("a,b\n1," + "9" * 5_000 + "\n2,y\n")
    dense = [Table("a", 5), Table("b", 5)]
    refused(tmp_path / "y.csv", "line 2: expected .* in column 'b', .*got '999", tables=dense)


def requests() -> tuple[torch.Tensor, ...]:
    return torch.arange(183) % 40, torch.arange(0, 184, 3), torch.full((1, 61), 3)


def test_flipped_bits_of_saved_tensors_are_found(tmp_path: Path) -> None:
    torch.save(requests(), tmp_path / "x.pt")
    content = bytearray((tmp_path / "x.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        tensors = [m for m in archive.infolist() if "/data/" in m.filename]
    for member in tensors:
        # Behind its local header, whose name and padding have lengths of their own.
        at = member.header_offset
        begin = at + 30 + sum(struct.unpack("<HH", content[at + 26 : at + 30]))
        changed = content.copy()
        changed[begin + member.file_size // 2] ^= 1
        (tmp_path / "y.pt").write_bytes(changed)
        refused(tmp_path / "y.pt", "does not have the CRC-32")


def test_saved_tensors_that_are_larger_than_what_is_stored(tmp_path: Path) -> None:
    indices, offsets, lengths = requests()
    torch.save((indices[:1].expand(10**12), offsets, lengths), tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "indices has more elements than are stored")
    torch.save((indices.bool(), offsets, lengths), tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "indices is not a tensor of integers")
    with zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(1000))
    refused(tmp_path / "z.pt", "is compressed")


LARGE = [1, 2**63 + 5, 2**64 - 1]


def test_unsigned_ids_are_shown_as_they_are(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array(LARGE, pa.uint64())}), tmp_path / "x.parquet")
    refused(
        tmp_path / "x.parquet",
        f"row 1: expected ids from 0 to 8 in column 'a', .*got {2**63 + 5};",
        tables=[Table("a", 9)],
    )
    prepared = prepare(open_log(tmp_path / "x.parquet"))
    assert prepared.tables[0].ids.kind == "vocab"
    assert prepared.vocabularies["a"]["value"].to_pylist() == LARGE
    prepared.save_vocabularies(tmp_path)
    options = LogOptions(missing=str(2**64 - 1))
    (batch,) = read(tmp_path / "x.parquet", prepared.tables, folder=tmp_path, **vars(options))
    assert batch.features["a"].values.tolist() == [1, 2]
    np.savez(tmp_path / "x.npz", sparse=np.array([LARGE], np.uint64).T)
    refused(tmp_path / "x.npz", f"in column 'C1', .*got {2**63 + 5}", tables=[Table("C1", 9)])


def test_negative_ids_are_skipped_where_tables_are_inferred(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [3, -7, 2]}), tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", "expected row ids of at least 0")
    counted = oper.profile(tmp_path / "x.parquet", on_bad_id="skip")
    assert counted.accesses.tolist() == [0, 0, 1, 1]


def test_a_missing_value_that_no_column_can_hold(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [3, 7], "s": ["x", "y"]}), tmp_path / "x.parquet")
    only = LogOptions(columns=("a",), missing="x")
    refused(
        tmp_path / "x.parquet",
        "missing='x': expected a whole number, such as -1, because the columns of ids",
        only,
    )
    (batch,) = read(tmp_path / "x.parquet", missing="x")
    assert batch.features["s"].values.tolist() == [1]


def test_a_column_of_times_is_warned_of(tmp_path: Path) -> None:
    ids = np.arange(20_000)
    columns = {"a": ids % 9, "t": [f"2024-{n}" for n in ids], "n": 15_000_000 + ids}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.warns(OperWarning) as warned:
        prepare(open_log(tmp_path / "x.parquet"))
    found = [str(w.message) for w in warned]
    assert len(found) == 2
    assert any("'n'" in text and "15,020,000 rows" in text for text in found)
    assert any("'t'" in text and "20,001 rows" in text for text in found)
    assert all("`columns`" in text for text in found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(open_log(tmp_path / "x.parquet", LogOptions(columns=("a",))))


def test_times_of_a_long_log_are_warned_of(tmp_path: Path) -> None:
    """So many ids that the table's rows are few beside them; but none is below its middle."""
    columns = {"a": np.arange(200_000), "n": 15_000_000 + np.arange(200_000)}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.warns(OperWarning, match=r"'n': its 200,000 ids go from 15,000,000 .*`columns`"):
        prepare(open_log(tmp_path / "x.parquet"))


@pytest.mark.parametrize(("rule", "kind"), [("vocab", "20,001"), ("dense", "16,020,000")])
def test_times_are_warned_of_where_a_rule_was_given(tmp_path: Path, rule: str, kind: str) -> None:
    """--ids says how values become rows, and not that every column is a feature."""
    with open(tmp_path / "log.csv", "w", encoding="utf-8") as file:
        file.write("user,at\n")
        file.writelines(f"{n % 9},{16_000_000 + n}\n" for n in range(20_000))
    log = open_log(tmp_path / "log.csv")
    stated = TableOptions(None, 4, "fp32", "none", rule, 1)
    with pytest.warns(OperWarning, match=f"'at'.* a table of {kind} rows.*`columns`"):
        stated.prepare(log)
    named = open_log(tmp_path / "log.csv", LogOptions(columns=("user",)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stated.prepare(named)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table("a", 1.5), "rows: expected a whole number, got '1.5'"),  # type: ignore[arg-type]
        (lambda: Table("a", True), "rows: expected a whole number, got 'True'"),
        (lambda: Table("a", 5, 2.0), "dim: expected a whole number, got '2.0'"),  # type: ignore[arg-type]
        (lambda: Table("a", 5, 10**30), "1 to 1,048,576"),
        (lambda: Table("a", -1), "expected at least 1 row, got -1"),
        (lambda: Table("a", 0, ids=IdRule("hash")), "expected at least 1 row, got 0"),
        (
            lambda: oper.Workload("training", "raw", 1.5),  # type: ignore[arg-type]
            "batch size: expected a whole number, got '1.5'",
        ),
        (
            lambda: oper.Workload("training", "raw", 10**30),
            "batch size: expected 1 to 1,099,511,627,776 samples, got 1,000",
        ),
        (lambda: oper.profile([], [Table("a", 5)]), "is empty"),
        (lambda: oper.profile([], []), "is empty"),
        (
            lambda: oper.profile([3], [Table("a", 5)]),
            "expected a KeyedJaggedTensor, or a batch that holds some, got int",
        ),
        (
            lambda: oper.Profile(
                (Table("a", 0),), 5, np.zeros(0, np.uint32), np.zeros(0, np.uint32), (False,)
            ),
            "table 'a' has 0 rows",
        ),
        (
            lambda: oper.Profile(
                (Table("a", 2),) * 2, 5, np.ones(4, np.uint32), np.zeros(0, np.uint32), (False,) * 2
            ),
            "two tables are called 'a'",
        ),
    ],
)
def test_arguments_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(OperError, match=message):
        make()


def test_two_tables_of_one_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [3, 7]}), tmp_path / "x.parquet")
    with pytest.raises(OperError, match="two tables are called 'a'"):
        oper.profile(tmp_path / "x.parquet", [Table("a", 9), Table("a", 10)])
    with pytest.raises(OperError, match="none were given"):
        oper.profile(tmp_path / "x.parquet", [])


def test_numpy_numbers_are_taken() -> None:
    table = Table("a", np.int64(5), np.int32(8))  # type: ignore[arg-type]
    assert (table, type(table.rows)) == (Table("a", 5, 8), int)
