"""Damaged files and impossible requests: each error names the file, the place and the remedy."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import pickle
import socket
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pyarrow import feather, orc
from safetensors.torch import save
from torchrec import KeyedJaggedTensor

from oper.base.errors import OperError
from oper.logs import LogOptions, Prepared, RowReader, open_log, prepare, read
from oper.tables.table import IdRule, Table
from tests.support.examples import examples

JAGGED = LogOptions(values=("item",), lengths=("lengths",))


def complaint(path: Any, *words: str, options: LogOptions | None = None, tables: Any = ()) -> None:
    """Reading must fail with an OperError that has all the words."""
    with pytest.raises(OperError) as raised:
        for _ in read(path, tables or None, **vars(options or LogOptions())):
            pass
    for word in words:
        assert word in str(raised.value), str(raised.value)


def criteo_lines(count: int) -> list[str]:
    return ["\t".join(["1", *["2"] * 13, *["0000abcd"] * 26]) for _ in range(count)]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["log.tsv", "log.csv", "log.parquet", "log.npz", "log.pt", "log"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    complaint(written(tmp_path, name, ""), name, "empty")


def test_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "log.csv", "a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)
    assert len(list(read(".", None))) == 1
    for path in ("", ["log.csv", ""]):
        complaint(path, "path", "is empty")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket", "link"])
def test_what_is_no_regular_file(tmp_path: Path, kind: str, inside: bool) -> None:
    written(tmp_path, "first.csv", "a,b\n1,2\n")
    special = tmp_path / "special"
    if kind == "pipe":
        os.mkfifo(special)  # nobody writes: opening it would not end
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(special))
    else:
        special.symlink_to("absent")
    words = {"pipe": "got a pipe", "socket": "got a socket", "link": "link to a file that is not"}
    complaint(tmp_path if inside else special, "special", words[kind])


def test_devices_and_files_that_only_look_like_some() -> None:
    complaint("/dev/zero", "/dev/zero", "got a device")
    complaint("/proc/self/stat", "/proc/self/stat", "is empty")


def test_no_samples(tmp_path: Path) -> None:
    complaint(written(tmp_path, "header.csv", "a,b\n"), "header.csv", "no samples")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    complaint(tmp_path / "none.parquet", "none.parquet", "no samples")
    complaint([], "is empty")
    (tmp_path / "folder").mkdir()
    complaint(tmp_path / "folder", "folder", "without files")
    complaint(tmp_path / "absent", "absent", "no such file")
    complaint(written(tmp_path, "blank", "\n\n"), "blank")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 499])
@pytest.mark.parametrize("blank", [False, True])
def test_ragged_criteo_lines(tmp_path: Path, packed: bool, bad: int, blank: bool) -> None:
    lines = criteo_lines(500)
    lines[bad] = lines[bad] + "\textra" if bad else lines[bad]
    if not bad:
        lines[3] = "1\t2"
    expected = (bad or 3) + 1
    if blank:
        lines.insert(1, "")
        expected += 1 if expected > 1 else 0
    data = "\n".join(lines).encode()
    path = tmp_path / "train.tsv"
    path.write_bytes(gzip.compress(data) if packed else data)
    complaint(path, "train.tsv", f"line {expected}:", "expected 40 fields, got")


def test_ragged_lines_in_a_later_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oper.logs.formats.text_lines._CHUNK_BYTES", 1000)
    lines = ["a,b", *(f"{i},{i}" for i in range(1000)), "1,2,3", "5,6"]
    complaint(
        written(tmp_path, "log.csv", "\n".join(lines)), "line 1002:", "expected 2 fields, got 3"
    )
    lines[1001] = "4,5"
    assert open_log(tmp_path / "log.csv").count_samples() == 1001 + 1
    lines[1001] = "4,9999"
    path = written(tmp_path, "log.csv", "\n".join(lines))
    complaint(path, "line 1002:", "'b'", "9999", tables=[Table("a", 1000), Table("b", 1000)])


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    lines = criteo_lines(50)
    fields = lines[30].split("\t")
    dense = "\t".join([*fields[:3], "many", *fields[4:]])
    path = written(tmp_path, "train.tsv", "\n".join([*lines[:30], dense, *lines[31:]]))
    hashed = [Table("C1", 10, ids=IdRule("hash"))]
    complaint(path, "line 31:", "'I3'", "'many'", tables=hashed)
    category = "\t".join([*fields[:14], "zebra", *fields[15:]])
    path = written(tmp_path, "train.tsv", "\n".join([*lines[:30], category, *lines[31:]]))
    complaint(path, "line 31:", "'C1'", "'zebra'", "hexadecimal", tables=hashed)
    path = written(tmp_path, "train.tsv", "\n".join(lines))
    complaint(path, "line 1:", "0000abcd", "ids: hash", tables=[Table("C1", 10)])
    path = written(tmp_path, "log.csv", "a\n1\n2\nthree\n")
    complaint(path, "line 4:", "'a'", "'three'", "vocab", tables=[Table("a", 5)])
    complaint(path, "line", "texts", "vocab", tables=[Table("a", 0)])
    pq.write_table(pa.table({"a": [1.0, 2.5]}), tmp_path / "p.parquet")
    complaint(tmp_path / "p.parquet", "row 1:", "2.5", options=LogOptions(columns=("a",)))


@pytest.mark.parametrize(
    ("ids", "words"),
    [([0, 1, 5], ["row 2:", "5", "'t'", "5 rows"]), ([0, -1, 1], ["row 1:", "missing='-1'"])],
)
def test_ids_without_a_row(tmp_path: Path, ids: list[int], words: list[str]) -> None:
    pq.write_table(pa.table({"c": ids}), tmp_path / "p.parquet")
    table = Table("t", 5, features=("c",))
    complaint(tmp_path / "p.parquet", "p.parquet", "'c'", *words, tables=[table])
    log = open_log(tmp_path / "p.parquet", LogOptions(on_bad_id="skip"))
    reader = RowReader(log, prepare(log, [table]))
    assert sum(len(b.features["c"].values) for b in reader.batches()) == 2
    assert reader.skipped == {"t": 1}


def test_missing_holds_for_stated_tables(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": [3, -1]}), tmp_path / "p.parquet")
    log = open_log(tmp_path / "p.parquet", LogOptions(missing="-1"))
    (batch,) = RowReader(log, Prepared((Table("c", 5),))).batches()
    assert batch.features["c"].values.tolist() == [3]


def test_negative_ids_of_an_inferred_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": [3, -1]}), tmp_path / "p.parquet")
    complaint(tmp_path / "p.parquet", "row 1:", "'c'", "-1", "missing='-1'")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"a,b\n1,x\n2,\xff\xfe\n")
    complaint(path, "line 3:", "UTF-8")
    path.write_bytes("user,prénom\n1,x\n".encode("latin-1"))
    complaint(path, "first line is not UTF-8 text; convert the file")
    path.write_bytes(bytes(range(256)) * 10)
    complaint(path, "log.csv")


def compressed_csv(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = "\n".join(f"{a},{b}" for a, b in rng.integers(0, 1 << 30, (20_000, 2)))
    path = folder / "log.csv.gz"
    path.write_bytes(gzip.compress(f"a,b\n{rows}\n".encode()))
    return path


def parquet(folder: Path) -> Path:
    path = folder / "log.parquet"
    rng = np.random.default_rng(0)
    pq.write_table(pa.table({"c": rng.integers(0, 1 << 30, 20_000)}), path, row_group_size=5000)
    return path


def jagged(folder: Path, compressed: bool = False) -> Path:
    path = folder / "log.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, item=np.arange(30_000) % 777, lengths=np.full(10_000, 3))
    return path


def compressed_jagged(folder: Path) -> Path:
    return jagged(folder, compressed=True)


def matrix(folder: Path) -> Path:
    path = folder / "day_0_sparse.npy"
    np.save(path, np.arange(26_000).reshape(1000, 26))
    return path


def request(folder: Path) -> Path:
    torch = pytest.importorskip("torch")
    path = folder / "log.pt"
    lengths = torch.ones((4, 1000), dtype=torch.int64)
    torch.save((torch.arange(4000), torch.arange(4001), lengths), path)
    return path


def packed_request(folder: Path) -> Path:
    path = folder / "log.pt.gz"
    path.write_bytes(gzip.compress(request(folder).read_bytes()))
    return path


SAMPLES: dict[Callable[[Path], Path], int] = {
    compressed_csv: 20_000,
    parquet: 20_000,
    jagged: 10_000,
    compressed_jagged: 10_000,
    matrix: 1000,
    request: 1000,
    packed_request: 1000,
}


@pytest.mark.parametrize("make", SAMPLES)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_truncated_files(tmp_path: Path, make: Callable[[Path], Path], share: float) -> None:
    path = make(tmp_path)
    data = path.read_bytes()
    options = JAGGED if path.suffix == ".npz" else None
    assert sum(b.samples for b in open_log(path, options).batches()) == SAMPLES[make]
    path.write_bytes(data[: int(len(data) * share)])
    complaint(path, path.name, options=options)


@pytest.mark.parametrize("make", SAMPLES)
@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_damaged_files(
    tmp_path: Path, make: Callable[[Path], Path], position: float, flip: int
) -> None:
    """A flipped byte is refused by the file's name, or all samples are read all the same."""
    path = make(tmp_path)
    data = bytearray(path.read_bytes())
    data[int(len(data) * position)] ^= flip
    path.write_bytes(data)
    options = LogOptions(values=JAGGED.values, lengths=JAGGED.lengths, on_bad_id="skip")
    said, samples = "", 0
    try:
        log_options = options if path.suffix == ".npz" else None
        samples = sum(
            batch.samples for batch in read(path, None, **vars(log_options or LogOptions()))
        )
    except OperError as error:
        said = str(error)
    assert path.name in said if said else samples == SAMPLES[make]


def test_a_damaged_array_is_noticed(tmp_path: Path) -> None:
    path = jagged(tmp_path)
    data = bytearray(path.read_bytes())
    data[20_000] ^= 1
    path.write_bytes(data)
    complaint(path, "log.npz", "'item'", options=JAGGED)


def test_a_header_that_is_no_header(tmp_path: Path) -> None:
    path = matrix(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"}", b"{"))
    complaint(path, path.name, "damaged")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"item": [1, 2, 3], "lengths": [1, 3]}, ["sample 1", "'lengths'", "more ids"]),
        ({"item": [1, 2, 3], "lengths": [1, 1]}, ["'item'", "1 ids more"]),
        ({"item": [1, 2, 3], "lengths": [4, -1]}, ["sample 1", "at least 0", "got -1"]),
        ({"item": [1.5, 2, 3], "lengths": [1, 2]}, ["'item'", "float64"]),
        ({"item": [1, 2, 3], "lengths": [[3]]}, ["'lengths'", "(1, 1)"]),
        ({"items": [1, 2, 3], "lengths": [3]}, ["'item'", "items, lengths"]),
    ],
)
def test_jagged_arrays_that_do_not_fit(
    tmp_path: Path, arrays: dict[str, Any], words: list[str]
) -> None:
    np.savez(tmp_path / "log.npz", allow_pickle=False, **arrays)
    complaint(tmp_path / "log.npz", "log.npz", *words, options=JAGGED)


def test_arrays_that_say_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / "log.npz", a=[1], b=[2])
    complaint(tmp_path / "log.npz", "a, b", "`values`")
    np.save(tmp_path / "day_0_sparse.npy", np.zeros((3, 2)))
    complaint(tmp_path / "day_0_sparse.npy", "float64")
    np.save(tmp_path / "day_0_sparse.npy", np.zeros((3, 2), np.int32))
    np.save(tmp_path / "day_0_dense.npy", np.zeros((4, 2), np.float32))
    complaint(tmp_path / "day_0_sparse.npy", "sparse 3", "dense 4")


class Evil:
    def __reduce__(self) -> Any:
        return open, ("owned", "w")


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "log.npz", item=np.array([Evil()], dtype=object), lengths=np.array([1]))
    complaint(tmp_path / "log.npz", "Python objects", options=JAGGED)
    (tmp_path / "log.pt").write_bytes(pickle.dumps(Evil()))
    complaint(tmp_path / "log.pt", "log.pt", "other objects than tensors")
    assert not (tmp_path / "owned").exists()


def test_requests_that_do_not_fit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "log.pt"
    ones = torch.ones((2, 3), dtype=torch.int64)
    for content, word in [
        ({"indices": 1}, "dict"),
        ((torch.arange(6), torch.arange(7), torch.ones(6)), "lengths"),
        ((torch.arange(6), torch.arange(6), ones), "offsets [6]"),
        ((torch.arange(5), torch.arange(7), ones), "5 indices"),
        ((torch.arange(6), torch.arange(7), ones.reshape(-1)), "[tables, batch]"),
    ]:
        torch.save(content, path)
        complaint(path, "log.pt", word)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, "log.csv", "a,b\n1,2\n")
    complaint(path, "`columns` 'C*'", "it has a, b", options=LogOptions(columns=("C*",)))
    complaint(path, "`label` 'y'", options=LogOptions(label="y"))
    complaint(path, "`dense` 'y'", options=LogOptions(dense=("y",)))
    complaint(path, "'c'", "'t'", "a, b", tables=[Table("t", 5, features=("c",))])
    other = written(tmp_path, "other.csv", "a,c\n1,2\n")
    complaint([path, other], "other.csv", "c more, b fewer")
    complaint(written(tmp_path, "twice.csv", "a,a\n1,2\n"), "line 1", "'a'")
    pq.write_table(pa.table({"x": [0.5]}), tmp_path / "p.parquet")
    complaint(tmp_path / "p.parquet", "`columns`", "it has x")


def test_batches_that_are_none() -> None:
    complaint([1, 2], "batch 0", "KeyedJaggedTensor")
    ones = torch.ones(2, dtype=torch.int64)
    values = KeyedJaggedTensor(["a"], torch.tensor([1.7, 2.9]), lengths=ones)
    complaint([values], "batch 0", "expected integers as ids for key 'a', got float32", "integers")
    complaint(7, "int")


@pytest.mark.parametrize(
    ("values", "sizes", "words"),
    [
        (
            [1, 2, 3],
            {"lengths": [1, 9]},
            "batch 1: expected lengths of key 'f' that sum to its 3 ids, got 10",
        ),
        (
            [1, 2, 3],
            {"lengths": [-1, 4]},
            "batch 1, sample 0: expected lengths of at least 0 for key 'f', got -1",
        ),
        (
            [1, 2, 3],
            {"offsets": [0, 4, 3]},
            "batch 1, sample 1: expected lengths of at least 0 for key 'f', got -1",
        ),
        (
            [1, 2, 3],
            {"lengths": [2**32 + 1, 2]},
            "batch 1: expected lengths of key 'f' that sum to its 3 ids, got 4,294",
        ),
        (
            [[1, 2], [3, 4]],
            {"lengths": [1, 1]},
            "batch 1: expected ids in one dimension for key 'f', got shape [2, 2]",
        ),
    ],
)
def test_batches_whose_bags_are_none(
    values: list[Any], sizes: dict[str, list[int]], words: str
) -> None:
    tensors = {name: torch.tensor(given) for name, given in sizes.items()}
    bad = KeyedJaggedTensor(["f"], torch.tensor(values), **tensors)
    good = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    complaint([good, bad], words, tables=[Table("f", 10)])


def test_batches_with_too_few_lengths() -> None:
    odd = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]))
    words = "batch 0: expected a length per sample for each of the 2 keys f, g, got 3 lengths"
    complaint([odd], words, tables=[Table("f", 10)])


@pytest.mark.parametrize(
    "arguments",
    [{"on_bad_id": "drop"}, {"batch_rows": 0}, {"values": ("a",)}, {"rows": "1-2"}],
)
def test_options_that_are_none(arguments: dict[str, Any]) -> None:
    with pytest.raises(OperError):
        LogOptions(**arguments)


def arrow_stream() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema({"a": pa.int64()})) as writer:
        writer.write_table(pa.table({"a": [1, 2]}))
    return bytes(sink.getvalue())


def made_by(write: Callable[[Any], None]) -> bytes:
    sink = pa.BufferOutputStream()
    write(sink)
    return bytes(sink.getvalue())


def archive(*names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name in names:
            file.writestr(name, "a,b\n1,2\n")
    return made.getvalue()


def tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        file.addfile(tarfile.TarInfo("log.csv"))
    return made.getvalue()


def database(folder: Path) -> bytes:
    with contextlib.closing(sqlite3.connect(folder / "database")) as made:
        made.execute("create table t (a)")
        made.commit()
    return (folder / "database").read_bytes()


CSV = b"a,b\n" + b"1,2\n" * 50
# The beginning of TensorBoard's event files: a length of 24, and its masked CRC-32C.
TFRECORD = bytes.fromhex("1800000000000000a37f4b22") + b"\t" + bytes(27)
FOREIGN: dict[str, tuple[str, bytes]] = {
    "zstd": ("unpack", pa.Codec("zstd").compress(CSV, asbytes=True)),
    "lz4": ("unpack", pa.Codec("lz4").compress(CSV, asbytes=True)),
    "bzip2": ("unpack", bz2.compress(CSV)),
    "xz": ("unpack", lzma.compress(CSV)),
    "lzma": ("unpack", lzma.compress(CSV, lzma.FORMAT_ALONE)),
    "tar archive": ("unpack", tar()),
    "a zip archive": ("unpack", archive("log.csv")),
    "Excel (.xlsx)": ("Parquet", archive("[Content_Types].xml", "xl/workbook.xml")),
    "ORC": ("pyarrow.orc", made_by(lambda s: orc.write_table(pa.table({"a": [1]}), s))),
    "Arrow": ("pyarrow.feather", made_by(lambda s: feather.write_feather(pa.table({"a": [1]}), s))),
    "Arrow stream": ("pyarrow.ipc", arrow_stream()),
    "Avro": ("Parquet", b"Obj\x01\x04\x14avro.codec"),
    "HDF5": ("Parquet", b"\x89HDF\r\n\x1a\n" + bytes(8)),
    "TFRecord": ("Parquet", TFRECORD),
    "pickle": ("Parquet", pickle.dumps({"a": [1, 2]})),
    "safetensors": ("Parquet", save({"a": torch.zeros(2)})),
    "UTF-16": ("UTF-8", "a,b\n1,2\n".encode("utf-16")),
    "LIBSVM": ("CSV", b"1 3:1 11:0.5\n-1 4:1\n"),
    "LIBFFM": ("CSV", b"1 0:3:1 1:11:0.5\n0 0:4:1\n"),
    "Vowpal": ("CSV", b"1 |user u5 |item i7\n"),
    "LIBSVM or": ("CSV", b"# made by x\n1\n1,2 qid:3 3:1 11:0.5 # a\n0 qid:3 4:1\n"),
    "Vowpal Wabbit": ("CSV", b"|u 5 |i 7\n|u 6 |i 7\n"),
    "Vowpal Wabbit,": ("CSV", b"1 1.0 tag|u a b:0.5\n0 1.0 tag|u c\n"),
    "Matrix Market": ("CSV", b"%%MatrixMarket matrix coordinate integer general\n3 3 1\n1 2 5\n"),
    "a table for a terminal": ("CSV", b" u | i\n---+---\n 1 | 2\n(1 row)\n"),
    "a table for a terminal,": ("CSV", b"+---+---+\n| u | i |\n+---+---+\n| 1 | 2 |\n+---+---+\n"),
    "Markdown": ("CSV", b"| u | i |\n|---|:-:|\n| 1 | 2 |\n"),
    "INI or TOML": ("CSV", b"[a]\nu = 1\n[b]\nu = 2\n"),
    "YAML": ("JSON", b"- user: 5\n  item: 7\n- user: 6\n  item: 8\n"),
    "YAML,": ("JSON", b"---\nuser: 5\nitem: 7\n---\nuser: 6\nitem: 8\n"),
    "YAML or textproto": ("JSON", b"# proto-file: a.proto\nuser: 5\nitem: 7\n"),
    "textproto": ("JSON", b"sample {\n  user: 5\n  item: 7\n}\n"),
    "textproto,": ("JSON", b'user: 5 item: "a b"\nuser: 6 item: "c"\n'),
    "JSON behind": ("sed", b'2026-01-01T00:00:00Z {"u":5}\n2026-01-01T00:00:01Z {"u": 6}\n'),
    "JSON behind other text": ("sed", b'INFO\t5,{"u": {"v": 1}}\nINFO\t6,{"u": {}}\n'),
    "a JSON text sequence": ("tr -d", b'\x1e{"u":5}\n\x1e{"u":6}\n'),
    "comment": ("remove the comments", b"# made by x\nuser,item\n1,2\n"),
    "a comment": ("remove the comments", b"# made\n# by x\nuser item\n1 2\n"),
    "fixed width": ("delimiter='space'", b"u    i    c\n1    5    New York\n2    6    Rome\n"),
    "XML": ("CSV", b'<rows>\n<r u="1" i="2"/>\n<r u="3" i="4"/>\n</rows>\n'),
    "JSON lines below comments": ("remove", b'// made by x\n{"u": 1}\n{"u": 2}\n'),
    "SAS": ("Parquet", b"HEADER RECORD*******LIBRARY HEADER RECORD!!!!!!!" + b"0" * 32),
    "SQL": ("CSV", b"-- dump\nINSERT INTO t VALUES (1, 2);\n"),
    "HTML": ("download", b"<!DOCTYPE html>\n<html>\n"),
    "LFS": ("git lfs pull", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "Excel": ("first line", b"sep=;\na;b\n1;2\n"),
    "programme": ("no log", b"#!/bin/sh\necho 1,2\n"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_formats_that_are_not_read(tmp_path: Path, name: str, packed: bool) -> None:
    """Each is named, with a remedy, whatever the file is called; also within gzip."""
    remedy, content = FOREIGN[name]
    for file in ("log", "log.csv", "log.parquet"):
        path = tmp_path / file
        path.write_bytes(gzip.compress(content) if packed else content)
        if packed and content[:2] == b"PK":
            complaint(path, file, "within gzip", "unpack")
        elif file == "log.parquet" and name in ("comment", "a comment", "fixed width"):
            complaint(path, "expected Parquet, as its name says, got text")
        else:
            complaint(path, file, name.rstrip(","), remedy)


@pytest.mark.parametrize("ending", [".parquet", ".npy", ".npz", ".pt", ".parquet.gz"])
@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"a": 1}\n', "a\x01é\n" + "1\x01x\n" * 400])
def test_texts_under_the_name_of_another_format(tmp_path: Path, ending: str, text: str) -> None:
    path = tmp_path / f"log{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    complaint(path, "as its name says, got text", f"rename it without {ending.removesuffix('.gz')}")
    path.rename(tmp_path / "log")
    assert sum(b.samples for b in open_log(tmp_path / "log").batches()) in (1, 400)


def test_parquet_under_the_name_of_a_text(tmp_path: Path) -> None:
    log = open_log(parquet(tmp_path).rename(tmp_path / "log.csv"))
    assert sum(b.samples for b in log.batches()) == 20_000


def test_formats_that_are_not_read_from_sqlite_and_torch(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(database(tmp_path))
    complaint(tmp_path / "log", "SQLite", "Parquet")
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.bin")
    complaint(tmp_path / "model.bin", "torch.save", ".pt")


@pytest.mark.parametrize("make", [parquet, matrix, jagged])
def test_binary_logs_within_gzip(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "log.gz").write_bytes(gzip.compress(make(tmp_path).read_bytes()))
    complaint(tmp_path / "log.gz", "within gzip", "unpack it first")


@pytest.mark.parametrize(
    "text",
    ["1,2", "Object,b\n1,2", "LZ,BZh\n1,2", "1:2,3\n4:5,6", "a: b,c: d\n1,2", '5,{""u"":5}',
     "#user,item\n1,2", "# user,item\n1,2", "%a b,c\nx y,z", "a  b,c  d\n1,2\n3,4", "-,b\n1,2"],
)  # fmt: skip
def test_texts_that_only_begin_like_them(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, "log", f"{text}\n")
    assert len(open_log(path, LogOptions(no_header=True)).features) == 2


@pytest.mark.parametrize("scheme", ["s3", "gs", "hdfs", "https", "abfs"])
def test_urls(tmp_path: Path, scheme: str) -> None:
    for path in (f"{scheme}://bucket/log.csv", Path(f"{scheme}://bucket/log.csv")):
        complaint(path, "got a URL", f"{scheme}://", "download")
    complaint("file:///logs/a%20b.csv", "pass /logs/a b.csv")
    folder = tmp_path / "s3:"
    folder.mkdir()
    assert len(list(read(written(folder, "log.csv", "a,b\n1,2\n")))) == 1
