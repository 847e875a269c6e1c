"""OPER's default plan is at most 1.02 times as long as any other method's, predicted and simulated.

The same cases as `benchmarks/planning/default_bar.py`, with small tables and batches.
"""

from typing import Any

import pytest

from benchmarks.planning.default_bar import TARGET, measure
from benchmarks.planning.simulated_placements import Answer
from oper.planner.baselines.baseline import NoPlacementError, Status

pytest.importorskip("torchrec")
pytestmark = pytest.mark.check

METHODS = ("oper", "paper", "access_greedy", "row_wise", "table_wise")


def answered_here(asked: dict[str, Any]) -> Answer:
    """Answer as TorchRec's planner does, without a process for each question."""
    from oper.planner.baselines.torchrec_process import make_module, plan_once

    found = plan_once(asked, make_module(asked["tables"]), 1.0)
    if found is None:
        raise NoPlacementError(Status.INFEASIBLE, "TorchRec's planner finds no plan")
    return found


@pytest.mark.parametrize("bag", [1, 5, 20])
def test_the_default_plan_is_never_longer_than_others(bag: int) -> None:
    topologies = ("dgx-h100", "2x8-h100", "2x8-h100:1")
    modes = ("training", "inference")
    found = [
        *measure(topologies, [bag], modes, [0.0], 0.002, 512, METHODS, answered_here),
        *measure(["2x8-h100"], [bag], modes, [0.01], 0.002, 512, METHODS, answered_here),
    ]
    above = {
        (case["topology"], case["mode"], case["noise"], of): case[of]
        for case in found
        for of in ("predicted", "simulated")
        if case[of] > TARGET
    }
    assert not above
    if bag == 20:
        assert any(case["pooled_tables"] for case in found)
