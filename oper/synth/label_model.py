"""The true model of a synthetic log's labels, and the AUC of the best possible predictor.

A sample is clicked with probability 1 / (1 + e^-logit), where

    logit = bias + Σ_i w_i x_i + Σ_t a / √(ids of t) · Σ_ids effect(t, id)

x are the 13 dense values, standard normal, and effect(t, row) is a seeded hash of the row, uniform
with mean 0 and variance 1. The bias gives the first batch the recipe's share of clicks. A
predictor that knew this model would reach the Bayes AUC; one that learns from the log knows little
about rare rows, as with real logs.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.logs.batches.batch import Jagged
from oper.synth.recipes import Recipe

DENSE_COLUMNS = tuple(f"I{i}" for i in range(1, 14))

# Variances of the logit from the dense values, and from all tables together. They are chosen so
# that the Bayes AUC is near 0.8, which the best models reach on the Criteo logs.
_DENSE_VARIANCE = 0.4
_TABLES_VARIANCE = 1.2
_HASH_RANGE = 1 << 52  # a double holds every value plus one half exactly


class LabelModel:
    """The logits of a recipe's samples; `key` seeds the weights."""

    def __init__(self, recipe: Recipe, key: int) -> None:
        weights = np.random.default_rng(key).standard_normal(len(DENSE_COLUMNS))
        self._dense_weights = weights * math.sqrt(_DENSE_VARIANCE / (weights @ weights))
        used = sum(1 for f in recipe.features if f.ids > 0)
        self._effect_scale = math.sqrt(_TABLES_VARIANCE / max(1, used))
        self._key = key
        self._clicks = recipe.clicks
        self._bias: float | None = None

    def effect(self, table: int, ids: Jagged) -> NDArray[np.float64]:
        """Return the contribution of one feature's ids to the logit of each sample: float64
        [samples]."""
        import torch

        hashed = native.ops().place_ranks(
            torch.from_numpy(ids.values), _HASH_RANGE, 0, (self._key + table) >> 1, False
        )
        uniform = (hashed.numpy() + 0.5) / _HASH_RANGE
        effects = self._effect_scale * math.sqrt(12) * (uniform - 0.5)
        if ids.lengths is None:
            return effects
        samples = len(ids.lengths)
        sums = np.bincount(np.repeat(np.arange(samples), ids.lengths), effects, minlength=samples)
        return sums / np.sqrt(np.maximum(ids.lengths, 1))

    def logits(
        self, dense: NDArray[np.float32], effects: Sequence[NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Return the logits of samples: dense [samples, 13], the effects of each feature [samples].

        The first batch determines the bias.
        """
        logits = dense.astype(np.float64) @ self._dense_weights
        for effect in effects:
            logits += effect
        if self._bias is None:
            self._bias = _bias_for(logits, self._clicks)
        return logits + self._bias


def _bias_for(logits: NDArray[np.float64], clicks: float) -> float:
    """Return the addend of the logits for a mean probability of `clicks`."""
    from scipy.optimize import brentq

    def excess(bias: float) -> float:
        return float(np.mean(1 / (1 + np.exp(-(logits + bias))))) - clicks

    return float(brentq(excess, -50, 50))


class BayesAuc:
    """The area under the ROC curve of the true probabilities, expected over the labels.

    A pair of samples counts p_i (1 - p_j), won if logit_i > logit_j and half won in a tie. Logits
    are binned by 1/128, which changes the area by less than 1e-5.
    """

    _RANGE, _BINS = 16.0, 4096

    def __init__(self) -> None:
        self._clicks = np.zeros(self._BINS)
        self._others = np.zeros(self._BINS)

    def add(self, logits: NDArray[np.float64]) -> None:
        """Add the logits of further samples."""
        scaled = (logits + self._RANGE) * (self._BINS / (2 * self._RANGE))
        bins = np.clip(scaled, 0, self._BINS - 1).astype(np.int64)
        chances = 1 / (1 + np.exp(-logits))
        self._clicks += np.bincount(bins, chances, minlength=self._BINS)
        self._others += np.bincount(bins, 1 - chances, minlength=self._BINS)

    @property
    def value(self) -> float:
        """The area, from ½ to 1."""
        below = np.cumsum(self._others) - self._others / 2
        return float(self._clicks @ below / (self._clicks.sum() * self._others.sum()))
