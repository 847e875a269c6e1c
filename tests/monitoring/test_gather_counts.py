"""Counts on their way to rank 0: what arrives is what was sent, by the plan's tables."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.logs.batches.batch import Batch, Jagged, Location
from oper.monitoring.gather_counts import MonitoredRanks, in_plans_tables, packed, unpacked
from oper.profiling.row_counters import RowCounters
from oper.tables.table import Table

TABLES = (Table("a", 70_000, 8), Table("b", 3, 8), Table("c", 50, 8), Table("unread", 7, 8))


def counters(names: Sequence[str], seed: int, samples: int, most: int) -> RowCounters:
    """What a collection of these tables was counted to read, bags of up to `most` ids."""
    random = np.random.default_rng(seed)
    tables = [table for name in names for table in TABLES if table.name == name]
    made = RowCounters(tables)
    features = {}
    for table in tables:
        lengths = random.integers(0, most + 1, samples).astype(np.int32)
        ids = (random.zipf(1.2, int(lengths.sum())) - 1) % table.rows
        features[table.name] = Jagged(ids, lengths)
    batch = Batch(samples, features, Location("made up", 0, "sample"))
    made.add(batch, {name: number for number, name in enumerate(names)})
    return made


@given(st.integers(0, 100), st.integers(0, 400), st.integers(0, 3), st.booleans())
def test_what_arrives_is_what_was_sent(seed: int, samples: int, most: int, wide: bool) -> None:
    parts = [counters(["c", "a"], seed, samples, most), counters(["b"], seed + 1, samples, 1)]
    sent = in_plans_tables(parts, TABLES)
    if wide:
        sent = replace(
            sent,
            accesses=sent.accesses.astype(np.uint64) << np.uint64(33),
            samples_with_row=sent.samples_with_row.astype(np.uint64),
        )
    found = unpacked(packed(sent), TABLES)
    assert (found.samples, found.bagged, found.tables) == (samples, sent.bagged, TABLES)
    np.testing.assert_array_equal(found.accesses, sent.accesses)
    np.testing.assert_array_equal(found.samples_with_row, sent.samples_with_row)
    assert found.accesses.dtype == sent.accesses.dtype
    assert found.bag_lengths is not None
    assert sent.bag_lengths is not None
    np.testing.assert_array_equal(found.bag_lengths.pairs, sent.bag_lengths.pairs)
    np.testing.assert_array_equal(found.bag_lengths.distinct, sent.bag_lengths.distinct)


def test_counts_are_by_the_plans_tables_in_its_order() -> None:
    parts = [counters(["c", "a"], 1, 300, 2), counters(["b"], 2, 300, 1)]
    found = in_plans_tables(parts, TABLES)
    assert found.bagged == (True, False, True, False)
    for number, (part, table) in enumerate(((0, 1), (1, 0), (0, 0))):
        own = parts[part].profile({})
        np.testing.assert_array_equal(found.table_accesses(number), own.table_accesses(table))
        np.testing.assert_array_equal(
            found.table_samples_with_row(number), own.table_samples_with_row(table)
        )
        assert found.bag_lengths is not None
        assert own.bag_lengths is not None
        assert found.bag_lengths.summary(number) == own.bag_lengths.summary(table)
    assert not found.table_accesses(3).any()


def test_a_message_is_as_large_as_what_was_read() -> None:
    """Three bytes for a row, and the lengths of bags, whatever the tables' sizes."""
    sent = in_plans_tables([counters(["a"], 1, 2000, 1)], TABLES)
    rows = int(np.count_nonzero(sent.accesses))
    assert len(packed(sent)) < 3 * rows + 1000 < 4 * TABLES[0].rows / 10


def test_one_rank_needs_no_group() -> None:
    alone = MonitoredRanks(None, 1.0)
    assert alone.gather(b"x", "do it") == [b"x"]
    assert alone.gather_on_first(b"", "do it") == [b""]
    alone.close()


@pytest.mark.parametrize("samples", [0, 1])
def test_no_accesses_are_sent_too(samples: int) -> None:
    sent = in_plans_tables([counters(["b"], 0, samples, 0)], TABLES)
    assert unpacked(packed(sent), TABLES).samples == samples
