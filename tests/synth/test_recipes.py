"""Recipes of the published workloads: their tables, their sizes and their reuse of rows."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oper.files.json_file import read_json
from oper.synth.recipes import (
    KEPT_ROWS,
    load_recipe,
    workload_names,
)

# Number of tables, rows of all of them, of the first, and of the largest.
PUBLISHED_ROWS = {
    "criteo-kaggle": (26, 33_762_577, 1_460, 10_131_227),
    "criteo-terabyte": (26, 882_774_559, 227_605_432, 292_775_614),
    "criteo-terabyte-40m": (26, 204_184_588, 40_000_000, 40_000_000),
    "avazu": (20, 8_930_581, 8, 6_385_037),
    "meta-2021": (856, 2_328_942_965, 8_015_999, 12_543_669),
    "syn-small": (100, 838_860_800, 8_388_608, 8_388_608),
    "syn-large": (300, 2_516_582_400, 8_388_608, 8_388_608),
}


def test_every_workload_has_its_published_tables_below() -> None:
    assert set(workload_names()) == set(PUBLISHED_ROWS)


@pytest.mark.parametrize("name", PUBLISHED_ROWS)
def test_recipes_have_the_published_tables(name: str) -> None:
    rows = [t.rows for t in load_recipe(name).tables]
    assert (len(rows), sum(rows), rows[0], max(rows)) == PUBLISHED_ROWS[name]
    dim = 16 if name in ("criteo-kaggle", "avazu") else 64
    assert {t.dim for t in load_recipe(name).tables} == {dim}
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
