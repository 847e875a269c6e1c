"""One log in every form reads the same."""

import copy
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.logs import LogOptions, Prepared, RowReader, open_log, prepare, read
from oper.logs.vocabulary import digest_of
from oper.tables.table import IdRule, Table
from oper.tables.table_file import load_tables
from tests.support.log_contents import Bags, everything, within_a_function


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


columns = st.lists(
    st.tuples(st.none() | st.integers(-5, 1 << 40), st.none() | st.sampled_from(["x", "yé", "10"])),
    min_size=1,
    max_size=30,
)


@within_a_function
@given(columns, st.integers(1, 7), st.booleans())
def test_csv_and_parquet_read_the_same(
    tmp_path: Path, rows: list[tuple[int | None, str | None]], batch: int, packed: bool
) -> None:
    table = pa.table(
        {
            "a": pa.array([r[0] for r in rows], pa.int64()),
            "b": pa.array([r[1] for r in rows], pa.string()),
        }
    )
    parquet, text = tmp_path / "log.parquet", tmp_path / "log.csv"
    pq.write_table(table, parquet)
    pacsv.write_csv(table, text)
    if packed:
        packed_text = tmp_path / "log.csv.gz"
        packed_text.write_bytes(gzip.compress(text.read_bytes()))
        text = packed_text
    options = LogOptions(columns=("*",), batch_rows=batch)
    tables = [Table("a", 7, ids=IdRule("hash")), Table("b", 7, ids=IdRule("hash"))]
    expected = everything(read(parquet, tables, **vars(options)))
    assert everything(read(text, tables, **vars(options))) == expected
    assert [len(bag) for bag in expected["a"]] == [int(r[0] is not None) for r in rows]
    assert expected["a"] == [[] if r[0] is None else [r[0] % 7] for r in rows]
    assert open_log(text, options).count_samples() == len(rows)


CRITEO = [
    ["1", "5", "", "-2", *["7"] * 10, "68fd1e64", "", "fb936136", *["0000000a"] * 23],
    ["0", *["3"] * 13, "05db9164", "ffffffff", *["0000000b"] * 24],
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_criteo(tmp_path: Path, packed: bool, label: bool, end: str) -> None:
    lines = ["\t".join(line if label else line[1:]) for line in CRITEO]
    data = ((end or "\n").join(lines) + end).encode()
    path = tmp_path / "day_0"
    path.write_bytes(gzip.compress(data) if packed else data)
    log = open_log(path)
    assert log.features == tuple(f"C{i}" for i in range(1, 27))
    assert log.dense == tuple(f"I{i}" for i in range(1, 14))
    assert log.samples is None
    assert log.count_samples() == 2
    (batch,) = log.batches()
    found = everything([batch])
    assert found["C1"] == [[0x68FD1E64], [0x05DB9164]]
    assert found["C2"] == [[], [0xFFFFFFFF]]
    assert batch.dense is not None
    assert batch.dense[0, :3].tolist() == [5, 0, -2]
    assert (None if batch.label is None else batch.label.tolist()) == ([1, 0] if label else None)

    log = open_log(path, LogOptions(columns=("C1", "I*")))
    assert log.features == (*(f"I{i}" for i in range(1, 14)), "C1")
    assert everything(log.batches())["I2"] == [[], [3]]
    # Raw values: the inferred tables have a vocabulary, even of small numbers.
    prepared = prepare(log)
    assert {t.ids.kind for t in prepared.tables} == {"vocab"}
    rows = everything(RowReader(log, prepared).batches())
    assert rows["C1"] == [[2], [1]]  # equal counts: by value
    hashed = everything(read(path, load_tables("criteo-kaggle", ids="hash")))
    assert hashed["C1"] == [[0x68FD1E64 % 1460], [0x05DB9164 % 1460]]


def test_criteo_in_torchrecs_names(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_text("\t".join(CRITEO[1]) + "\n")
    tables = [Table("t", 100, features=("cat_0",), ids=IdRule("hash"))]
    assert everything(read(tmp_path / "day_0", tables)) == {"cat_0": [[0x05DB9164 % 100]]}


def torchrec_form(folder: Path, day: int, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(day)
    arrays = {
        "dense": rng.random((rows, 13), dtype=np.float32),
        "sparse": rng.integers(0, 50, (rows, 26)).astype(np.int32),
        "labels": rng.integers(0, 2, (rows, 1)).astype(np.int32),
    }
    for name, array in arrays.items():
        np.save(folder / f"day_{day}_{name}.npy", array)
    return arrays


def test_torchrecs_preprocessed_form(tmp_path: Path) -> None:
    days = [torchrec_form(tmp_path, day, rows) for day, rows in ((2, 5), (10, 4))]
    log = open_log(tmp_path, LogOptions(batch_rows=3))
    assert log.names[0].endswith("day_2_sparse.npy")
    assert log.samples == 9
    batches = list(log.batches())
    sparse = np.concatenate([d["sparse"] for d in days])
    assert everything(batches)["C26"] == [[v] for v in sparse[:, 25].tolist()]
    dense = np.concatenate([b.dense for b in batches if b.dense is not None])
    assert np.array_equal(dense, np.concatenate([d["dense"] for d in days]))
    labels = np.concatenate([b.label for b in batches if b.label is not None])
    assert np.array_equal(labels, np.concatenate([d["labels"] for d in days])[:, 0])

    as_npz = npz(tmp_path / "day.npz", **days[0])
    assert everything(open_log(as_npz).batches()) == everything(
        open_log(tmp_path / "day_2_sparse.npy").batches()
    )
    dlrm = npz(tmp_path / "dlrm.npz", X_cat=days[0]["sparse"], X_int=days[0]["dense"], y=[1] * 5)
    (batch,) = open_log(dlrm).batches()
    assert batch.label is not None
    assert batch.label.tolist() == [1] * 5


bag_lists = st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=20)


@within_a_function
@given(bag_lists, st.integers(1, 5), st.booleans())
def test_bags_in_every_form(tmp_path: Path, bags: Bags, batch: int, compressed: bool) -> None:
    flat = np.array([v for bag in bags for v in bag], np.int32)
    lengths = np.array([len(bag) for bag in bags], np.int16)
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "jagged.npz", item=flat, lengths=lengths)
    named = LogOptions(values=("item",), lengths=("lengths",), batch_rows=batch)
    log = open_log(tmp_path / "jagged.npz", named)
    assert log.samples == len(bags)
    assert log.bags == {"item"}
    assert everything(log.batches())["item"] == bags

    pq.write_table(pa.table({"item": pa.array(bags, pa.list_(pa.int32()))}), tmp_path / "p.parquet")
    log = open_log(tmp_path / "p.parquet", LogOptions(batch_rows=batch))
    assert log.bags == {"item"}
    assert everything(log.batches())["item"] == bags

    rows = ["item,other", *(f'"[{", ".join(map(str, bag))}]",0' for bag in bags)]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    separated = LogOptions(columns=("item",), list_separator=",", batch_rows=batch)
    log = open_log(tmp_path / "log.csv", separated)
    assert log.bags == {"item"}
    assert everything(log.batches())["item"] == bags


def test_lists_of_texts_and_nulls(tmp_path: Path) -> None:
    bags = [["a", None, "b"], None, [], ["a", ""]]
    pq.write_table(
        pa.table({"item": pa.array(bags, pa.list_(pa.string()))}), tmp_path / "p.parquet"
    )
    log = open_log(tmp_path / "p.parquet")
    assert everything(log.batches())["item"] == [["a", "b"], [], [], ["a"]]
    prepared = prepare(log)
    vocabulary = digest_of(pa.table({"value": ["a", "b"]}))
    assert prepared.tables == (Table("item", 3, ids=IdRule("vocab", vocabulary=vocabulary)),)
    reader = RowReader(log, prepared)
    assert reader.bagged == (True,)
    assert everything(reader.batches())["item"] == [[1, 2], [], [], [1]]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, None, 3], pa.uint8()), [[1], [], [3]]),
        (pa.array([1.0, float("nan"), None]), [[1], [], []]),
        (pa.array([True, False, None]), [[1], [0], []]),
        (pa.array(["x", None, "y"]).dictionary_encode(), [["x"], [], ["y"]]),
        (pa.array(["5", "", "6"]).dictionary_encode(), [[5], [], [6]]),
        (pa.array(["x", "", "y"], pa.large_string()), [["x"], [], ["y"]]),
        (pa.array([[1, 2], [3, 4], None], pa.list_(pa.int64(), 2)), [[1, 2], [3, 4], []]),
        (pa.array([(1 << 64) - 1, 0, None], pa.uint64()), [[-1], [0], []]),
    ],
)
def test_types_of_columns(tmp_path: Path, column: Any, expected: Bags) -> None:
    pq.write_table(pa.table({"c": column}), tmp_path / "p.parquet")
    log = open_log(tmp_path / "p.parquet", LogOptions(columns=("c",)))
    assert everything(log.batches())["c"] == expected


def requests(tables: list[Bags]) -> Any:
    torch = pytest.importorskip("torch")
    lengths = torch.tensor([[len(bag) for bag in bags] for bags in tables])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    indices = torch.tensor([v for bags in tables for bag in bags for v in bag], dtype=torch.int64)
    return indices, ends, lengths


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_fbgemm_requests(tmp_path: Path, packed: bool, legacy: bool) -> None:
    torch = pytest.importorskip("torch")
    tables = [[[1, 2], [], [3]], [[], [4], [5, 6, 7]]]
    path = tmp_path / ("requests.pt.gz" if packed else "requests.pt")
    buffer = io.BytesIO()
    torch.save(requests(tables), buffer, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(gzip.compress(buffer.getvalue()) if packed else buffer.getvalue())
    log = open_log(path, LogOptions(batch_rows=2))
    assert log.samples == 3
    assert everything(log.batches()) == {"t0": tables[0], "t1": tables[1]}
    assert [t.rows for t in prepare(log).tables] == [4, 8]


def test_chosen_tables_of_fbgemm_requests_have_their_own_ids(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tables = [[[1, 2], []], [[], [3]], [[4], [5, 6]]]
    torch.save(requests(tables), tmp_path / "requests.pt")
    for chosen in ([2], [1, 2]):
        columns = tuple(f"t{t}" for t in chosen)
        log = open_log(tmp_path / "requests.pt", LogOptions(columns=columns, batch_rows=1))
        assert everything(log.batches()) == {f"t{t}": tables[t] for t in chosen}


def kjts() -> list[Any]:
    torch = pytest.importorskip("torch")
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    return [
        jagged.KeyedJaggedTensor(
            ["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 0, 1, 1])
        ),
        jagged.KeyedJaggedTensor(["a", "b"], torch.tensor([5]), lengths=torch.tensor([0, 1])),
    ]


def test_batches_of_keyed_jagged_tensors() -> None:
    expected: dict[str, Bags] = {"a": [[1, 2], [], []], "b": [[3], [4], [5]]}
    log = open_log(kjts())
    assert log.count_samples() == 3
    assert everything(log.batches()) == expected
    assert [t.rows for t in prepare(log).tables] == [3, 6]
    once = open_log(iter(kjts()))
    assert everything(once.batches()) == expected
    with pytest.raises(OperError, match="only once"):
        list(once.batches())


class Slotted:
    __slots__ = ("_made", "kept")

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class ByProperty:
    def __init__(self, kept: Any) -> None:
        self._raw = kept

    @property
    def sparse_features(self) -> Any:
        return copy.copy(self._raw[0])


class Loose:
    """Any attributes."""


def test_objects_that_hold_keyed_jagged_tensors() -> None:
    expected: dict[str, Bags] = {"a": [[1, 2], [], []], "b": [[3], [4], [5]]}
    for wrap in (Slotted, lambda kjt: ByProperty([kjt]), lambda kjt: Slotted(ByProperty([kjt]))):
        assert everything(open_log([wrap(kjt) for kjt in kjts()]).batches()) == expected


def test_models_in_batches_are_not_looked_through() -> None:
    torch = pytest.importorskip("torch")
    batch, model = Loose(), torch.nn.Linear(1, 1)
    vars(model)["kept"] = kjts()[1]
    vars(batch).update(kjt=kjts()[0], model=model)
    assert open_log([batch]).count_samples() == 2


def test_deep_batches_are_refused() -> None:
    top = inner = Loose()
    for _ in range(3000):
        vars(inner)["next"] = Loose()
        inner = vars(inner)["next"]
    vars(top)["kjt"] = kjts()[0]
    with pytest.raises(OperError, match="too deep to look through"):
        open_log([top])


def test_to_kjt_and_back() -> None:
    tables = [Table("t", 10, features=("a", "b")), Table("u", 6, features=("b",))]
    (first, *_) = read(kjts(), tables)
    kjt = first.to_kjt()
    assert kjt.keys() == ["a", "b@t", "b@u"]
    assert kjt["a"].values().tolist() == [1, 2]
    assert kjt["b@u"].lengths().tolist() == [1, 1]
    reader = RowReader(open_log(kjts()), Prepared(tuple(tables)))
    assert reader.tables_of == {"a": 0, "b@t": 0, "b@u": 1}
    assert reader.bagged == (True, True)


@pytest.mark.parametrize("packed", [False, True])
def test_estimates_of_texts(tmp_path: Path, packed: bool) -> None:
    lines = b"a,b\n" + b"".join(b"%d,%d\n" % (i * 7919, i) for i in range(200_000))
    (tmp_path / "log").write_bytes(gzip.compress(lines) if packed else lines)
    log = open_log(tmp_path / "log", LogOptions(rows="0:50%"))
    estimate = log.estimated_samples()
    assert estimate is not None
    assert 70_000 < estimate < 140_000
    assert log.samples is None


def test_inferred_tables(tmp_path: Path) -> None:
    table = pa.table(
        {
            "small": [3, -1, 0],
            "huge": pa.array([1 << 40, 7, 7]),
            "text": ["a", "-1", "a"],
            "empty": pa.array([None, None, None], pa.int64()),
        }
    )
    pq.write_table(table, tmp_path / "p.parquet")
    log = open_log(tmp_path / "p.parquet", LogOptions(missing="-1"))
    prepared = prepare(log, dim=16, optimizer="sgd")
    assert {t.name: (t.rows, t.ids.kind) for t in prepared.tables} == {
        "small": (4, "dense"),
        "huge": (3, "vocab"),
        "text": (2, "vocab"),
        "empty": (1, "dense"),
    }
    assert all(t.dim == 16 and t.ids.missing == "-1" for t in prepared.tables)
    rows = everything(RowReader(log, prepared).batches())
    assert rows["huge"] == [[2], [1], [1]]
    assert rows["text"] == [[1], [], [1]]
    assert rows["empty"] == [[], [], []]


def test_the_rule_travels(tmp_path: Path) -> None:
    """The vocabulary of one log is read from its folder for another log."""
    pq.write_table(pa.table({"c": ["a", "b", "a"]}), tmp_path / "old.parquet")
    pq.write_table(pa.table({"c": ["b", "new", "a"]}), tmp_path / "new.parquet")
    prepared = prepare(open_log(tmp_path / "old.parquet"))
    prepared.save_vocabularies(tmp_path / "profile")
    rows = everything(read(tmp_path / "new.parquet", prepared.tables, folder=tmp_path / "profile"))
    assert rows["c"] == [[2], [0], [1]]


def test_stated_tables_fill_in_what_is_open(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [5, 1], "b": ["x", "x"]}), tmp_path / "p.parquet")
    log = open_log(tmp_path / "p.parquet")
    stated = [Table("a", 0), Table("b", 9, ids=IdRule("vocab"))]
    assert [t.rows for t in prepare(log, stated).tables] == [6, 9]


def test_the_criteo_sample(shared_data: Path) -> None:
    path = shared_data / "criteo_kaggle_80k" / "data.parquet"
    log = open_log(path, LogOptions(columns=("C*",), missing="-1", rows="0:64000"))
    prepared = prepare(log)
    assert log.samples == 64_000
    whole = pq.read_table(path)
    assert [t.rows for t in prepared.tables] == [
        int(whole[f"C{i}"].to_numpy().max()) + 1 for i in range(1, 27)
    ]
    ids = sum(
        len(f.values)
        for b in RowReader(log, prepared).batches(ids_only=True)
        for f in b.features.values()
    )
    part = whole.slice(0, 64_000)
    assert ids == sum(int((part[f"C{i}"].to_numpy() >= 0).sum()) for i in range(1, 27))


def test_the_session_logs(shared_data: Path) -> None:
    options = LogOptions(values=("item",), lengths=("lengths",))
    log = open_log(shared_data / "sessions5" / "tmall.npz", options)
    prepared = prepare(log)
    assert prepared.tables[0].rows == 40_727
    batches = list(RowReader(log, prepared).batches(4096))
    assert sum(b.samples for b in batches) == 66_313
    assert sum(len(b.features["item"].values) for b in batches) == 443_479
