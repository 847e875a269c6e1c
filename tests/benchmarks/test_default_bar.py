"""OPER's default plan is at most 1.02 times as long as any other method's, predicted and simulated.

Three cases of `benchmarks/planning/default_bar.py`, with small tables and batches.
"""

import pytest

from benchmarks.planning.default_bar import TARGET, measure
from benchmarks.planning.simulated_placements import asked_here
from benchmarks.planning.simulated_step import Mode

pytest.importorskip("torchrec")
pytestmark = pytest.mark.check

METHODS = ("paper", "access_greedy", "row_wise", "table_wise")
CASES: tuple[tuple[int, str, Mode, float], ...] = (
    (1, "dgx-h100", "inference", 0.0),
    (1, "2x2-h100", "training", 0.0),
    (20, "2x2-h100", "training", 0.01),
)


@pytest.mark.parametrize(("bag", "topology", "mode", "noise"), CASES)
def test_the_default_plan_is_never_longer_than_others(
    bag: int, topology: str, mode: Mode, noise: float
) -> None:
    (case,) = measure([topology], [bag], [mode], [noise], 0.005, 2048, METHODS, asked_here)
    assert case["predicted"] <= TARGET, case["predicted_seconds"]
    assert case["simulated"] <= TARGET, case["simulated_seconds"]
