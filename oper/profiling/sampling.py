"""Profile a sample of a log's samples, and estimate the error.

Each sample is chosen with probability q, by a seeded hash of its position in the log, so that every
run chooses the same ones. A row that c samples of the log contain is in x of the chosen ones; x / q
estimates c with a relative standard error of √((1 − q) / x). This affects plans in two ways:

- hot set: some of the hottest 1 % of rows are not among the sample's hottest. Rows are modelled as
  Poisson: x with mean λ, and the part of c that was not chosen with mean λ (1 − q) / q. The
  distribution g of λ over rows comes from the histogram of x by maximum likelihood (Laird 1978;
  expectation maximisation on a grid); rows drawn from it are ranked by x and by c, and the share
  of the hottest by c that the ranking by x misses, and of their c, is the estimate.
- balance: with rows assigned to M ranks by a hash, rank r serves n_s of the L_s accesses of sample
  s, and its share p = Σ n_s / X of all X has a standard error of √((1 − q) Σ_s (n_s − p L_s)²) / X
  (the ratio estimator's). The result is its root mean square over ranks, relative to p. It uses the
  samples themselves, so that it holds for correlated accesses too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.base.portable_math import dot, exp, geometric_steps, log
from oper.base.spoken import option
from oper.logs.batches.batch import Batch
from oper.profiling.counter_arrays import RowCounts

# The "hottest 1 %" of rows, as reports call them: a round number, no plan depends on it.
HOT_SHARE = 0.01
# SplitMix64's increment (2^64 over the golden ratio).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Twice as many values of λ change the estimates by less than their own error.
_GRID = 200
# After so many rounds the steps of expectation maximisation are far below that error.
_ROUNDS = 300
_DRAWN_ROWS = 1_000_000  # Ten thousand of them are hot, which leaves an error of 1 %.


@dataclass(frozen=True)
class Sampling:
    """Choose each sample with probability `share`, by `seed`."""

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OperError(
                f"{option('--sample', self.share)}: expected a share above 0, at most 1"
            )
        if not 0 <= self.seed < 1 << 64:
            raise OperError(f"{option('--seed', self.seed)}: expected 0 to 2^64 - 1")

    def chosen(self, first: int, samples: int) -> NDArray[np.bool_]:
        """Return a mask of the chosen samples among the log's samples first … first + samples − 1:
        bool [samples]."""
        number = np.arange(first, first + samples, dtype=np.uint64)
        start = _mix(np.array([self.seed], dtype=np.uint64) + _GOLDEN)
        hashed = _mix(number * _GOLDEN + start)
        # 53 bits: a double holds them exactly.
        uniform = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        chosen: NDArray[np.bool_] = uniform < self.share
        return chosen


class RankShares:
    """Balance of the chosen samples' accesses over ranks, with rows assigned by a hash."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._of_rank = np.zeros(ranks)  # Σ n
        self._squared = np.zeros(ranks)  # Σ n²
        self._with_all = np.zeros(ranks)  # Σ n L
        self._all_squared = 0.0  # Σ L²

    def add(self, batch: Batch, table_of: Mapping[str, int]) -> None:
        """Count a batch of row ids; `table_of` is the table of each of its features."""
        flat = np.zeros(batch.samples * self.ranks)
        for key, table in table_of.items():
            ids = batch.features[key]
            row = ids.values.astype(np.uint64) + np.uint64(table << 40)
            rank = (_mix(row * _GOLDEN) % np.uint64(self.ranks)).astype(np.int64)
            sample = np.arange(batch.samples)
            if ids.lengths is not None:
                sample = np.repeat(sample, ids.lengths)
            flat += np.bincount(sample * self.ranks + rank, minlength=len(flat))
        n = flat.reshape(batch.samples, self.ranks)
        all_ranks = n.sum(axis=1)
        self._of_rank += n.sum(axis=0)
        self._squared += (n**2).sum(axis=0)
        self._with_all += dot(all_ranks, n)
        self._all_squared += float(dot(all_ranks, all_ranks))

    def relative_error(self, share: float) -> float:
        """Return the relative standard error of a rank's share of the lookups, over ranks."""
        total = self._of_rank.sum()
        p = self._of_rank / max(total, 1.0)
        if not p.all():
            return 1.0  # the share of a rank without an access cannot be estimated
        variance = self._squared - 2 * p * self._with_all + p**2 * self._all_squared
        relative = np.sqrt((1 - share) * np.maximum(variance, 0)) / (total * p)
        return float(np.sqrt((relative**2).mean()))


@dataclass(frozen=True)
class SamplingError:
    """Error of a sample's counts, as fractions; see the module's docstring."""

    share: float
    seed: int
    hot_share: float
    hot_rows_missed: float
    hot_accesses_missed: float
    ranks: int
    rank_lookups_error: float

    def to_dict(self) -> dict[str, Any]:
        """Return the errors as the profile and `oper profile --json` hold them."""
        return asdict(self)


@dataclass(frozen=True)
class Sampled:
    """Share of a log's samples that was counted, and its error; the error is None in sums of
    profiles, each of which has its own."""

    share: float
    error: SamplingError | None = None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Sampled":
        """Invert `to_dict`."""
        return cls(content["share"], SamplingError(**content) if "hot_share" in content else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as `oper profile --json` prints it."""
        return {"share": self.share} if self.error is None else self.error.to_dict()


def sampling_error(counts: RowCounts, sampling: Sampling, shares: RankShares) -> SamplingError:
    """Return the errors to expect of plans from the counts of a sample."""
    rows_missed, accesses_missed = hot_missed(*_rows_with_counts(counts), sampling.share)
    return SamplingError(
        sampling.share,
        sampling.seed,
        HOT_SHARE,
        rows_missed,
        accesses_missed,
        shares.ranks,
        shares.relative_error(sampling.share),
    )


def hot_missed(x: Ints, rows: Ints, share: float) -> tuple[float, float]:
    """Return the expected shares of the log's hottest rows, and of their accesses, that are not
    among the hottest of a sample of `share`, in which `rows[n]` rows are in `x[n]` samples each."""
    if share >= 1:
        return 0.0, 0.0
    if not x.any():
        return 1.0, 1.0
    rate, weight = poisson_mixture(x, rows)
    random = np.random.default_rng(0)
    drawn = np.repeat(rate, random.multinomial(_DRAWN_ROWS, weight))
    sampled = random.poisson(drawn)
    counted = sampled + random.poisson(drawn * (1 - share) / share)
    hot = int(HOT_SHARE * _DRAWN_ROWS)

    def hottest(count: NDArray[np.int64]) -> NDArray[np.int64]:
        ties = random.random(_DRAWN_ROWS)
        return np.argpartition(-(count + ties), hot)[:hot]

    is_found = np.zeros(_DRAWN_ROWS, dtype=bool)
    is_found[hottest(sampled)] = True
    wanted = hottest(counted)
    missed = ~is_found[wanted]
    accesses = float(counted[wanted].sum())
    return float(missed.mean()), float(counted[wanted][missed].sum()) / max(accesses, 1.0)


def poisson_mixture(x: Ints, rows: Ints) -> tuple[Floats, Floats]:
    """Return Poisson rates, and the share of rows with each, by maximum likelihood: float64 [G]
    each.

    `rows[n]` rows have count `x[n]`.
    """
    most = max(int(x.max(initial=0)), 1)
    rate = np.concatenate([[1e-9], geometric_steps(0.02, 2 * most, _GRID)])
    # Counts from 33 on are binned within a few percent, far below their own noise.
    edges = np.unique(
        np.concatenate([np.arange(33), geometric_steps(33, most + 33, 200).astype(int)])
    )
    bin_of = np.searchsorted(edges, x, side="right") - 1
    number = np.bincount(bin_of, rows)
    mean = np.bincount(bin_of, rows * x)[number > 0] / number[number > 0]
    number = number[number > 0]
    # The logarithm of the Poisson probability, up to terms that do not depend on the rate.
    likelihood = mean[:, None] * log(rate) - rate
    likelihood = exp(likelihood - likelihood.max(axis=1, keepdims=True))
    weight = np.full(len(rate), 1 / len(rate))
    for _ in range(_ROUNDS):
        joint = likelihood * weight
        weight = dot(number / joint.sum(axis=1), joint)
        weight /= weight.sum()
    return rate, weight


def _rows_with_counts(counts: RowCounts) -> tuple[Ints, Ints]:
    """Return the numbers of samples with a row that occur, and the number of rows of each."""
    _, _, samples_with_row, rows = counts.histogram()
    x, of = np.unique(samples_with_row, return_inverse=True)
    return x, np.bincount(of, rows).astype(np.int64)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
