"""Profiling a sample of the samples, and the error that follows.

Each sample is taken with chance q, by a seeded hash of its number in the log, so that the choice
is the same in every run. A row with c accesses in the log then has about x ~ Poisson(q c) in the
sample (x / q estimates c with a relative standard error of √((1 − q) / x)). For plans two things
follow:

- hot set: some of the truly hottest 1 % of rows are not among the sample's. The counts x alone
  tell how many: with g the distribution of q c over rows, found from the histogram of x by
  maximum likelihood (expectation maximisation on a grid: Laird 1978), τ the count that divides
  the sample's hottest from the rest, and the truly hottest those above g's quantile, the share
  missed is the mean of P(Poisson(q c) < τ), ties in part, over them; the share of their accesses
  the same weighted by c. What both sets share of the sampled accesses is left out of account, so
  for large q the estimate is high: it is scaled by √(1 − q), as noise is.
- balance: a rank's share p of the lookups comes from the sample with a standard error of
  √((1 − q) Σ_s (n_s − p L_s)²) / X, n_s of the L_s accesses of sample s being the rank's, X = Σ L_s.
  It is measured, with rows dealt to ranks by a hash, so that it counts how accesses of a sample go
  together; the report is relative to p, the root mean square over ranks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oper.errors import OperError
from oper.planner.scan import histogram

if TYPE_CHECKING:
    from oper.planner.profile import Profile

Floats = NDArray[np.float64]

HOT_SHARE = 0.01
class Sampling: pass
