"""Popularity laws in NumPy, one rank after the other, and a test of counts against them."""

import numpy as np
from scipy import stats

from oper.synth.recipes import Law


def weights_of(law: Law) -> np.ndarray:
    """The weight of every rank, one by one."""
    if len(law.step_ends):
        return np.repeat(law.step_weights, np.diff(law.step_ends, prepend=0))
    return np.arange(1.0, law.rows + 1) ** -law.exponent


def chances_of(law: Law) -> np.ndarray:
    weights = weights_of(law)
    return weights / weights.sum()


def fits(counts: np.ndarray, chances: np.ndarray) -> float:
    """p-value of a chi-square test, ranks of few expected counts taken together."""
    expected = chances * counts.sum()
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    kept = wanted > 0
    return float(stats.chisquare(observed[kept], wanted[kept]).pvalue)
