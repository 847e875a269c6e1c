"""Fit the pooled popularity law of Meta's 2021 data set to its published reuse histogram.

    python scripts/fit_reuse.py ../shared/data/dlrm_datasets_locality.json ROWS

The histogram has the shares of the rows accessed in a batch of 65,536 samples, and of the accesses,
with 1, 2, 3-4, 5-8 … accesses. If row k has Poisson(λ_k) of them, both are linear in the number of
rows at each λ of a grid: non-negative least squares finds these, with the numbers of accessed rows,
of accesses and of all rows as further equations. Prints the steps of oper/data/workloads.yaml,
[rows, λ] from the hottest on. ROWS are those of all tables that are looked up.
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import nnls
from scipy.stats import poisson

FILE = "fbgemm_t856_bs65536.pt"
RATES = 2.0 ** np.arange(-6, 17.5, 0.5)
ROUNDING = 0.0005  # of the published shares


def main(path: Path, rows: float) -> None:
    """Fit and print."""
    published = json.loads(path.read_text(encoding="utf-8"))["years"]["2021"]
    facts = next(record for record in published if record["file"] == FILE)
    unique, accesses = facts["unique_rows"], facts["indices"]
    bounds = np.array([0, *(low_high[1] or np.inf for low_high in facts["rows_hist"])])
    below = poisson.cdf(bounds[:, None], RATES)  # [bins + 1, rates]
    rows_in_bin = np.diff(below, axis=0)
    # Σ k P(k) over a bin is λ times the chance of k - 1 in it.
    accesses_in_bin = RATES * np.diff(poisson.cdf(bounds[:, None] - 1, RATES), axis=0)
    equations: list[tuple[np.ndarray, float, float]] = [
        (np.ones_like(RATES), rows, 1e-5),
        (1 - below[0], unique, 1e-4),
        (RATES, accesses, 1e-4),
    ]
    for j, (row_bin, access_bin) in enumerate(
        zip(facts["rows_hist"], facts["access_hist"], strict=True)
    ):
        # A share of rows printed as 0.000 has less information than the accesses of the same bin.
        if row_bin[2]:
            tolerance = ROUNDING / row_bin[2]
            equations.append((rows_in_bin[j], row_bin[2] * unique, tolerance))
        tolerance = ROUNDING / access_bin[2]
        equations.append((accesses_in_bin[j], access_bin[2] * accesses, tolerance))
    matrix = np.array([left / (right * error) for left, right, error in equations])
    counts, residual = nnls(matrix, np.array([1 / error for _, _, error in equations]))
    print(
        f"# root mean square of the misfit over the rounding: {residual / len(matrix) ** 0.5:.2g}"
    )
    for rate, count in zip(RATES[::-1], counts[::-1], strict=True):
        if count >= 0.5:
            print(f"    - [{count:.0f}, {rate:.6g}]")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
