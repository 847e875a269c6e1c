"""Expected reads R, touches D and union U of a row per iteration, from a log's counts (§3.2), and
the touches of the ranks of a node."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.base.portable_math import exp, expm1, log, log1p, log_gamma, power
from oper.cost.workload import Workload


def expected_reads(
    accesses: NDArray[Any],
    samples_with_row: NDArray[Any],
    samples: int,
    workload: Workload,
    ranks: int,
    rank_ratio: Floats | float = 1.0,
    union_ratio: Floats | float = 1.0,
    pooled: NDArray[np.bool_] | bool = False,
) -> tuple[Floats, Floats, Floats]:
    """Return reads R and touches D by one rank, and U by any, per iteration, from a log's counts.

    A = f·b accesses; D = 1 - (1 - s)^b and U = 1 - (1 - s)^(bM), b = batch / ranks, without
    replacement (hypergeometric) if the batch is smaller than the log, else with it (binomial). Both
    are multiplied by the log's measured ratios, if it was profiled for them. R is A if every access
    reads (`raw`, `pooled`, and rows that are `pooled`), and D if a rank fetches a row once
    (`distinct`).
    """
    samples = max(samples, 1)
    per_rank = workload.batch_size / ranks
    reads = accesses.astype(np.float64) / samples * per_rank
    touched = _touched(samples_with_row, samples, per_rank, workload.batch_size)
    union = _touched(samples_with_row, samples, workload.batch_size, workload.batch_size)
    touched = np.minimum(touched * rank_ratio, 1.0)
    union = np.clip(union * union_ratio, touched, np.minimum(1.0, touched * ranks))
    once = (workload.known_fetch == "distinct") & np.logical_not(pooled)
    return np.where(once, touched, reads), touched, union


def node_touches(
    samples_with_row: NDArray[Any],
    samples: int,
    workload: Workload,
    ranks: int,
    sizes: Sequence[int],
    rank_ratio: Floats | float = 1.0,
    union_ratio: Floats | float = 1.0,
) -> Floats:
    """Return the chance that any rank of a node touches the row in an iteration, for nodes of each
    of `sizes` of the `ranks`, [C, sizes].

    Like D and U it is 1 - (1 - s)^(bG) for G ranks. Logs are measured for one rank and for all
    ranks. In between, the ratio is taken to be a power of the number of ranks, so its logarithm is
    interpolated linearly in theirs.
    """
    _, touched, union = expected_reads(
        samples_with_row, samples_with_row, samples, workload, ranks, rank_ratio, union_ratio
    )
    touches = np.zeros((*np.shape(samples_with_row), len(sizes)))
    samples = max(samples, 1)
    for k, size in enumerate(sizes):
        drawn = workload.batch_size * size / ranks
        part = float(log(size) / log(ranks))
        ratio = power(rank_ratio, 1 - part) * power(union_ratio, part)
        of_node = _touched(samples_with_row, samples, drawn, workload.batch_size) * ratio
        touches[..., k] = np.clip(of_node, touched, np.minimum(union, touched * size))
    return touches


def _touched(samples_with_row: NDArray[Any], samples: int, drawn: float, batch: int) -> Floats:
    """Return the chance that one of `drawn` samples is among the `samples_with_row` of
    `samples`."""
    s = np.minimum(samples_with_row.astype(np.float64), samples)
    if batch >= samples:
        with np.errstate(divide="ignore"):
            return -expm1(drawn * log1p(-s / samples))
    # C(n - s, b) / C(n, b) by log-gamma; if fewer than b samples lack the row, it is certain.
    rest = samples - s
    missed = np.zeros_like(s)
    some = rest >= drawn
    # log C(n-s, b)/C(n, b) = Σ_{i<s} log(1 - b/(n-i)). For s far below n - b the middle term times
    # s is exact to 1e-5; differences of log-gammas, used elsewhere, lose digits there.
    n, few_s = float(samples), s[some]
    middle = n - (few_s - 1) / 2
    product = few_s * log1p(-np.minimum(drawn / middle, 1 - 1e-16))
    gammas = log_gamma(n - few_s + 1) - log_gamma(n - few_s - drawn + 1)
    gammas += log_gamma(n - drawn + 1) - log_gamma(n + 1)
    log_missed = np.where(few_s < 0.01 * (n - drawn), product, gammas)
    missed[some] = exp(np.minimum(log_missed, 0.0))
    return 1.0 - missed
