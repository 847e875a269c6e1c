"""Fit the correlation of the features of a Criteo-like sample to the real log.

    python scripts/fit_coaccess.py ../shared/data/criteo_kaggle_80k/data.parquet

The statistic I(h) is the mean over the 325 pairs of the 26 features of the mutual information, in
nats, between their h most frequent values, all others taken together; an empty field is a value;
less (k - 1)(l - 1) / 2n, its bias for independent features with k and l values in n samples. For
each number of latent classes the share of samples that follow one is bisected until a generated log
of as many samples, full size, has the real log's I(16). The number of classes is the one that comes
closest to its I(64) then. The script prints both for `coaccess` in oper/data/workloads.yaml.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oper.synth.recipes import CoAccess, load_recipe
from oper.synth.synthesizer import Synthesizer

WORKLOAD = "criteo-kaggle"
CLASSES = (8, 16, 32, 64, 128)
STEPS = 10  # of the bisection: the share to 1/1024


def main(path: Path) -> None:
    """Measure, fit and print."""
    log = pq.read_table(path)
    recipe = load_recipe(WORKLOAD)
    names = [t.name for t in recipe.tables]
    real = [log[name].to_numpy() for name in names]
    target, check = mean_information(real, 16), mean_information(real, 64)
    print(f"real log, {log.num_rows:,} samples: I(16) {target:.4f}, I(64) {check:.4f}")
    for classes in CLASSES:
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            share = (low + high) / 2
            coaccess = CoAccess(share, classes)
            synthesizer = Synthesizer(replace(recipe, coaccess=coaccess), log.num_rows)
            batches = list(synthesizer.batches())
            made = [np.concatenate([b.features[name].values for b in batches]) for name in names]
            fitted = mean_information(made, 16)
            low, high = (share, high) if fitted < target else (low, share)
        print(
            f"{classes} classes, share {share:.3f}: I(16) {fitted:.4f}, "
            f"I(64) {mean_information(made, 64):.4f}"
        )


def mean_information(columns: Sequence[NDArray[np.int64]], hot: int) -> float:
    """Return I(hot) of a log's columns, in nats."""
    places = [hottest(c, hot) for c in columns]
    pairs = itertools.combinations(places, 2)
    return float(np.mean([information(a, b, hot + 1) for a, b in pairs]))


def hottest(column: NDArray[np.int64], hot: int) -> NDArray[np.int64]:
    """Return the place of each value among the `hot` most frequent ones, and `hot` for all
    others."""
    _, value, counts = np.unique(column, return_inverse=True, return_counts=True)
    place = np.full(len(counts), hot)
    order = np.argsort(-counts, kind="stable")[:hot]
    place[order] = np.arange(len(order))
    return place[value]


def information(a: NDArray[np.int64], b: NDArray[np.int64], values: int) -> float:
    """Return the mutual information of two columns of values 0 … values - 1, minus its bias."""
    samples = len(a)
    joint = np.bincount(a * values + b, minlength=values**2).reshape(values, values) / samples
    rows, columns = joint.sum(1), joint.sum(0)
    present = joint > 0
    independent = np.outer(rows, columns)[present]
    bias = (np.count_nonzero(rows) - 1) * (np.count_nonzero(columns) - 1) / (2 * samples)
    return float(joint[present] @ np.log(joint[present] / independent)) - bias


if __name__ == "__main__":
    main(Path(sys.argv[1]))
