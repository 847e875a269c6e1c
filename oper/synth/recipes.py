"""Recipes for synthetic logs of the published workloads, read from workloads.yaml.

A recipe has one feature per table: the popularity of the table's rows by rank (its law), the number
of ids per sample, and the correlation of a sample's features. With churn a law has fewer rows than
its table: the others replace some of them in the course of the log. Laws are bounded Zipf, P(rank
r) ∝ (r + 1)^-z for r = 0 … rows - 1, or steps: ranks up to a bound share one weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from oper.base.arrays import as_int64, as_tensor
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.tables.table import Table
from oper.tables.table_file import load_tables

# Tables of up to this many rows keep their size under --scale, and none is scaled below it: days of
# the week and device types do not shrink with a sample of the log. Our choice.
KEPT_ROWS = 256


@dataclass(frozen=True)
class Law:
    """Popularity of `rows` rows by rank: Zipf of `exponent`, or steps if there are any.

    step_ends int64 [J] ascending, the last one `rows`; step_weights float64 [J], each the weight
    of one row in its step, descending.
    """

    rows: int
    exponent: float = 0.0
    step_ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    step_weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))

    @cached_property
    def arguments(self) -> tuple[float, Any, Any]:
        """Law in the form for the native kernels."""
        return self.exponent, as_int64(self.step_ends), as_tensor(self.step_weights)

    @cached_property
    def hottest_share(self) -> float:
        """P(rank 0), within 1e-8."""
        if len(self.step_ends):
            sizes = np.diff(self.step_ends, prepend=0)
            first = int(np.argmax(sizes > 0))
            return float(self.step_weights[first] / (sizes @ self.step_weights))
        head = min(self.rows, 10_000)
        total = float(np.sum(np.arange(1.0, head + 1) ** -self.exponent))
        start, end, power = head + 0.5, self.rows + 0.5, 1 - self.exponent
        # The rest of the sum is approximated by its integral.
        total += math.log(end / start) if power == 0 else (end**power - start**power) / power
        return 1 / total


@dataclass(frozen=True)
class Feature:
    """A table with the law of its rows in use, and its ids per sample: exactly, or Poisson's mean
    if `varying`. The table's rows beyond the law's are new ones: each replaces a row in use."""

    table: Table
    law: Law
    ids: float
    varying: bool = False

    @property
    def bagged(self) -> bool:
        """True if a sample may have several ids."""
        return self.varying or self.ids != 1


@dataclass(frozen=True)
class CoAccess:
    """A latent class model of samples: a `share` of them belongs to one of `classes` classes.

    The distribution function of each law is cut into as many equal strata, and the first id of each
    feature of such a sample is drawn from the stratum of its class in this table. All strata are
    equally likely, so each feature's ids follow their law exactly.
    """

    share: float
    classes: int


@dataclass(frozen=True)
class Recipe:
    """A log to generate: features in table order; `samples` in the whole log."""

    name: str
    features: tuple[Feature, ...]
    samples: int
    coaccess: CoAccess
    clicks: float
    source: dict[str, Any]

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, in order."""
        return tuple(f.table for f in self.features)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def ids_per_sample(self) -> float:
        """Mean over samples of the ids of all features."""
        return sum(f.ids for f in self.features)


def workload_names() -> tuple[str, ...]:
    """Return the names of the workloads that have a recipe."""
    return tuple(_facts())


def load_recipe(
    name: str,
    *,
    scale: float = 1.0,
    zipf: float | None = None,
    dim: int | None = None,
    churn: float = 0.0,
) -> Recipe:
    """Return the recipe of a published workload.

    `scale` multiplies the samples and the rows of each table, but tables of up to KEPT_ROWS rows
    keep their size and none falls below it. `zipf` is an exponent to use instead of the workload's
    own law, `dim` the values per row instead of its own. `churn` is the share of the rows in use
    that new rows replace by the end of the log, in tables of more than KEPT_ROWS rows: of a table's
    rows a share 1 / (1 + churn) is in use at any time.

    Raise OperError if `name` is unknown or a number out of range.
    """
    if name not in _facts():
        raise OperError(f"workload {name!r}: is unknown; there are {', '.join(workload_names())}")
    if not 0 < scale < math.inf:
        raise OperError(f"{option('--scale', scale)}: expected a number above 0")
    if zipf is not None and not 0 <= zipf <= 10:
        raise OperError(f"{option('--zipf', zipf)}: expected an exponent from 0 to 10")
    if not 0 <= churn <= 1:
        raise OperError(f"{option('--churn', churn)}: expected a share from 0 to 1")
    facts = _facts()[name]
    published = load_tables(name, dim=facts["dim"] if dim is None else dim)
    tables = tuple(replace(t, rows=_scaled(t.rows, scale)) for t in published)
    exponent = facts.get("zipf") if zipf is None else zipf
    if "reuse" in facts:
        features = _pooled_features(published, tables, facts["reuse"], exponent, churn)
    else:
        ids = facts["ids"]
        per_table = ids if isinstance(ids, list) else [ids] * len(tables)
        features = tuple(
            Feature(t, Law(_in_use(t.rows, churn), exponent), n)
            for t, n in zip(tables, per_table, strict=True)
        )
    return Recipe(
        name=name,
        features=features,
        samples=max(1, round(facts["samples"] * scale)),
        coaccess=CoAccess(**facts["coaccess"]),
        clicks=facts["clicks"],
        source={"workload": name, "scale": scale, "zipf": exponent, "churn": churn},
    )


def _facts() -> dict[str, Any]:
    text = resources.files("oper.synth").joinpath("workloads.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def _scaled(rows: int, scale: float) -> int:
    return rows if rows <= KEPT_ROWS else max(KEPT_ROWS, round(rows * scale))


def _in_use(rows: int, churn: float) -> int:
    return rows if rows <= KEPT_ROWS else math.ceil(rows / (1 + churn))


def _pooled_features(
    published: Sequence[Table],
    tables: Sequence[Table],
    reuse: dict[str, Any],
    zipf: float | None,
    churn: float,
) -> tuple[Feature, ...]:
    """Return features whose rows, taken together, follow one law of accesses per row and sample.

    The row of rank r among the n of table t has the accesses of the pooled law at quantile (r +
    v_t) / n, with the v_t spread evenly over [0, 1): so the few hottest rows are in the right
    number of tables. Bags are those of the `published` tables, so a scaled one has more accesses
    per row and sample. Tables of one row are those that are never looked up.
    """
    rows, accesses = np.array(reuse["steps"], dtype=np.float64).T
    quantiles = np.cumsum(rows) / rows.sum()
    quantiles[-1] = 1.0
    golden_ratio = (math.sqrt(5) - 1) / 2
    features = []
    for index, (whole, table) in enumerate(zip(published, tables, strict=True)):
        phase = (index * golden_ratio) % 1.0

        def ends(count: int, phase: float = phase) -> NDArray[np.int64]:
            return np.maximum(np.ceil(quantiles * count - phase), 0).astype(np.int64)

        in_batch = float(np.diff(ends(whole.rows), prepend=0) @ accesses)
        ids = in_batch / reuse["batch"] if whole.rows > 1 else 0.0
        in_use = _in_use(table.rows, churn)
        if zipf is None:
            law = Law(in_use, step_ends=ends(in_use), step_weights=accesses)
        else:
            law = Law(in_use, zipf)
        features.append(Feature(table, law, ids, varying=True))
    return tuple(features)
