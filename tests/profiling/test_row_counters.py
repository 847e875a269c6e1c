"""The kernels that count a batch, against NumPy: accesses, samples with the row, distinct rows."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.base.errors import OperError
from oper.logs import Batch, Jagged
from oper.logs.batches.batch import Location
from oper.profiling.row_counters import Memory, RowCounters
from oper.tables.table import Table


@dataclass(frozen=True)
class Drawn:
    """Tables, the table that each feature indexes, and a few batches of row ids."""

    tables: tuple[Table, ...]
    table_of: dict[str, int]
    batches: tuple[Batch, ...]


def sample_rows(drawn: Drawn, batch: Batch, table: int) -> list[list[int]]:
    """The rows of a table that each sample of a batch has, over all its features."""
    rows: list[list[int]] = [[] for _ in range(batch.samples)]
    for key, t in drawn.table_of.items():
        ids = batch.features[key]
        border = ids.offsets()
        for sample in range(batch.samples if t == table else 0):
            rows[sample] += ids.values[border[sample] : border[sample + 1]].tolist()
    return rows


def reference(drawn: Drawn, table: int) -> tuple[np.ndarray, np.ndarray]:
    """accesses, samples with the row, of a table's rows."""
    accesses, samples_with_row = np.zeros((2, drawn.tables[table].rows), np.int64)
    for batch in drawn.batches:
        for rows in sample_rows(drawn, batch, table):
            np.add.at(accesses, rows, 1)
            samples_with_row[list(set(rows))] += 1
    return accesses, samples_with_row


@st.composite
def drawn_logs(draw: st.DrawFn) -> Drawn:
    """One to three tables, some with two features, with and without lengths, ids of either type."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    tables = tuple(
        Table(f"t{t}", draw(st.sampled_from([1, 3, 40, 5000])))
        for t in range(draw(st.integers(1, 3)))
    )
    table_of = {f"f{f}": f % len(tables) for f in range(draw(st.integers(len(tables), 4)))}
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    longest = {key: draw(st.sampled_from([None, 1, 4, 90, 700])) for key in table_of}

    def column(key: str, samples: int) -> Jagged:
        rows = tables[table_of[key]].rows
        most = longest[key]
        if most is None:
            return Jagged(random.integers(0, rows, samples).astype(dtype))
        lengths = random.integers(0, most + 1, samples).astype(np.int32)
        if draw(st.booleans()):
            lengths[:] = lengths[0]  # bags of one length are counted without a pass over them
        return Jagged(random.integers(0, rows, int(lengths.sum())).astype(dtype), lengths)

    batches = []
    for samples in draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)):
        features = {key: column(key, samples) for key in table_of}
        batches.append(Batch(samples, features, Location("drawn")))
    return Drawn(tables, table_of, tuple(batches))


def counted(drawn: Drawn) -> RowCounters:
    counters = RowCounters(drawn.tables)
    for batch in drawn.batches:
        counters.add(batch, drawn.table_of)
    return counters


@given(drawn=drawn_logs())
def test_counts_equal_the_reference(drawn: Drawn) -> None:
    profile = counted(drawn).profile({})
    assert profile.bag_lengths is not None
    bags = Counter(
        (table, length)
        for key, table in drawn.table_of.items()
        for batch in drawn.batches
        for length in np.diff(batch.features[key].offsets()).tolist()
    )
    pairs = [(*key, bags[key]) for key in sorted(bags)]
    np.testing.assert_array_equal(profile.bag_lengths.pairs, pairs)
    distinct = [0] * len(drawn.tables)
    for key, table in drawn.table_of.items():
        for batch in drawn.batches:
            ids = batch.features[key]
            bags_of_ids = np.split(ids.values, ids.offsets()[1:-1])
            distinct[table] += sum(len(set(bag.tolist())) for bag in bags_of_ids)
    assert profile.bag_lengths.distinct.tolist() == distinct
    assert profile.samples == sum(batch.samples for batch in drawn.batches)
    for table in range(len(drawn.tables)):
        accesses, samples_with_row = reference(drawn, table)
        np.testing.assert_array_equal(profile.table_accesses(table), accesses)
        np.testing.assert_array_equal(profile.table_samples_with_row(table), samples_with_row)
        several = any(len(r) > 1 for b in drawn.batches for r in sample_rows(drawn, b, table))
        assert profile.bagged[table] == several


@pytest.mark.parametrize("bag", [None, 3])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_batch_over_all_parts(threads: int, bag: int | None) -> None:
    """Enough ids that a table is cut into parts by rows."""
    random = np.random.default_rng(0)
    rows, samples = 100_000, 300_000
    ids = (random.zipf(1.2, samples * (bag or 1)) - 1) % rows
    lengths = None if bag is None else np.full(samples, bag, np.int32)
    counters = RowCounters((Table("t", rows), Table("u", 1)))
    features = {"t": Jagged(ids, lengths), "u": Jagged(np.zeros(samples, np.int64))}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        counters.add(Batch(samples, features, Location("drawn")), {"t": 0, "u": 1})
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(counters.accesses[:-1], np.bincount(ids, minlength=rows))
    assert counters.accesses[-1] == samples
    if bag:
        pairs = np.unique(np.repeat(np.arange(samples), bag) * rows + ids)
        assert counters.bag_lengths.distinct.tolist() == [len(pairs), samples]
        np.testing.assert_array_equal(
            counters.samples_with_row, np.bincount(pairs % rows, minlength=rows)
        )


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("bad", [-1, 10, 1 << 31, -(1 << 63), (1 << 63) - 1])
def test_bad_ids_are_named_and_never_written(bad: int, bags: bool) -> None:
    tables = (Table("a", 5), Table("b", 10), Table("c", 5))
    values = np.array([1, 2, bad, 3])
    lengths = np.array([2, 2], np.int32) if bags else None
    one = Jagged(np.zeros(2 if bags else 4, np.int64))
    batch = Batch(
        2 if bags else 4, {"a": one, "f": Jagged(values, lengths)}, Location("log.npz", 100)
    )
    counters = RowCounters(tables)
    sample = 101 if bags else 102
    with pytest.raises(
        OperError,
        match=rf"log.npz, row {sample}: expected .* feature 'f', as table 'b' .*got {bad};",
    ):
        counters.add(batch, {"a": 0, "f": 1})
    np.testing.assert_array_equal(counters.accesses[:5], [len(one.values), 0, 0, 0, 0])
    np.testing.assert_array_equal(counters.accesses[5:15], [0, 1, 1, 1, *[0] * 6])
    assert not counters.accesses[15:].any()


def kernel(
    values: Sequence[int], lengths: Sequence[int], changed: dict[str, object] | None = None
) -> None:
    arguments = {
        "accesses": torch.zeros(4, dtype=torch.uint32),
        "samples_with_row": torch.zeros(0, dtype=torch.uint32),
        "offsets": torch.tensor([0, 4]),
        "samples_with_row_start": torch.tensor([-1]),
        "values": [torch.tensor(values)],
        "lengths": [torch.tensor(lengths, dtype=torch.int32)],
        "table_of": torch.tensor([0]),
        "samples": 2,
    }
    native.ops().count(*(arguments | (changed or {})).values())


@pytest.mark.parametrize(
    ("values", "lengths", "changed", "error"),
    [
        ([1, 2, 3], [1, 1], {}, ValueError),  # lengths that do not sum to the ids
        ([1, 2, 3], [4, -1], {}, ValueError),
        ([1, 2, 3], [], {}, ValueError),  # not one a sample
        ([1, 2], [1, 1, 0], {}, ValueError),
        ([1, 2], [1, 1], {"offsets": torch.tensor([0, 5])}, ValueError),
        ([1, 2], [1, 1], {"samples_with_row_start": torch.tensor([0])}, ValueError),
        ([1, 2], [1, 1], {"table_of": torch.tensor([1])}, IndexError),
        ([1, 2], [1, 1], {"accesses": torch.zeros(4)}, TypeError),
        ([1, 2], [1, 1], {"values": [torch.tensor([1.0, 2.0])]}, TypeError),
    ],
)
def test_malformed_arguments_are_refused(
    values: list[int], lengths: list[int], changed: dict[str, object], error: type[Exception]
) -> None:
    kernel([1, 2, 3], [1, 2])
    with pytest.raises(error):
        kernel(values, lengths, changed=changed)


@given(drawn=drawn_logs(), ranks=st.integers(1, 7))
def test_distinct_rows_equal_the_reference(drawn: Drawn, ranks: int) -> None:
    from oper.profiling.distinct_rows import tensors

    for batch in drawn.batches:
        of_ranks, of_all = native.ops().distinct(
            *tensors(batch, drawn.table_of), len(drawn.tables), batch.samples, ranks
        )
        border = [r * batch.samples // ranks for r in range(ranks + 1)]
        for table in range(len(drawn.tables)):
            rows = sample_rows(drawn, batch, table)
            parts = [set().union(*rows[a:b]) for a, b in itertools.pairwise(border)]
            assert of_ranks[table] == sum(map(len, parts))
            assert of_all[table] == len(set().union(*parts))


def test_counters_widen_before_they_overflow() -> None:
    most = (1 << 32) - 1
    counters = RowCounters((Table("t", 3),))
    bag = Batch(1, {"t": Jagged(np.array([0, 0, 1]), np.array([3], np.int32))}, Location("drawn"))
    counters.add(bag, {"t": 0})
    counters.accesses[0] = counters.bound = most - 4
    counters.add(bag, {"t": 0})
    assert counters.accesses.dtype == np.uint32
    counters.add(bag, {"t": 0})
    counters.add(bag, {"t": 0})
    assert counters.accesses.tolist() == [most - 4 + 6, 4, 0]
    assert counters.samples_with_row.tolist() == [4, 4, 0]
    assert counters.accesses.dtype == counters.samples_with_row.dtype == np.uint64


def test_counters_widen_by_all_features_that_read_one_table() -> None:
    most = (1 << 32) - 1
    counters = RowCounters((Table("t", 2),))
    counters.accesses[0] = counters.bound = most - 3
    ids = Jagged(np.zeros(3, np.int64))  # three of each of two features, and room for three
    counters.add(Batch(3, {"f": ids, "g": ids}, Location("drawn")), {"f": 0, "g": 0})
    assert counters.accesses.tolist() == [most + 3, 0]


def test_many_accesses_of_many_rows_do_not_widen() -> None:
    counters = RowCounters((Table("t", 3),))
    counters.bound = (1 << 32) - 2  # as after four billion accesses of which no row has many
    counters.add(Batch(2, {"t": Jagged(np.array([0, 1]))}, Location("drawn")), {"t": 0})
    assert counters.accesses.dtype == np.uint32
    assert counters.bound == 2


def test_counters_beyond_the_limit_lie_in_files(tmp_path) -> None:
    tables = (Table("t", 3), Table("u", 5))
    one = Batch(1, {"t": Jagged(np.array([2])), "u": Jagged(np.array([4]))}, Location("drawn"))
    two = Batch(
        1,
        {"t": Jagged(np.array([0, 2]), np.array([2], np.int32)), "u": Jagged(np.array([1]))},
        Location("drawn"),
    )
    for limit, mapped in (
        (None, []),
        (32, ["samples_with_row.npy"]),
        (0, ["accesses", "samples_with_row"]),
    ):
        folder = tmp_path / str(limit)
        counters = RowCounters(tables, Memory(limit), folder)
        counters.add(one, {"t": 0, "u": 1})
        counters.add(two, {"t": 0, "u": 1})
        found = sorted(p.stem for p in folder.glob("*")) if folder.exists() else []
        assert found == [name.removesuffix(".npy") for name in mapped]
        assert counters.accesses.tolist() == [1, 0, 2, 0, 1, 0, 0, 1]
        assert counters.samples_with_row.tolist() == [1, 0, 2]
        counters.accesses[0] = counters.bound = (1 << 32) - 1
        counters.add(two, {"t": 0, "u": 1})  # widened, in the place where they lie
        assert counters.accesses.dtype == np.uint64
        assert counters.accesses.tolist() == [1 << 32, 0, 3, 0, 2, 0, 0, 1]
        assert counters.samples_with_row.tolist() == [2, 0, 3]
