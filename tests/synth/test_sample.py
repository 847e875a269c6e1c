"""The kernels of the log generator: ranks, rows and counts against NumPy and exact laws."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from oper.base import native
from oper.synth.recipes import Law, load_recipe
from tests.support.popularity_laws import chances_of, fits

SCATTERED, FREQUENCY, AGE = range(3)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("rows", [1, 7, 1024, 1025, 300_000])
def test_zipf_ranks_invert_the_distribution_function(rows: int, exponent: float) -> None:
    law = Law(rows, exponent)
    below = np.cumsum(chances_of(law))
    shares = np.random.default_rng(rows).random(50_000)
    ranks = native.ops().draw_ranks(torch.from_numpy(shares), rows, *law.arguments).numpy()
    expected = np.minimum(np.searchsorted(below, shares, side="right"), rows - 1)
    # NumPy's running sum is rounded too: now and then a share lies within that of a boundary.
    assert np.count_nonzero(ranks != expected) <= 5
    assert np.abs(ranks - expected).max() <= 1


def test_zipf_ranks_of_a_billion_rows_match_the_sum_to_the_last_rank() -> None:
    rows, exponent = 10**9, 1.05
    # P(rank < n) for n up to a million, by summing; the whole sum by its integral.
    head = np.cumsum(np.arange(1.0, 1e6 + 1) ** -exponent)
    tail = (1e6 + 0.5) ** -0.05 / 0.05 - (rows + 0.5) ** -0.05 / 0.05
    edges = np.array([2000, 50_000, 999_999])
    shares = head[edges - 1] / (head[-1] + tail)
    step = edges**-exponent / (head[-1] + tail)
    ranks = [
        native.ops().draw_ranks(
            torch.from_numpy(shares + side * step), rows, *Law(rows, 1.05).arguments
        )
        for side in (-0.25, 0.25)
    ]
    np.testing.assert_array_equal(ranks[0].numpy(), edges - 1)
    np.testing.assert_array_equal(ranks[1].numpy(), edges)
    ends = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    last = native.ops().draw_ranks(ends, rows, *Law(rows, 1.05).arguments)
    assert last[0] == 0
    assert 0.999999 * rows < last[1] < rows


def test_step_ranks_invert_the_distribution_function() -> None:
    law = Law(50, step_ends=np.array([0, 3, 3, 50]), step_weights=np.array([9.0, 5.0, 2.0, 0.25]))
    below = np.cumsum(chances_of(law))
    shares = np.random.default_rng(1).random(10_000)
    ranks = native.ops().draw_ranks(torch.from_numpy(shares), 50, *law.arguments).numpy()
    np.testing.assert_array_equal(ranks, np.searchsorted(below, shares, side="right"))


def test_step_ranks_of_a_published_workload_invert_its_distribution_functions() -> None:
    shares = np.random.default_rng(2).random(1000)
    for feature in load_recipe("meta-2021", scale=0.001).features[::20]:
        law = feature.law
        below = np.cumsum(chances_of(law))
        ranks = native.ops().draw_ranks(torch.from_numpy(shares), law.rows, *law.arguments)
        expected = np.minimum(np.searchsorted(below, shares, side="right"), law.rows - 1)
        np.testing.assert_allclose(ranks.numpy(), expected, atol=1)


@given(
    st.integers(1, 3000),
    st.sampled_from([SCATTERED, FREQUENCY, AGE]),
    st.integers(0, 2**62),
    st.booleans(),
)
def test_rows_are_a_bijection_of_ranks(rows: int, order: int, key: int, moved: bool) -> None:
    placed = native.ops().place_ranks(torch.arange(rows), rows, order, key, moved).numpy()
    np.testing.assert_array_equal(np.sort(placed), np.arange(rows))
    if order == FREQUENCY and not moved:
        np.testing.assert_array_equal(placed, np.arange(rows))


@pytest.mark.parametrize("rows", [1 << 20, 1_000_003])
def test_hot_ranks_are_scattered_evenly_and_anew_with_each_key(rows: int) -> None:
    hot = torch.arange(2000)
    first, second = (native.ops().place_ranks(hot, rows, SCATTERED, k, False) for k in (1, 2))
    for placed in (first, second):
        assert stats.kstest(placed.numpy() / rows, "uniform").pvalue > 1e-3
        gaps = np.diff(np.sort(placed.numpy()))
        assert stats.kstest(gaps * 2000 / rows, "expon").pvalue > 1e-3
    assert abs(stats.spearmanr(first, second).statistic) < 0.1


def test_age_mixes_ranks_as_much_as_first_appearances_do() -> None:
    rows, exponent = 1 << 18, 1.05
    waiting = np.random.default_rng(0).exponential(size=rows) * np.arange(1.0, rows + 1) ** exponent
    appearance = np.empty(rows, np.int64)
    appearance[np.argsort(waiting)] = np.arange(rows)
    ids = native.ops().place_ranks(torch.arange(rows), rows, AGE, 5, False).numpy()
    ranks = np.arange(64, 1 << 15)
    spreads = [np.std(np.log((a[ranks] + 1) / (ranks + 1))) for a in (appearance, ids)]
    assert spreads[1] == pytest.approx(spreads[0], rel=0.25)


@pytest.mark.parametrize(
    ("trials", "chance"), [(1000, 0.003), (10**6, 2e-6), (40, 0.4), (3000, 0.2), (3000, 0.9)]
)
def test_two_rows_share_accesses_binomially(trials: int, chance: float) -> None:
    law = Law(2, step_ends=np.array([1, 2]), step_weights=np.array([chance, 1 - chance]))
    drawn = np.empty(4000, np.int64)
    for stream in range(len(drawn)):
        counts = torch.zeros(2, dtype=torch.uint32)
        native.ops().draw_counts(counts, trials, *law.arguments, FREQUENCY, 0, False, stream)
        drawn[stream] = int(counts.numpy()[0])
    chances = stats.binom.pmf(np.arange(trials + 1), trials, chance)
    assert fits(np.bincount(drawn, minlength=trials + 1), chances) > 1e-3


@pytest.mark.parametrize(
    "law",
    [
        Law(200_000, 1.05),
        Law(70_000, 0.0),
        Law(5, 3.0),
        Law(
            150_000,
            step_ends=np.array([10, 5000, 150_000]),
            step_weights=np.array([500.0, 20.0, 0.1]),
        ),
    ],
    ids=["zipf", "uniform", "steep", "steps"],
)
@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64])
def test_counts_are_multinomial_and_add_up(law: Law, dtype: torch.dtype) -> None:
    accesses = 3_000_000
    counts = torch.zeros(law.rows, dtype=dtype)
    native.ops().draw_counts(counts, accesses, *law.arguments, SCATTERED, 3, False, 4)
    placed = native.ops().place_ranks(torch.arange(law.rows), law.rows, SCATTERED, 3, False)
    by_rank = counts.numpy()[placed.numpy()].astype(np.int64)
    assert by_rank.sum() == accesses
    assert fits(by_rank, chances_of(law)) > 1e-3


def test_counts_do_not_depend_on_the_number_of_threads() -> None:
    law, drawn = Law(400_000, 1.05), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            counts = torch.zeros(law.rows, dtype=torch.uint32)
            native.ops().draw_counts(counts, 10**6, *law.arguments, SCATTERED, 1, True, 2)
            samples_with_row = torch.zeros_like(counts)
            native.ops().samples_with_row_of(samples_with_row, counts, 10**5, 12, 3)
            drawn.append((counts.numpy().copy(), samples_with_row.numpy().copy()))
    finally:
        torch.set_num_threads(before)
    for counts_, samples_with_row_ in drawn[1:]:
        np.testing.assert_array_equal(counts_, drawn[0][0])
        np.testing.assert_array_equal(samples_with_row_, drawn[0][1])


@pytest.mark.parametrize("slots", [0, 2, 10])
@pytest.mark.parametrize("accesses", [2, 40, 70])
def test_samples_with_row_are_the_bags_hit(accesses: int, slots: int) -> None:
    samples, repeats = 60, 5000
    random = np.random.default_rng(accesses)
    hit = np.empty(repeats)
    for i in range(repeats):
        if slots:
            bags = random.choice(samples * slots, accesses, replace=False) // slots
        else:
            bags = random.integers(samples, size=accesses)
        hit[i] = len(np.unique(bags))
    counts = torch.full((repeats,), accesses, dtype=torch.uint32)
    samples_with_row = torch.zeros_like(counts)
    native.ops().samples_with_row_of(samples_with_row, counts, samples, slots, 9)
    drawn = samples_with_row.numpy().astype(np.int64)
    error = np.std(hit) * (2 / repeats) ** 0.5
    assert abs(drawn.mean() - hit.mean()) < 4 * error + 1e-9
    assert np.std(drawn) == pytest.approx(np.std(hit), rel=0.2 if accesses == 2 else 0.06)


@given(st.integers(0, 5000), st.integers(1, 60), st.sampled_from([0, 1, 3, 100]))
def test_samples_with_row_are_possible(accesses: int, samples: int, slots: int) -> None:
    accesses = min(accesses, samples * slots) if slots else accesses
    counts = torch.full((50,), accesses, dtype=torch.uint64)
    samples_with_row = torch.zeros_like(counts)
    drawn = (
        native.ops()
        .samples_with_row_of(samples_with_row, counts, samples, slots, 1)
        .numpy()
        .astype(int)
    )
    assert (drawn <= min(accesses, samples)).all()
    assert (drawn >= (-(-accesses // slots) if slots else min(accesses, 1))).all()
