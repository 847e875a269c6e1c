"""The degree of infrequency of tables, and LAIA that looks at some tables alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oper.scheduler.cache import Caches, LookedUp
from oper.scheduler.cache_settings import Synchronisation
from oper.scheduler.dispatch import Dispatcher, Policy
from oper.scheduler.laia_infrequency import Infrequency

WORKERS = 2


def some_caches() -> Caches:
    return Caches(WORKERS, [100], [8], [8], "lru", Synchronisation.parse("on-demand"))


def test_rows_that_every_worker_needs_anyway_are_frequent() -> None:
    # Table 0 has row 0, in every sample; table 1 rows 1 to 8, each in one sample; table 2 none.
    caches, found = some_caches(), Infrequency.of_numbered_rows(np.array([0, 1, 9, 20]), WORKERS)
    for first in (1, 5):
        addresses = np.array([0, first, 0, first + 1, 0, first + 2, 0, first + 3])
        caches.train(caches.look_up(addresses, 2 * np.arange(5)), np.array([0, 0, 1, 1]))
        found.count(addresses, 4)
    assert found.of_tables(caches).tolist() == [0.0, 1.0, 0.0]
    assert found.tables_of(np.array([0, 1, 8, 9, 19])).tolist() == [0, 1, 1, 2, 2]


def test_doi_counts_copies_not_rows() -> None:
    # Of one table: row 0 in all 8 samples and both caches, row 1 in one sample and one cache.
    caches, found = some_caches(), Infrequency.of_numbered_rows(np.array([0, 2]), WORKERS)
    addresses = np.array([0] * 8 + [1])
    offsets = np.array([0, 1, 2, 3, 4, 5, 6, 7, 9])
    caches.train(caches.look_up(addresses, offsets), np.repeat([0, 1], 4))
    found.count(addresses, 8)
    assert found.of_tables(caches).tolist() == [pytest.approx(1 / 3)]


@pytest.mark.parametrize("seed", range(4))  # of ties, of which there are none
def test_laia_of_one_table_goes_by_its_rows_alone(seed: int) -> None:
    caches = some_caches()
    first = np.array([0, 1, 9, 0, 2, 10])  # table 0: row 0; table 1: 1 to 8; table 2: 9 on
    found = Infrequency.of_numbered_rows(np.array([0, 1, 9, 20]), WORKERS)
    laia = Dispatcher(Policy("laia", tables=1), np.ones(WORKERS), seed, found)
    batch = caches.look_up(first, np.array([0, 3, 6]))
    laia.assign(caches, first, batch, 0)  # when nothing is cached, so that table 0 is first
    caches.train(batch, np.array([0, 1]))
    # Of 20 samples, 10 a worker, 12 have row 0 and 4 to 8 each of the others.
    found.count(np.array([0, 1, 9, 0, 2, 10] * 3), 6)
    found.count(np.array([0, 9, 10] * 4), 12)
    again = np.array([0, 2, 9, 0, 1, 10])
    batch = caches.look_up(again, np.array([0, 3, 6]))
    assert found.of_tables(caches).tolist() == [0.0, 1.0, 1.0]
    # Tables 1 and 2 tie, and the first decides: row 2 is with worker 1, and row 1 with worker 0.
    assert laia.assign(caches, again, batch, 1).tolist() == [1, 0]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_samples_are_counted_by_row_and_rows_have_their_tables(
    sizes: list[int], data: st.DataObject
) -> None:
    first = np.concatenate([[0], np.cumsum(sizes)])
    rows = int(first[-1])
    found = Infrequency.of_numbered_rows(first, WORKERS)
    batches = st.lists(st.integers(0, max(rows - 1, 0)), max_size=20)
    seen: list[int] = []
    for batch in data.draw(st.lists(batches, max_size=4)) if rows else []:
        found.count(np.array(batch, dtype=np.int64), len(batch))
        seen += batch
    assert found._samples_with_row.tolist() == [seen.count(row) for row in range(rows)]
    assert found.tables_of(np.arange(rows)).tolist() == [
        table for table, size in enumerate(sizes) for _ in range(size)
    ]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_a_batch_of_some_rows_has_those_of_each_sample(
    lengths: list[int], data: st.DataObject
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    size = int(offsets[-1])
    chosen = data.draw(arrays(np.bool_, size))
    rows = torch.arange(100, 100 + size, dtype=torch.int32)
    found = LookedUp(rows, torch.from_numpy(offsets), torch.arange(size)).only(chosen)
    starts = found.offsets.tolist()
    for sample, (start, end) in enumerate(pairwise(offsets.tolist())):
        expected = [100 + n for n in range(start, end) if chosen[n]]
        assert found.rows[starts[sample] : starts[sample + 1]].tolist() == expected
    assert found.positions.tolist() == np.flatnonzero(chosen).tolist()
