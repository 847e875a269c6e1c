"""Profiling a sample of the samples, and the error that follows.

Each sample is taken with chance q, by a seeded hash of its number in the log, so that the choice
is the same in every run. A row that c samples read is then counted x ~ Binomial(c, q) times, and
x / q estimates c with standard error √(c (1 − q) / q), relative √((1 − q) / x). Two things follow
for plans, both with x / q in the place of the unknown c:

- hot set: with τ the count that divides the sample's hottest 1 % of rows from the rest, a truly
  hot row (x / q in the hottest 1 %) is missed by another such sample with chance
  P(Binomial(c, q) < τ), and with the share of ties that stay outside for P(= τ). The report is
  the expected share of those rows that is missed, and of their accesses.
- balance: a rank that serves one M-th of X counted accesses serves that share up to a relative
  standard error of √((M − 1) (1 − q) / X), accesses taken as independent.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oper.errors import OperError
from oper.planner.scan import histogram

if TYPE_CHECKING:
    from oper.planner.profile import Profile

HOT_SHARE = 0.01

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sampling:
    """Take each sample with chance `share`, chosen by `seed`."""

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OperError(f"--sample {self.share:g}: a share above 0 and at most 1 was needed")

    def chosen(self, first: int, samples: int) -> NDArray[np.bool_]:
        """Which of the log's samples first … first + samples − 1 are taken: bool [samples]."""
        number = np.arange(first, first + samples, dtype=np.uint64)
        hashed = _mix(number * _GOLDEN + _mix(np.array([self.seed], dtype=np.uint64) + _GOLDEN))
        # 53 bits, as a double holds them exactly.
        uniform = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return uniform < self.share

    def to_dict(self) -> dict[str, Any]:
        """The sampling as JSON holds it."""
        return asdict(self)


@dataclass(frozen=True)
class SamplingError:
    """What a sample's counts may miss; shares as fractions. See the module's head."""

    share: float
    hot_share: float
    hot_rows_missed: float
    hot_accesses_missed: float
    ranks: int
    rank_lookups_error: float

    def to_dict(self) -> dict[str, Any]:
        """The errors as `oper profile --json` names them, with how each is computed."""
        return asdict(self) | {
            "computed": {
                "hot_rows_missed": "Σ over the sample's hottest rows of P(Binomial(x/q, q) falls "
                "outside the hottest), over their number",
                "hot_accesses_missed": "the same, weighted by accesses",
                "rank_lookups_error": "√((M−1)(1−q)/X), relative standard error of a rank's "
                "lookups, X accesses counted",
            }
        }


def sampling_error(profile: "Profile", ranks: int) -> SamplingError:
    """The error of a sampled profile, for the hot set and for a balance over `ranks` ranks."""
    share = float(profile.source["sampled"]["share"])
    _, x, _, rows = histogram(
        profile.accesses,
        np.zeros(0, profile.accesses.dtype),
        np.array([0, profile.rows], dtype=np.int64),
        np.array([0, 0], dtype=np.int64),
    )
    missed_rows, missed_accesses = _hot_missed(x, rows, share)
    accesses = float(x @ rows)
    error = ((ranks - 1) * (1 - share) / accesses) ** 0.5 if accesses else 0.0
    return SamplingError(share, HOT_SHARE, missed_rows, missed_accesses, ranks, error)


def _hot_missed(x: NDArray[np.int64], rows: NDArray[np.int64], share: float) -> tuple[float, float]:
    """Expected shares missed of the hottest rows and of their accesses; x descending."""
    from scipy.stats import binom

    wanted = max(1.0, HOT_SHARE * float(rows.sum()))
    before = np.concatenate([[0.0], np.cumsum(rows)[:-1]])
    hot = np.clip(wanted - before, 0.0, rows)  # rows of each count that are among the hottest
    hot[x == 0] = 0.0  # rows never seen are no hot ones, however few others there are
    last = int(np.flatnonzero(hot)[-1]) if hot.any() else 0
    cut, ties_outside = x[last], 1.0 - hot[last] / rows[last]
    counts, sampled = hot[: last + 1], np.rint(x[: last + 1] / share)
    missed = binom.cdf(cut - 1, sampled, share) + ties_outside * binom.pmf(cut, sampled, share)
    weight = counts * x[: last + 1]
    if not weight.sum():
        return 0.0, 0.0
    return float(missed @ counts / counts.sum()), float(missed @ weight / weight.sum())


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
