"""Rows that were never read: how often they are expected to be, and in which plans that counts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.analysis.row_facts import RowReason, explain
from oper.cost.expected_counts import SELDOM, Turnover, expected_counts, good_turing
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import costs_under, problem_of
from oper.planner.problem.classes import classify
from oper.planner.row_placement.list_hot_rows import make_cuts
from oper.profiling.profile import Profile, in_order
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.examples import examples
from tests.support.planner.drifting import make_profile, planned, seeds


def entries() -> st.SearchStrategy[list[tuple[int, int, int, int]]]:
    """Of unlike tables: table, samples with the row, accesses beyond them, rows."""
    entry = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 3), st.integers(1, 40))
    return st.lists(entry, min_size=1, max_size=40, unique_by=lambda given: given[:3])


@given(entries())
@examples(200)
def test_each_table_keeps_its_accesses(given_entries: list[tuple[int, int, int, int]]) -> None:
    table, samples_with_row, more, rows = (np.array(c) for c in zip(*given_entries, strict=True))
    more[samples_with_row == 0] = 0
    accesses = samples_with_row + more
    found = expected_counts(table, accesses, samples_with_row, rows)
    assert (found.samples_with_row <= found.accesses + 1e-12).all()
    assert np.array_equal(found.differs, found.accesses != accesses)
    assert not found.differs[samples_with_row > SELDOM].any()
    for t in np.unique(table):
        mine = table == t
        counted, foreseen = (c[mine] @ rows[mine] for c in (accesses, found.accesses))
        assert np.isclose(foreseen, counted)


@given(st.lists(st.integers(0, 60), min_size=SELDOM + 2, max_size=SELDOM + 2))
@examples(300)
def test_estimates_ascend_and_keep_their_sum(given_numbers: list[int]) -> None:
    numbers = np.array(given_numbers)
    each, rows = good_turing(numbers), numbers[:-1]
    assert np.isclose(each @ rows, np.arange(SELDOM + 1) @ rows)
    there = np.append(each[rows > 0], SELDOM + 1)
    assert (np.diff(there) >= -1e-9).all()


def test_it_is_good_and_turings_estimate() -> None:
    """Of rows that are read with one frequency, such as three times on average, it finds that."""
    mean, rows = 3.0, 1e9
    counts = np.arange(SELDOM + 2)
    poisson = rows * np.exp(-mean) * mean**counts / np.array([1, 1, 2, 6, 24, 120, 720])
    found = good_turing(poisson.astype(np.int64))
    # Rows of larger counts keep theirs, so that those of smaller ones get a little less than 3.
    assert np.allclose(found, found[0], rtol=1e-6)
    assert 2 < found[0] < 3


def test_it_is_what_later_samples_read() -> None:
    """On samples of one distribution, of which half are counted, what rows unread till then are
    read is foreseen within a tenth; by their counts it would be nothing."""
    random = np.random.default_rng(5)
    rows, reads = 40_000, 60_000
    weights = 1 / np.arange(1, rows + 1) ** 1.05
    draws = random.choice(rows, 2 * reads, p=weights / weights.sum())
    first, later = (np.bincount(half, minlength=rows) for half in np.split(draws, 2))
    found = expected_counts(np.zeros(rows, int), first, first, np.ones(rows, int))
    seldom = first <= SELDOM
    error_of_counts = ((first - later)[seldom] ** 2).sum()
    assert ((found.accesses - later)[seldom] ** 2).sum() < 0.85 * error_of_counts
    for count in range(SELDOM + 1):
        together = found.accesses[first == count].sum(), later[first == count].sum()
        assert np.isclose(*together, rtol=0.15), count
    unread = first == 0
    assert np.isclose(found.accesses[unread].sum(), later[unread].sum(), rtol=0.1)


def turnovers(tables: int) -> st.SearchStrategy[Turnover]:
    """Return turnovers of tables that may be read in one window alone, or in none."""

    def made(seed: int) -> Turnover:
        random = np.random.default_rng(seed)
        rows = random.integers(0, 30, (tables, SELDOM + 2))
        alive = random.integers(0, rows + 1)
        reads = np.minimum(np.arange(SELDOM + 2), SELDOM + 1) * rows * random.integers(0, 2)
        later = alive * random.uniform(1, 5, alive.shape) * random.integers(0, 2, (tables, 1))
        return Turnover(rows, alive, reads.astype(float), later)

    return st.integers(0, 1 << 30).map(made)


@given(entries(), turnovers(3))
@examples(200)
def test_each_table_keeps_its_accesses_whatever_turns_over(
    given_entries: list[tuple[int, int, int, int]], turnover: Turnover
) -> None:
    table, samples_with_row, more, rows = (np.array(c) for c in zip(*given_entries, strict=True))
    more[samples_with_row == 0] = 0
    accesses = samples_with_row + more
    found = expected_counts(table, accesses, samples_with_row, rows, turnover)
    assert np.isfinite(found.accesses).all()
    assert (found.samples_with_row <= found.accesses + 1e-12).all()
    assert ((found.alive > 0) & (found.alive <= 1)).all()
    without = expected_counts(table, accesses, samples_with_row, rows)
    for t in np.unique(table):
        mine = table == t
        counted, foreseen = (c[mine] @ rows[mine] for c in (accesses, found.accesses))
        assert np.isclose(foreseen, counted) or foreseen == 0
        if not turnover.measured[t]:
            assert np.array_equal(found.accesses[mine], without.accesses[mine])


def churning(moved: int, seed: int = 3) -> list[Profile]:
    """Return three consecutive windows of a law whose rows move on by `moved` in each."""
    random = np.random.default_rng(seed)
    rows, reads = 6_000, 20_000
    weights = 1 / np.arange(1, 2_001) ** 0.8
    found = []
    for number in range(3):
        draws = random.choice(2_000, reads, p=weights / weights.sum())
        drawn = random.permutation(2_000) if moved else np.arange(2_000)
        accesses = np.bincount((drawn[draws] + number * moved) % rows, minlength=rows)
        table = (Table("t", rows, dim=16),)
        none = np.zeros(0, np.uint32)
        found.append(Profile(table, reads, accesses.astype(np.uint32), none, (False,)))
    in_order(found)
    return found


@pytest.mark.parametrize("moved", [0, 1_600])
def test_windows_foretell_the_reads_of_unread_rows_in_the_next_one(moved: int) -> None:
    """Good and Turing's estimate foretells them only if no rows come and go."""
    _, second, third = churning(moved)
    first, later = second.accesses.astype(int), third.accesses.astype(int)
    ones = np.zeros(len(first), int), first, first, np.ones(len(first), int)
    measured = expected_counts(*ones, second.turnover)
    unread = first == 0
    found, without = (each.accesses[unread].sum() for each in (measured, expected_counts(*ones)))
    assert np.isclose(found, later[unread].sum(), rtol=0.1)
    assert np.isclose(without, later[unread].sum(), rtol=0.15) == (moved == 0)


@pytest.mark.parametrize("preset", ["dgx-h100", "2x4-a100"])
def test_plans_by_windows_are_better_on_the_next_one_if_rows_come_and_go(preset: str) -> None:
    _, second, third = churning(1_600)
    topology = Topology.load(preset).with_capacity("2")
    seconds = {}
    for name, window in (("windows", second), ("one", replace(second, open_preceding=None))):
        plan = make_plan(window, topology, Workload("inference"))
        problem = problem_of(plan, third, as_counted=True)
        (cost,) = costs_under([plan], [problem])
        seconds[name] = cost.objective_seconds
    assert seconds["windows"] < 0.95 * seconds["one"]


@given(seeds)
@examples(20)
def test_training_and_what_was_counted_are_priced_as_counted(seed: int) -> None:
    plan, (profile, _) = planned(seed)
    ranks, workload = plan.ranks, plan.workload
    training = Workload("training", workload.fetch, workload.batch_size)
    inference = Workload("inference", workload.fetch, workload.batch_size)
    counted = classify(profile, inference, ranks, as_counted=True)
    assert np.allclose(counted.R, classify(profile, training, ranks).R)
    if workload.fetch == "raw":
        reads = counted.accesses / profile.samples * workload.batch_size / ranks
        assert np.allclose(counted.R, reads)
    foreseen = classify(profile, inference, ranks)
    total = foreseen.rows @ foreseen.accesses
    assert total == counted.rows @ counted.accesses == profile.accesses_of_tables.sum()


def test_rows_that_were_never_read_get_copies_where_memory_is_free() -> None:
    counts = np.array([500] * 20 + [1] * 300 + [0] * 680)
    profile: Profile = make_profile((Table("t", 1000, dim=16),), [counts])
    found = {}
    for mode in ("training", "inference"):
        workload = Workload(mode, "raw", 4096)
        plan = make_plan(profile, Topology.load("2x4-a100"), workload, PlanSettings(7.0))
        problem = problem_of(plan, profile)
        reads = problem.classes.R[problem.classes.accesses == 0].max()
        found[mode] = reads, explain(plan, "t", 900, profile)
    reads, row = found["training"]
    assert (reads, row.kind, row.why) == (0, "listed", RowReason.NEVER_READ)
    reads, row = found["inference"]
    # Of 300 accesses of rows that were read once none was of rows read twice.
    assert np.isclose(reads, 300 / 980 / profile.samples * 4096 / 8)
    assert (row.kind, row.accesses, len(row.replicas)) == ("replicated", 0, 8)
    assert row.why == RowReason.COPIES_PAY
    assert row.cost is not None
    assert np.isclose(row.cost.reads, reads)


def test_of_unread_rows_those_are_listed_that_have_copies() -> None:
    """Each table's unread rows are a class of their own, and all of them have no accesses."""
    tables = tuple(Table(name, 9000, dim=16) for name in "ab")
    counts = [np.arange(9000) < read for read in (3000, 5000)]
    profile: Profile = make_profile(tables, counts)
    classes = classify(profile, Workload("inference", "raw", 4096), 8)
    unread = np.flatnonzero(classes.accesses == 0)
    assert len(unread) == 2
    wanted = np.zeros(len(classes), dtype=np.int64)
    wanted[unread] = 100, 250
    cuts = make_cuts(classes, np.zeros(2, np.int64), wanted, wanted, 0.0)
    assert np.array_equal(cuts.listed[unread], [100, 250])
    first = classes.entry_table[classes.entry_class == unread[0]][0]
    assert np.array_equal(cuts.quota[[first, 1 - first]], [100, 250])
