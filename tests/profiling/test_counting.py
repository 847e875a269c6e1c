"""Counting whole logs: against NumPy on the real logs, in windows, samples and batches."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.base.units import parse_seconds
from oper.logs import Batch, Jagged, LogOptions, RowReader, open_log, prepare
from oper.logs.batches.batch import Location
from oper.profiling.counting import CountOptions, count, provenance, take
from oper.profiling.distinct_rows import expected_rows
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile, merge
from oper.profiling.sampling import Sampling, hot_missed, poisson_mixture
from oper.profiling.windows import EqualWindows, TimeWindows
from oper.tables.table import Table
from tests.support.examples import examples

JAGGED = LogOptions(values=("item",), lengths=("lengths",))
CRITEO = LogOptions(columns=("C*",), missing="-1")


def counted(
    path: object, log_options: LogOptions | None = None, options: CountOptions | None = None
) -> list[Profile]:
    log = open_log(path, log_options)
    prepared = prepare(log)
    return count(RowReader(log, prepared), options, prepared=prepared)


def jagged_log(folder: Path, lengths: list[int], rows: int = 50, seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    items = (random.zipf(1.3, sum(lengths)) - 1) % rows
    items[-1:] = rows - 1  # the table's size is its largest id's
    np.savez(folder / "log.npz", item=items, lengths=np.array(lengths, np.int32))
    return folder / "log.npz"


def test_criteo_sample_equals_numpy(shared_data: Path) -> None:
    path = shared_data / "criteo_kaggle_80k" / "data.parquet"
    made = counted(path, CRITEO)[0]
    columns = pq.read_table(path)
    assert (made.samples, len(made.tables), made.bagged) == (80_000, 26, (False,) * 26)
    for index, table in enumerate(made.tables):
        values = columns[table.name].to_numpy()
        np.testing.assert_array_equal(
            made.table_accesses(index), np.bincount(values[values >= 0], minlength=table.rows)
        )


@pytest.mark.parametrize("batch_rows", [1000, 1 << 16])
def test_sessions_equal_numpy(shared_data: Path, batch_rows: int) -> None:
    path = shared_data / "sessions5" / "tmall.npz"
    made = counted(path, LogOptions(**{**vars(JAGGED), "batch_rows": batch_rows}))[0]
    arrays = np.load(path)
    items, lengths = arrays["item"].astype(np.int64), arrays["lengths"]
    rows = int(items.max()) + 1
    np.testing.assert_array_equal(made.accesses, np.bincount(items, minlength=rows))
    pairs = np.unique(np.repeat(np.arange(len(lengths)), lengths) * rows + items)
    np.testing.assert_array_equal(made.samples_with_row, np.bincount(pairs % rows, minlength=rows))
    assert made.bagged == (True,)
    assert made.samples == len(lengths)


def test_two_features_of_one_table(tmp_path: Path) -> None:
    columns = {"a": [1, 1, 2, None], "b": [1, 0, None, None], "c": [5, 5, 5, 5]}
    pq.write_table(
        pa.table({n: pa.array(v, pa.int64()) for n, v in columns.items()}), tmp_path / "l"
    )
    log = open_log(tmp_path / "l")
    prepared = prepare(log, [Table("ab", 3, features=("a", "b")), Table("c", 6)])
    made = count(RowReader(log, prepared))[0]
    assert made.bagged == (True, False)
    assert made.accesses.tolist() == [1, 3, 1, 0, 0, 0, 0, 0, 4]
    assert made.table_samples_with_row(0).tolist() == [1, 2, 1]


def test_torchrecs_configs_are_tables() -> None:
    import torch
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingConfig,
        KeyedJaggedTensor,
        PoolingType,
    )

    bags = EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=16, name="t", feature_names=["f"], pooling=PoolingType.MEAN
    )
    sequences = EmbeddingConfig(num_embeddings=3, embedding_dim=4, name="u", feature_names=["g"])
    ids = torch.tensor([1, 2, 4, 0, 0])
    batches = [KeyedJaggedTensor(["f", "g"], ids, lengths=torch.tensor([1, 2, 1, 1]))]
    made = profile(batches, [bags, sequences, Table("v", 3, features=("g",))])
    assert made.tables[0] == profile(batches, EmbeddingBagCollection([bags])).tables[0]
    assert made.tables[1:] == (
        Table("u", 3, 4, pooling="none", features=("g",)),
        Table("v", 3, features=("g",)),
    )
    assert made.accesses.tolist() == [0, 1, 1, 0, 1, 2, 0, 0, 2, 0, 0]
    for wrong, words in (
        ([bags, "u"], r"tables\[1\]: expected oper.Table,.*; got str"),
        ([bags, ids], r"tables\[1\]: expected oper.Table,.*; got Tensor"),
        (bags, "tables: expected .* in a list; .*; got EmbeddingBagConfig"),
        (Table("f", 5), "tables: expected .* in a list; .*; got Table"),
        (7, "tables: expected .* in a list; .*; got int"),
        ([], "none were given"),
    ):
        with pytest.raises(OperError, match=words):
            profile(batches, wrong)


def test_python_api_counts_keyed_jagged_tensors(tmp_path: Path) -> None:
    torchrec = pytest.importorskip("torchrec")
    import torch

    def batch(*ids: list[list[int]]) -> object:
        return torchrec.KeyedJaggedTensor.from_lengths_sync(
            ["f", "g"],
            torch.tensor([i for bags in ids for bag in bags for i in bag]),
            torch.tensor([len(bag) for bags in ids for bag in bags], dtype=torch.int32),
        )

    batches = [batch([[1, 1], [0]], [[2], [0]]), batch([[], [2]], [[1], [1]])]
    tables = [Table("t", 4, features=("f",)), Table("u", 3, features=("g",))]
    made = profile(iter(batches), tables)
    assert made.samples == 4
    assert made.accesses.tolist() == [1, 2, 1, 0, 1, 2, 1]
    assert made.samples_with_row.tolist() == [1, 1, 1, 0]
    again = profile(batches, made, batch_size=2, ranks=2)
    assert again.digest != made.digest
    assert again.accesses.tolist() == made.accesses.tolist()
    configs = [
        torchrec.EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=8, feature_names=list(t.features)
        )
        for t in tables
    ]
    by_module = profile(batches, torchrec.EmbeddingBagCollection(tables=configs))
    assert by_module.accesses.tolist() == made.accesses.tolist()
    with pytest.raises(OperError, match="batch 0, sample 0"):
        profile(batches, [Table("t", 1, features=("f",)), tables[1]])


@examples(20)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=5, max_size=40).filter(any),
    windows=st.integers(1, 5),
    batch_rows=st.integers(1, 50),
)
def test_equal_windows_cover_the_log(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], windows: int, batch_rows: int
) -> None:
    path = jagged_log(tmp_path_factory.mktemp("log"), lengths)
    log_options = LogOptions(**{**vars(JAGGED), "batch_rows": batch_rows})
    parts = counted(path, log_options, CountOptions(windows=EqualWindows(windows, len(lengths))))
    whole = counted(path, log_options)[0]
    assert len(parts) == windows
    sizes = [part.samples for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [w.source["window"]["from_sample"] for w in parts] == np.cumsum([0, *sizes])[
        :-1
    ].tolist()
    together = merge(parts)
    assert together.samples == len(lengths)
    np.testing.assert_array_equal(together.accesses, whole.accesses)
    np.testing.assert_array_equal(
        together.table_samples_with_row(0), whole.table_samples_with_row(0)
    )


@examples(15)
@given(
    samples=st.integers(20, 300),
    windows=st.integers(1, 5),
    batch_rows=st.integers(1, 400),
    share=st.sampled_from([0.2, 0.5, 0.9]),
    by_time=st.booleans(),
)
def test_windows_of_a_sample_have_its_samples_and_no_others(
    tmp_path_factory: pytest.TempPathFactory,
    samples: int,
    windows: int,
    batch_rows: int,
    share: float,
    by_time: bool,
) -> None:
    path = tmp_path_factory.mktemp("log") / "l.parquet"
    numbers = np.arange(samples)  # a sample's only row is its number, so that counts name samples
    pq.write_table(pa.table({"f": numbers, "t": numbers}), path)
    chosen = Sampling(share, seed=7).chosen(0, samples)
    every = -(-samples // windows)
    rule = TimeWindows("t", every, plain=True) if by_time else EqualWindows(windows, samples)
    window_of = numbers // every if by_time else numbers * windows // samples
    options = LogOptions(columns=("f",), time="t" if by_time else None, batch_rows=batch_rows)
    asked = CountOptions(windows=rule, sampling=Sampling(share, seed=7))
    log = open_log(path, options)
    reader = RowReader(log, prepare(log, [Table("f", samples)]))
    advanced: list[int] = []
    parts = count(reader, asked, advance=advanced.append)
    expected = [(chosen & (window_of == w)).astype(int) for w in np.unique(window_of[chosen])]
    assert [part.accesses.tolist() for part in parts] == [list(part) for part in expected]
    assert [part.samples for part in parts] == [int(part.sum()) for part in expected]
    assert sum(advanced) == samples


def test_windows_by_time_whatever_the_order(tmp_path: Path) -> None:
    day = 86_400
    times = np.array([3 * day, 10, day + 5, 20, 3 * day + 1, day - 1]) + 20_000 * day
    log = {"t": pa.array(times).cast(pa.timestamp("s")), "f": [0, 1, 2, 1, 0, 3]}
    pq.write_table(pa.table(log), tmp_path / "l.parquet")
    options = CountOptions(windows=TimeWindows("t", parse_seconds("1d", "--every")))
    parts = counted(tmp_path / "l.parquet", LogOptions(columns=("f",), time="t"), options)
    assert [part.accesses.tolist() for part in parts] == [[0, 2, 0, 1], [0, 0, 1, 0], [2, 0, 0, 0]]
    spans = [part.source["window"] for part in parts]
    assert [s["from"][:10] for s in spans] == ["2024-10-04", "2024-10-05", "2024-10-07"]
    assert spans[0]["to"] == spans[1]["from"] == "2024-10-05T00:00:00+00:00"


@pytest.mark.parametrize("text", ["", "1y", "-1d", "0", "d", "1e3"])
def test_spans_that_are_none(text: str) -> None:
    assert parse_seconds("1.5h", "--every") == 5400
    with pytest.raises(OperError, match="--every"):
        parse_seconds(text, "--every")


def test_a_sample_is_the_same_whatever_the_batches(tmp_path: Path) -> None:
    path = jagged_log(tmp_path, [3] * 4000)
    sampling = CountOptions(sampling=Sampling(0.25, seed=3))
    made = [
        counted(path, LogOptions(**{**vars(JAGGED), "batch_rows": size}), sampling)[0]
        for size in (64, 5000)
    ]
    np.testing.assert_array_equal(made[0].accesses, made[1].accesses)
    assert made[0].samples == made[1].samples == Sampling(0.25, 3).chosen(0, 4000).sum()
    assert abs(made[0].samples - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert made[0].accesses.sum() == 3 * made[0].samples
    other = counted(path, JAGGED, CountOptions(sampling=Sampling(0.25, seed=4)))[0]
    assert other.accesses.tolist() != made[0].accesses.tolist()
    with pytest.raises(OperError, match="selected no sample"):
        counted(path, JAGGED, CountOptions(sampling=Sampling(1e-9)))
    with pytest.raises(OperError, match=r"`sample`|sample="):
        Sampling(1.5)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_sampling_error_foretells_what_a_sample_misses(share: float) -> None:
    random = np.random.default_rng(5)
    weight = np.arange(1, 100_001.0) ** -1.05
    log = random.poisson(weight / weight.sum() * 2_000_000)
    sampled = random.binomial(log, share)
    hot = len(log) // 100
    ties = random.random((2, len(log)))
    wanted = np.argsort(-(log + ties[0]))[:hot]
    found = np.argsort(-(sampled + ties[1]))[:hot]
    missed = np.setdiff1d(wanted, found)
    foretold = hot_missed(*np.unique(sampled, return_counts=True), share)
    actual = len(missed) / hot, log[missed].sum() / log[wanted].sum()
    assert 0.02 < actual[0] < 0.5
    assert foretold == pytest.approx(actual, rel=0.2)
    assert hot_missed(*np.unique(log, return_counts=True), 1.0) == (0.0, 0.0)


def test_sampling_error_of_rows_never_seen() -> None:
    assert hot_missed(np.array([0]), np.array([10]), 0.5) == (1.0, 1.0)
    rate, weight = poisson_mixture(np.array([0, 100]), np.array([9000, 1000]))
    assert weight[rate < 0.03].sum() == pytest.approx(0.9, abs=0.01)
    assert weight @ rate == pytest.approx(10, rel=0.02)


def test_balance_error_is_that_of_repeated_samples(shared_data: Path) -> None:
    path = shared_data / "sessions5" / "retailrocket.npz"
    log = open_log(path, LogOptions(**{**vars(JAGGED), "rows": "0:40000"}))
    prepared = prepare(log)
    whole = count(RowReader(log, prepared))[0]
    rank = np.random.default_rng(0).integers(0, 8, whole.rows)
    shares = np.bincount(rank, whole.accesses, 8) / whole.accesses.sum()
    squares, foretold = [], []
    for seed in range(12):
        options = CountOptions(sampling=Sampling(0.2, seed), ranks=8)
        made = count(RowReader(log, prepared), options)[0]
        found = np.bincount(rank, made.accesses, 8) / made.accesses.sum()
        squares.append(((found / shares - 1) ** 2).mean())
        foretold.append(made.source["sampled"]["rank_lookups_error"])
    assert np.mean(foretold) == pytest.approx(np.mean(squares) ** 0.5, rel=0.25)


def shuffled(path: Path, folder: Path) -> Path:
    """A jagged log with its samples in random order."""
    arrays = np.load(path)
    items, lengths = arrays["item"], arrays["lengths"]
    start = np.cumsum(lengths) - lengths
    order = np.random.default_rng(0).permutation(len(lengths))
    mixed = np.concatenate([items[start[s] : start[s] + lengths[s]] for s in order])
    np.savez(folder / "log.npz", item=mixed, lengths=lengths[order])
    return folder / "log.npz"


def test_distinct_rows_of_a_real_log(shared_data: Path, tmp_path: Path) -> None:
    """Samples in random order read what is expected of them; in time order they read less."""
    path = shared_data / "sessions5" / "retailrocket.npz"
    options = CountOptions(batch_size=8192, ranks=8)
    mixed = counted(shuffled(path, tmp_path), JAGGED, options)[0]
    in_order = counted(path, JAGGED, options)[0]
    assert mixed.distinct is not None
    assert in_order.distinct is not None
    assert mixed.distinct.batches == mixed.samples // 8192
    np.testing.assert_allclose(mixed.distinct.rank_ratio, 1, atol=0.02)
    np.testing.assert_allclose(mixed.distinct.union_ratio, 1, atol=0.02)
    assert in_order.distinct.rank_ratio[0] < 0.97
    assert in_order.distinct.union_ratio[0] < 0.9


def test_distinct_rows_equal_numpy(tmp_path: Path) -> None:
    lengths = (np.arange(103) % 4).tolist()
    path = jagged_log(tmp_path, lengths)
    log_options = LogOptions(**{**vars(JAGGED), "batch_rows": 7})
    made = counted(path, log_options, CountOptions(batch_size=25, ranks=3))[0]
    items = np.split(np.load(path)["item"], np.cumsum(lengths)[:-1])
    of_ranks, of_all = [], []
    for first in range(0, 100, 25):
        borders = [first + r * 25 // 3 for r in range(4)]
        parts = [np.concatenate(items[a:b]) for a, b in itertools.pairwise(borders)]
        of_ranks += [len(np.unique(part)) for part in parts]
        of_all.append(len(np.unique(np.concatenate(parts))))
    measured = made.distinct
    assert measured is not None
    assert measured.batches == 4
    assert measured.rank_rows[0] == pytest.approx(np.mean(of_ranks))
    assert measured.union_rows[0] == pytest.approx(np.mean(of_all))
    rank_rows, union_rows = expected_rows(made, 25, 3)
    assert measured.rank_ratio[0] == pytest.approx(np.mean(of_ranks) / rank_rows[0])
    assert measured.union_ratio[0] == pytest.approx(np.mean(of_all) / union_rows[0])
    with pytest.raises(OperError, match="not one full batch"):
        counted(path, log_options, CountOptions(batch_size=104, ranks=3))


@pytest.mark.parametrize("files", ["log.parquet", "log.csv", "two files", "in memory"])
def test_labels_and_numbers_do_not_decide_whether_a_log_can_be_counted(
    tmp_path: Path, files: str
) -> None:
    """Windows end within batches of the log, and batches to measure go over several of those."""
    random = np.random.default_rng(0)
    columns = {"label": random.integers(0, 2, 100), "x": random.random(100)}
    ids = {"a": random.integers(0, 9, 100)}
    paths: object = [tmp_path / files]
    if files == "in memory":
        paths = [kjt_with_label_in_some(ids["a"][first : first + 7]) for first in range(0, 98, 7)]
        ids["a"] = ids["a"][:98]
    elif files == "log.csv":
        pacsv.write_csv(pa.table(columns | ids), tmp_path / files)
    else:
        names, cuts = ["log.parquet"], [0, 100]
        if files == "two files":
            names, cuts = ["one.parquet", "two.parquet"], [0, 40, 100]
        paths = [tmp_path / name for name in names]
        for name, first, last in zip(names, cuts, cuts[1:], strict=False):
            pq.write_table(pa.table(columns | ids).slice(first, last - first), tmp_path / name)
    log = open_log(paths, LogOptions(batch_rows=30))
    options = CountOptions(windows=EqualWindows(3, len(ids["a"])), batch_size=8, ranks=2)
    parts = count(RowReader(log, prepare(log)), options)
    for part, expected in zip(parts, np.array_split(ids["a"], 3), strict=True):
        assert part.distinct is not None
        np.testing.assert_array_equal(part.accesses, np.bincount(expected, minlength=9))


def kjt_with_label_in_some(ids: NDArray[np.int64]) -> SimpleNamespace:
    torch = pytest.importorskip("torch")
    torchrec = pytest.importorskip("torchrec")
    lengths = torch.ones(len(ids), dtype=torch.int32)
    tensor = torchrec.KeyedJaggedTensor(["a"], torch.from_numpy(ids), lengths=lengths)
    labels = torch.zeros(len(ids)) if ids[0] % 2 else None
    return SimpleNamespace(sparse_features=tensor, labels=labels)


def test_taking_samples_takes_all_that_belongs_to_them() -> None:
    sample = np.arange(6, dtype=np.float32)
    batch = Batch(6, {"a": Jagged(np.arange(6))}, Location("log"), sample, sample[:, None])
    taken = take(batch, sample % 2 == 0)
    assert taken.samples == 3
    assert taken.label is not None
    assert taken.dense is not None
    assert taken.label.tolist() == taken.dense[:, 0].tolist() == [0, 2, 4]


def test_provenance_names_files_not_places(tmp_path: Path) -> None:
    path = jagged_log(tmp_path, [2, 1])
    source = provenance(open_log(path, JAGGED))
    assert source["files"] == ["log.npz"]
    assert str(tmp_path) not in str(source)
    assert source["options"] == {"values": ["item"], "lengths": ["lengths"]}
