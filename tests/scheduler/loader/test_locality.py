"""Locality: what ranks hold of a sample's rows, and the assignment with the most local reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

import oper
from oper.plan.address_map import LOCAL, unpack
from oper.scheduler.loader.assigners import LocalityAssigner, most_local
from oper.scheduler.loader.batch_structure import Structure
from oper.scheduler.loader.plan_rows import PlanRows
from tests.support.runtime.runtime_plans import random_plan
from tests.support.scheduler.loader_batches import TABLES, batch

FEATURES = (("f0", 0), ("f1", 0), ("g", 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_reads_that_a_rank_alone_could_serve(ranks: int, seed: int) -> None:
    plan = random_plan(seed, TABLES, ranks, replicated=0.3)
    given = batch("tuple", 40 * seed, 30)
    rows = PlanRows(plan, [0, 1], None)
    message = LocalityAssigner(rows, ranks).message(Structure.of(given))
    replicas = 0
    counts = np.zeros((30, ranks), dtype=np.int64)
    for feature, table in FEATURES:
        for sample, ids in enumerate(given[0][feature].to_dense()):
            maps = [oper.AddressMap.of(plan, rank).translate(table, ids) for rank in range(ranks)]
            local = np.stack([(unpack(found)[0] == LOCAL).numpy() for found in maps], axis=1)
            counts[sample] += local[~local.all(axis=1)].sum(axis=0)
            replicas += int(local.all(axis=1).sum())
    assert message.numpy().view(np.int32).reshape(30, ranks).tolist() == counts.tolist()
    assert ranks == 1 or counts.sum() > 0
    assert rows.counts(Structure.of(given))[1] == replicas > 0


def test_ids_that_are_no_rows_count_as_row_0() -> None:
    plan = random_plan(0, TABLES, 2)
    rows = PlanRows(plan, [0, 1], {"narrow": ["f0"]})
    given = batch("tuple", 0, 8)
    expected = given[0]["f0"].values().clone()
    values = given[0].values()
    start = given[0].offset_per_key()[given[0].keys().index("f0")]
    values[start], values[start + 1] = 40, -1
    expected[:2] = 0
    found = rows.accesses(Structure.of(given)).addresses
    addresses = rows.of_rows(expected, np.array([len(expected)]), np.array([0]))
    assert sorted(found.tolist()) == sorted(addresses.tolist())


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32))
def test_the_most_local_assignment_is_the_best(ranks: int, m: int, most: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, most, (ranks * m, ranks))
    found = most_local(counts)
    assert np.bincount(found, minlength=ranks).tolist() == [m] * ranks
    rank_of = np.repeat(np.arange(ranks), m)
    rows, columns = linear_sum_assignment(-counts[:, rank_of])
    best = counts[rows, rank_of[columns]].sum()
    at_home = np.repeat(np.arange(ranks), m)
    assert counts[np.arange(len(counts)), found].sum() == best
    # Of all that are as local, the one that moves the fewest samples.
    stays = counts[:, rank_of] * 1000.0 + (rank_of[None, :] == at_home[:, None])
    rows, columns = linear_sum_assignment(-stays)
    assert (found == at_home).sum() == (rank_of[columns] == at_home[rows]).sum()


def test_samples_stay_where_all_is_replicated() -> None:
    assert most_local(np.zeros((6, 2), dtype=np.int32)).tolist() == [0, 0, 0, 1, 1, 1]
