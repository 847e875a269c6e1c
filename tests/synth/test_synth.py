"""The log generator: recipes, logs and profiles against what was asked for."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from scipy import stats
from typer.testing import CliRunner

from oper.base import native
from oper.base.errors import OperError
from oper.cli import synth as cli_synth
from oper.logs import open_log
from oper.logs.batches.batch import Batch
from oper.profiling.profile import Profile
from oper.synth.label_model import BayesAuc
from oper.synth.log_writer import write_log
from oper.synth.profile_writer import synthesize_counts, write_profile
from oper.synth.recipes import (
    KEPT_ROWS,
    CoAccess,
    Feature,
    Law,
    Recipe,
    load_recipe,
)
from oper.synth.synthesizer import ORDERS, Synthesizer, stream_key
from oper.tables.table import Table
from oper.tables.table_file import load_tables
from tests.support.popularity_laws import chances_of, fits


def recipe_of(*features: Feature, share: float = 0.0, samples: int = 10_000) -> Recipe:
    return Recipe("test", features, samples, CoAccess(share, 16), 0.25, {})


def zipf_feature(name: str, rows: int, ids: int = 1, exponent: float = 1.05) -> Feature:
    return Feature(Table(name, rows), Law(rows, exponent), ids)


def values_of(batches: list[Batch], name: str) -> np.ndarray:
    return np.concatenate([b.features[name].values for b in batches])


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_logs_follow_the_law_whatever_the_coaccess(share: float) -> None:
    features = (zipf_feature("a", 40), zipf_feature("b", 3000), zipf_feature("c", 900, ids=4))
    synthesizer = Synthesizer(recipe_of(*features, share=share), 150_000, seed=3)
    batches = list(synthesizer.batches())
    for index, feature in enumerate(features):
        rows = feature.table.rows
        counts = np.bincount(values_of(batches, feature.table.name), minlength=rows)
        key = synthesizer.row_key(index)
        placed = (
            native.ops()
            .place_ranks(torch.arange(rows), rows, ORDERS.index("scattered"), key, False)
            .numpy()
        )
        by_rank = counts[placed]
        assert by_rank.sum() == 150_000 * feature.ids
        if feature.ids == 1 or share == 0:
            assert fits(by_rank, chances_of(feature.law)) > 1e-3
        else:  # the first ids of a class's samples lie in one stratum: less spread than chance
            assert by_rank[:20] == pytest.approx(
                150_000 * 4 * chances_of(feature.law)[:20], rel=0.05
            )


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
    key = synthesizer.row_key(0)
    old = chances_of(feature.law)
    new = np.empty_like(old)
    new[
        native.ops()
        .place_ranks(torch.arange(200), 200, ORDERS.index("frequency"), key, True)
        .numpy()
    ] = old
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


def test_churn_gives_the_places_of_rows_to_new_rows_one_after_the_other() -> None:
    in_use, new, samples = 1000, 400, 200_000
    feature = Feature(Table("a", in_use + new), Law(in_use, 0.8), 1)
    synthesizer = Synthesizer(recipe_of(feature), samples, seed=5, order="frequency")
    values = values_of(list(synthesizer.batches()), "a")  # by frequency, row ids are ranks
    first_seen = np.full(in_use + new, samples)
    np.minimum.at(first_seen, values, np.arange(samples))
    turns = np.arange(new)
    # The new row of turn n appears after n / new of the log, and soon is read as its rank is.
    assert (first_seen[in_use + turns] >= samples * turns / new - 1).all()
    assert np.median(first_seen[in_use + turns] / samples - turns / new) < 0.02
    ranks = np.arange(in_use)
    key = native.ops().place_ranks(
        torch.from_numpy(ranks), in_use, 0, stream_key(synthesizer.row_key(0), "churn"), False
    )
    replaced_by = np.where(key.numpy() < new, in_use + key.numpy(), -1)
    assert sorted(replaced_by[replaced_by >= 0]) == list(range(in_use, in_use + new))
    last_seen = np.zeros(in_use + new, dtype=np.int64)
    np.maximum.at(last_seen, values, np.arange(samples))
    gone = np.flatnonzero(replaced_by >= 0)
    turn = replaced_by[gone] - in_use
    assert (last_seen[gone] <= samples * (turn + 1) / new + 1).all()
    by_rank = np.bincount(values, minlength=in_use + new)
    together = by_rank[:in_use] + np.where(replaced_by >= 0, by_rank[replaced_by], 0)
    assert together.sum() == samples
    assert fits(together, chances_of(feature.law)) > 1e-3


def test_recipes_with_churn_keep_the_rows_of_tables_and_spare_small_ones() -> None:
    plain, churned = (load_recipe("avazu", scale=0.001, churn=c) for c in (0.0, 0.25))
    assert plain.tables == churned.tables
    for before, after in zip(plain.features, churned.features, strict=True):
        rows = before.table.rows
        assert after.law.rows == (rows if rows <= KEPT_ROWS else math.ceil(rows / 1.25))
    pooled = load_recipe("meta-2021", scale=0.0001, churn=1.0)
    assert all(f.law.rows <= f.table.rows for f in pooled.features)
    assert any(f.law.rows < f.table.rows for f in pooled.features)
    with pytest.raises(OperError, match="expected a share from 0 to 1"):
        load_recipe("avazu", churn=1.5)


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
    assert profile.bag_lengths is not None
    batches = list(synthesizer.batches())
    for table, feature in enumerate(recipe.features):
        rows, name = feature.table.rows, feature.table.name
        logged = np.bincount(values_of(batches, name), minlength=rows)
        samples = np.concatenate(
            [
                np.repeat(
                    b.location.first + np.arange(b.samples), np.diff(b.features[name].offsets())
                )
                for b in batches
            ]
        )
        pairs = np.unique(np.stack([samples, values_of(batches, name)]), axis=1)
        contained = np.bincount(pairs[1], minlength=rows)
        drawn_lengths, drawn_bags = profile.bag_lengths.of_table(table)
        lengths = np.concatenate([np.diff(b.features[name].offsets()) for b in batches])
        assert drawn_bags.sum() == 80_000
        distinct = profile.bag_lengths.distinct[table]
        assert distinct == profile.table_samples_with_row(table).sum()
        assert drawn_lengths @ drawn_bags == profile.table_accesses(table).sum()
        logged_bags = np.bincount(lengths, minlength=int(drawn_lengths.max()) + 1)
        of_profile = np.zeros(len(logged_bags))
        of_profile[drawn_lengths] = drawn_bags
        each = (of_profile - logged_bags) / np.sqrt(np.maximum(of_profile + logged_bags, 1))
        assert np.abs(each).max() < 5.5
        for drawn, real in (
            (profile.table_accesses(table), logged),
            (profile.table_samples_with_row(table), contained),
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
    digests = [
        Profile.load(tmp_path / f"profile{number}", check=True).digest for number in range(3)
    ]
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
    assert [(t.name, t.rows) for t in load_tables(written.tables)] == [
        ("a", 500),
        ("b", 90),
        ("c", 40),
    ]
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


def test_bayes_auc_is_that_of_the_true_chances() -> None:
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


def test_windows_are_the_whole(tmp_path: Path) -> None:
    synthesizer = Synthesizer(load_recipe("avazu", scale=0.001), 10_001, drift=0.5)
    write_profile(synthesizer, tmp_path / "profile", windows=4)
    parts = [Profile.load(f"{tmp_path / 'profile'}@{w}") for w in range(4)]
    whole = Profile.load(tmp_path / "profile")
    assert whole.samples == sum(p.samples for p in parts) == 10_001
    np.testing.assert_array_equal(whole.accesses, sum(p.accesses.astype(np.int64) for p in parts))


def test_zipf_replaces_the_law() -> None:
    assert {f.law.exponent for f in load_recipe("criteo-kaggle", zipf=1.3).features} == {1.3}
    own, other = (
        load_recipe("meta-2021", scale=0.001),
        load_recipe("meta-2021", scale=0.001, zipf=1),
    )
    assert [f.ids for f in own.features] == [f.ids for f in other.features]
    assert all(len(f.law.step_ends) == 0 for f in other.features)


def test_counters_grow_where_they_must() -> None:
    hot = recipe_of(zipf_feature("a", 10, ids=100))
    for samples, dtype in ((10**8, np.uint32), (2 * 10**8, np.uint64)):
        profile = synthesize_counts(Synthesizer(hot, samples))
        assert profile.accesses.dtype == dtype
        assert profile.accesses.sum() == samples * 100
        expected = samples * 100 * chances_of(hot.features[0].law)[0]
        assert profile.accesses.max() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": "criteo"}, "criteo-kaggle"),
        ({"name": "avazu", "scale": 0.0}, "scale="),
        ({"name": "avazu", "scale": float("nan")}, "scale="),
        ({"name": "avazu", "zipf": -1.0}, "zipf="),
    ],
)
def test_bad_recipes_are_refused(arguments: dict, named: str) -> None:
    with pytest.raises(OperError, match=named):
        load_recipe(**arguments)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("avazu", scale=0.001)
    with pytest.raises(OperError, match=r"`samples`|samples="):
        Synthesizer(recipe, 0)
    with pytest.raises(OperError, match=r"`drift`|drift="):
        Synthesizer(recipe, 10, drift=1.5)
    with pytest.raises(OperError, match=r"`order`|order="):
        Synthesizer(recipe, 10, order="random")  # type: ignore[arg-type]
    with pytest.raises(OperError, match=r"`windows`|windows="):
        write_profile(Synthesizer(recipe, 10), tmp_path / "profile", windows=11)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", ORDERS)
def test_orders_put_hot_rows_where_they_say(order: str) -> None:
    synthesizer = Synthesizer(
        recipe_of(zipf_feature("a", 4096)),
        200_000,
        order=order,  # type: ignore[arg-type]
    )
    counts = synthesize_counts(synthesizer).accesses.astype(np.float64)
    first_share = counts[:256].sum() / counts.sum()
    if order == "scattered":
        assert first_share < 0.4
    else:
        assert first_share > 0.6
    assert (np.argmax(counts) == 0) or order != "frequency"


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)  # or typer would make the only verb the command itself
    cli_synth.register(app)
    return app


def test_command_writes_a_log(command: typer.Typer, tmp_path: Path) -> None:
    log = tmp_path / "log.parquet"
    arguments = "synth criteo-kaggle --scale 0.0001 --samples 500 --drift 20% --seed 3 --json -o"
    result = CliRunner().invoke(command, [*arguments.split(), str(log)])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["samples"], said["drift"], said["seed"]) == (500, 0.2, 3)
    assert said["rows"] == sum(t.rows for t in load_tables(said["tables"]))
    assert 0.5 < said["bayes_auc"] < 1
    assert said["click_rate"] == pytest.approx(load_recipe("criteo-kaggle").clicks, abs=0.05)
    assert sum(b.samples for b in open_log([log]).batches()) == 500


def test_command_writes_a_profile(command: typer.Typer, tmp_path: Path) -> None:
    folder = str(tmp_path / "profile")
    arguments = "synth avazu --scale 0.001 --zipf 1.2 --dim 8 --counts --windows 3 -o"
    result = CliRunner().invoke(command, [*arguments.split(), folder])
    assert result.exit_code == 0, result.output
    assert "40,429 samples of 20 tables" in result.stdout
    profile = Profile.load(folder)
    assert profile.samples == 40_429
    assert {t.dim for t in profile.tables} == {8}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("avazu -o log.csv", "log.csv"),
        ("avazu -o log.parquet --windows 2", "--windows"),
        ("avazu -o log.parquet --drift x", "--drift"),
        ("avazu -o log.parquet --churn 20% --counts", "--churn 20%: expected no --counts"),
        ("kaggle -o log.parquet", "criteo-kaggle"),
    ],
)
def test_command_refuses(command: typer.Typer, tmp_path: Path, arguments: str, named: str) -> None:
    given = [str(tmp_path / a) if a.startswith("log.") else a for a in arguments.split()]
    result = CliRunner().invoke(command, ["synth", *given, "--scale", "0.001"])
    assert isinstance(result.exception, OperError)
    assert named in str(result.exception)
    assert list(tmp_path.iterdir()) == []
