"""The log generator: its kernels against NumPy, and logs and profiles against what was asked."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from oper import native
from oper.errors import OperError
from oper.logs import open_log
from oper.logs.batch import Batch
from oper.logs.planted import BayesAuc
from oper.logs.synth import ORDERS, Synthesizer
from oper.logs.synth_counts import synthesize_counts, write_profile
from oper.logs.synth_log import write_log
from oper.logs.workloads import (
    KEPT_ROWS,
    CoAccess,
    Feature,
    Law,
    Recipe,
    load_recipe,
    workload_names,
)
from oper.planner.profile import Profile
from oper.tables import Table, load_tables

SCATTERED, FREQUENCY, AGE = range(3)


def weights_of(law: Law) -> np.ndarray:
    """The weight of every rank, one by one."""
    if len(law.step_ends):
        return np.repeat(law.step_weights, np.diff(law.step_ends, prepend=0))
    return np.arange(1.0, law.rows + 1) ** -law.exponent


def chances_of(law: Law) -> np.ndarray:
    weights = weights_of(law)
    return weights / weights.sum()


def recipe_of(*features: Feature, share: float = 0.0, samples: int = 10_000) -> Recipe:
    return Recipe("test", features, samples, CoAccess(share, 16), 0.25, {})


def zipf_feature(name: str, rows: int, ids: int = 1, exponent: float = 1.05) -> Feature:
    return Feature(Table(name, rows), Law(rows, exponent), ids)


def values_of(batches: list[Batch], name: str) -> np.ndarray:
    return np.concatenate([b.features[name].values for b in batches])


def fits(counts: np.ndarray, chances: np.ndarray) -> float:
    """p-value of a chi-square test, ranks of few expected counts taken together."""
    expected = chances * counts.sum()
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    kept = wanted > 0
    return float(stats.chisquare(observed[kept], wanted[kept]).pvalue)


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
        native.ops().draw_ranks(torch.from_numpy(shares + side * step), rows, *Law(rows, 1.05).arguments)
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
            containing = torch.zeros_like(counts)
            native.ops().containing_of(containing, counts, 10**5, 12, 3)
            drawn.append((counts.numpy().copy(), containing.numpy().copy()))
    finally:
        torch.set_num_threads(before)
    for counts_, containing_ in drawn[1:]:
        np.testing.assert_array_equal(counts_, drawn[0][0])
        np.testing.assert_array_equal(containing_, drawn[0][1])


@pytest.mark.parametrize("slots", [0, 2, 10])
@pytest.mark.parametrize("accesses", [2, 40, 700])
def test_containing_is_the_number_of_bags_hit(accesses: int, slots: int) -> None:
    samples, repeats = 500, 3000
    random = np.random.default_rng(accesses)
    hit = np.empty(repeats)
    for i in range(repeats):
        if slots:
            bags = random.choice(samples * slots, accesses, replace=False) // slots
        else:
            bags = random.integers(samples, size=accesses)
        hit[i] = len(np.unique(bags))
    counts = torch.full((repeats,), accesses, dtype=torch.uint32)
    containing = torch.zeros_like(counts)
    native.ops().containing_of(containing, counts, samples, slots, 9)
    drawn = containing.numpy().astype(np.int64)
    error = np.std(hit) * (2 / repeats) ** 0.5
    assert abs(drawn.mean() - hit.mean()) < 4 * error + 1e-9
    assert np.std(drawn) == pytest.approx(np.std(hit), rel=0.12)


@given(st.integers(0, 5000), st.integers(1, 60), st.sampled_from([0, 1, 3, 100]))
def test_containing_is_possible(accesses: int, samples: int, slots: int) -> None:
    accesses = min(accesses, samples * slots) if slots else accesses
    counts = torch.full((50,), accesses, dtype=torch.uint64)
    containing = torch.zeros_like(counts)
    drawn = native.ops().containing_of(containing, counts, samples, slots, 1).numpy().astype(int)
    assert (drawn <= min(accesses, samples)).all()
    assert (drawn >= (-(-accesses // slots) if slots else min(accesses, 1))).all()


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_logs_follow_the_law_whatever_the_coaccess(share: float) -> None:
    features = (zipf_feature("a", 40), zipf_feature("b", 3000), zipf_feature("c", 900, ids=4))
    synthesizer = Synthesizer(recipe_of(*features, share=share), 150_000, seed=3)
    batches = list(synthesizer.batches())
    for index, feature in enumerate(features):
        rows = feature.table.rows
        counts = np.bincount(values_of(batches, feature.table.name), minlength=rows)
        key = synthesizer.place_key(index)
        placed = native.ops().place_ranks(torch.arange(rows), rows, SCATTERED, key, False).numpy()
        by_rank = counts[placed]
        assert by_rank.sum() == 150_000 * feature.ids
        if feature.ids == 1 or share == 0:
            assert fits(by_rank, chances_of(feature.law)) > 1e-3
        else:  # the first ids of a class's samples lie in one stratum: less spread than chance
            assert by_rank[:20] == pytest.approx(150_000 * 4 * chances_of(feature.law)[:20], rel=0.05)


def test_coaccess_ties_features_together() -> None:
    features = tuple(zipf_feature(name, 500) for name in "ab")

    def dependence(share: float) -> float:
        recipe = recipe_of(*features, share=share)
        batches = list(Synthesizer(recipe, 60_000, order="frequency").batches())
        a, b = (np.minimum(values_of(batches, n), 9) for n in "ab")
        table = np.bincount(a * 10 + b, minlength=100).reshape(10, 10)
        return float(stats.chi2_contingency(table).statistic)

    assert dependence(0.0) < stats.chi2.ppf(0.999, 81)
    assert dependence(0.3) > 1000
    assert dependence(0.9) > 2 * dependence(0.3)


def test_drift_moves_the_stated_share() -> None:
    feature = zipf_feature("a", 200)
    drift, samples, parts = 0.6, 400_000, 4
    synthesizer = Synthesizer(recipe_of(feature), samples, drift, seed=5, order="frequency")
    key = synthesizer.place_key(0)
    old = chances_of(feature.law)
    new = np.empty_like(old)
    new[native.ops().place_ranks(torch.arange(200), 200, FREQUENCY, key, True).numpy()] = old
    values = values_of(list(synthesizer.batches()), "a")
    for part in range(parts):
        begin, end = samples * part // parts, samples * (part + 1) // parts
        moved = drift * (part + 0.5) / parts
        assert synthesizer.moved_share(begin, end) == pytest.approx(moved, abs=1e-5)
        law = (1 - moved) * old + moved * new
        assert fits(np.bincount(values[begin:end], minlength=200), law) > 1e-3
        window = synthesize_counts(synthesizer, None, begin, end)
        assert window.samples == window.accesses.sum() == end - begin
        assert fits(window.accesses.astype(np.int64), law) > 1e-3
    # From no access to a share `drift` of them at the end.
    assert synthesizer.moved_share(0, 1) == 0
    assert synthesizer.moved_share(samples - 1, samples) == pytest.approx(drift)


def test_profiles_count_like_logs() -> None:
    recipe = recipe_of(
        zipf_feature("a", 5000),
        zipf_feature("b", 300, ids=6),
        Feature(Table("c", 2000), Law(2000, 1.2), 2.5, varying=True),
        Feature(Table("never", 1), Law(1, 1.0), 0.0, varying=True),
    )
    synthesizer = Synthesizer(recipe, 80_000, drift=0.2, seed=11)
    profile = synthesize_counts(synthesizer)
    assert profile.bagged == (False, True, True, True)
    batches = list(synthesizer.batches())
    for table, feature in enumerate(recipe.features):
        rows, name = feature.table.rows, feature.table.name
        logged = np.bincount(values_of(batches, name), minlength=rows)
        samples = np.concatenate(
            [np.repeat(b.place.first + np.arange(b.samples), np.diff(b.features[name].offsets()))
             for b in batches]
        )
        pairs = np.unique(np.stack([samples, values_of(batches, name)]), axis=1)
        contained = np.bincount(pairs[1], minlength=rows)
        for drawn, real in (
            (profile.table_accesses(table), logged),
            (profile.table_containing(table), contained),
        ):
            difference = drawn.astype(np.float64) - real
            # Two independent counts of one mean differ by about the root of their sum.
            scaled = difference / np.sqrt(np.maximum(drawn.astype(np.float64) + real, 1))
            assert np.abs(scaled).max(initial=0) < 5.5
            hot = real > 20
            if hot.any():
                assert np.std(scaled[hot]) < 1.25


def test_seeds_decide_everything(tmp_path: Path) -> None:
    recipe = load_recipe("criteo-terabyte-40m", scale=1e-4)
    make = [Synthesizer(recipe, 2000, 0.1, seed) for seed in (1, 1, 2)]
    logs = []
    for number, synthesizer in enumerate(make):
        written = write_log(synthesizer, tmp_path / f"{number}.parquet")
        logs.append(written.log.read_bytes())
        write_profile(synthesizer, tmp_path / f"profile{number}")
    assert logs[0] == logs[1] != logs[2]
    digests = [Profile.open(tmp_path / f"profile{number}", check=True).digest for number in range(3)]
    assert digests[0] == digests[1] != digests[2]


def test_written_logs_read_back(tmp_path: Path) -> None:
    recipe = recipe_of(
        zipf_feature("a", 500),
        zipf_feature("b", 90, ids=3),
        Feature(Table("c", 40), Law(40, 1.0), 0.7, varying=True),
    )
    synthesizer = Synthesizer(recipe, 150_000, seed=2)
    told: list[int] = []
    written = write_log(synthesizer, tmp_path / "log.parquet", told.append)
    assert sum(told) == 150_000
    assert [(t.name, t.rows) for t in load_tables(written.tables)] == [("a", 500), ("b", 90), ("c", 40)]
    made = list(synthesizer.batches())
    read = list(open_log([tmp_path / "log.parquet"]).batches())
    for name in "abc":
        np.testing.assert_array_equal(values_of(made, name), values_of(read, name))
    for one in ("label", "dense"):
        np.testing.assert_array_equal(
            np.concatenate([getattr(b, one) for b in made]),
            np.concatenate([getattr(b, one) for b in read]),
        )
    lengths = np.concatenate([np.diff(b.features["c"].offsets()) for b in read])
    assert lengths.mean() == pytest.approx(0.7, abs=0.01)
    assert lengths.min() == 0


def test_bayes_auc_is_that_of_the_planted_chances() -> None:
    logits = np.random.default_rng(0).normal(-1, 1.2, 400)
    chances = 1 / (1 + np.exp(-logits))
    won = lost = 0.0
    for i, j in itertools.product(range(400), repeat=2):
        weight = chances[i] * (1 - chances[j])
        won += weight * (0.5 if i == j else float(logits[i] > logits[j]))
        lost += weight
    auc = BayesAuc()
    auc.add(logits[:100])
    auc.add(logits[100:])
    assert auc.value == pytest.approx(won / lost, abs=1e-4)


def test_labels_can_be_learned_from_their_ids() -> None:
    recipe = recipe_of(*(zipf_feature(f"t{i}", 8, exponent=0.2) for i in range(6)))
    batches = list(Synthesizer(recipe, 40_000, seed=1).batches())
    x = np.concatenate(
        [np.eye(8)[values_of(batches, f"t{i}")] for i in range(6)]
        + [np.concatenate([b.dense for b in batches if b.dense is not None])],
        axis=1,
    )
    label = np.concatenate([b.label for b in batches if b.label is not None])
    weights = np.linalg.lstsq(x[:20_000], label[:20_000], rcond=None)[0]
    score, label = x[20_000:] @ weights, label[20_000:]
    auc = stats.mannwhitneyu(score[label == 1], score[label == 0]).statistic
    auc /= np.count_nonzero(label == 1) * np.count_nonzero(label == 0)
    best = BayesAuc()
    list(Synthesizer(recipe, 40_000, seed=1).batches(best))
    assert 0.7 < best.value < 0.85
    assert auc == pytest.approx(best.value, abs=0.02)


@pytest.mark.parametrize("name", workload_names())
def test_recipes_have_the_published_tables(name: str) -> None:
    recipe = load_recipe(name)
    assert [(t.name, t.rows) for t in recipe.tables] == [(t.name, t.rows) for t in load_tables(name)]
    dim = 16 if name in ("criteo-kaggle", "avazu") else 64
    assert {t.dim for t in recipe.tables} == {dim}
    assert {t.dim for t in load_recipe(name, dim=8).tables} == {8}


def test_scale_keeps_small_tables() -> None:
    whole, scaled = load_recipe("criteo-kaggle"), load_recipe("criteo-kaggle", scale=0.01)
    for before, after in zip(whole.tables, scaled.tables, strict=True):
        if before.rows <= KEPT_ROWS:
            assert after.rows == before.rows
        else:
            assert after.rows == max(KEPT_ROWS, round(before.rows * 0.01))
    assert scaled.samples == round(45_840_617 * 0.01)
    assert all(f.law.rows == f.table.rows for f in scaled.features)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_meta_has_the_published_reuse(scale: float, shared_data: Path) -> None:
    from oper.storage import read_json

    published = read_json(shared_data / "dlrm_datasets_locality.json")["years"]["2021"][0]
    recipe = load_recipe("meta-2021", scale=scale)
    ids = np.array([f.ids for f in recipe.features])
    assert ids.mean() == pytest.approx(published["indices_per_table_per_sample"], rel=0.005)
    # Expected numbers of rows by accesses, over one batch (as many samples as the scale says).
    rows_at: dict[float, float] = {}
    for feature in recipe.features:
        if feature.ids:
            law = feature.law
            sizes = np.diff(law.step_ends, prepend=0)
            rates = law.step_weights / (sizes @ law.step_weights) * feature.ids * recipe.samples
            for rate, size in zip(rates, sizes, strict=True):
                rows_at[rate] = rows_at.get(rate, 0) + size
    rate, rows = np.array(list(rows_at)), np.array(list(rows_at.values()))
    bounds = np.array([0, *(high or np.inf for _, high, _ in published["rows_hist"])])
    in_bin = np.diff(stats.poisson.cdf(bounds[:, None], rate), axis=0) @ rows
    accessed = in_bin.sum()
    shares = np.array([share for _, _, share in published["rows_hist"]])
    np.testing.assert_allclose(in_bin / accessed, shares, atol=0.0012 if scale == 1 else 0.006)
    if scale == 1:
        assert accessed == pytest.approx(published["unique_rows"], rel=0.005)
        read = np.diff(stats.poisson.cdf(bounds[:, None] - 1, rate), axis=0) @ (rows * rate)
        shares = np.array([share for _, _, share in published["access_hist"]])
        np.testing.assert_allclose(read / read.sum(), shares, atol=0.002)


def test_windows_are_the_whole(tmp_path: Path) -> None:
    synthesizer = Synthesizer(load_recipe("avazu", scale=0.001), 10_001, drift=0.5)
    write_profile(synthesizer, tmp_path / "profile", windows=4)
    parts = [Profile.open(f"{tmp_path / 'profile'}@{w}") for w in range(4)]
    whole = Profile.open(tmp_path / "profile")
    assert whole.samples == sum(p.samples for p in parts) == 10_001
    np.testing.assert_array_equal(whole.accesses, sum(p.accesses.astype(np.int64) for p in parts))


def test_zipf_replaces_the_law() -> None:
    assert {f.law.exponent for f in load_recipe("criteo-kaggle", zipf=1.3).features} == {1.3}
    own, other = load_recipe("meta-2021", scale=0.001), load_recipe("meta-2021", scale=0.001, zipf=1)
    assert [f.ids for f in own.features] == [f.ids for f in other.features]
    assert all(len(f.law.step_ends) == 0 for f in other.features)


def test_counters_grow_where_they_must() -> None:
    hot = replace(recipe_of(zipf_feature("a", 10, ids=100)), samples=10**8)
    profile = synthesize_counts(Synthesizer(hot, 10**8))
    assert profile.accesses.dtype == np.uint64
    assert profile.accesses.sum() == 10**10
    assert profile.accesses.max() > 2**31


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": "criteo"}, "criteo-kaggle"),
        ({"name": "avazu", "scale": 0.0}, "--scale"),
        ({"name": "avazu", "scale": float("nan")}, "--scale"),
        ({"name": "avazu", "zipf": -1.0}, "--zipf"),
    ],
)
def test_bad_recipes_are_refused(arguments: dict, named: str) -> None:
    with pytest.raises(OperError, match=named):
        load_recipe(**arguments)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("avazu", scale=0.001)
    with pytest.raises(OperError, match="--samples"):
        Synthesizer(recipe, 0)
    with pytest.raises(OperError, match="--drift"):
        Synthesizer(recipe, 10, drift=1.5)
    with pytest.raises(OperError, match="--order"):
        Synthesizer(recipe, 10, order="random")  # type: ignore[arg-type]
    with pytest.raises(OperError, match="--windows"):
        write_profile(Synthesizer(recipe, 10), tmp_path / "profile", windows=11)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", ORDERS)
def test_orders_put_hot_rows_where_they_say(order: str) -> None:
    synthesizer = Synthesizer(
        recipe_of(zipf_feature("a", 4096)), 200_000, order=order  # type: ignore[arg-type]
    )
    counts = synthesize_counts(synthesizer).accesses.astype(np.float64)
    first_share = counts[:256].sum() / counts.sum()
    if order == "scattered":
        assert first_share < 0.4
    else:
        assert first_share > 0.6
    assert (np.argmax(counts) == 0) or order != "frequency"
