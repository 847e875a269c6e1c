"""The curve of predicted steps over memory."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner import memory_curve as module
from oper.planner.assemble_plan import assemble
from oper.planner.make_plan import place_fetched
from oper.planner.memory_curve import memory_curve
from oper.planner.place_pooled import predicted_seconds
from oper.topology.topology import Topology
from scripts.plan_digests import profile as counted
from tests.support.examples import examples

SHARES = (0.0, 0.1)


@examples(5)
@given(
    seed=st.integers(0, 5),
    preset=st.sampled_from(["dgx-a100", "2x2-a100", "2x2-h100:1"]),
    mode=st.sampled_from(["training", "inference"]),
    fetch=st.sampled_from([None, "raw", "pooled"]),
    extra_memory=st.sampled_from([None, 0.1, 1.0]),
    samples=st.sampled_from([16, 4096]),
)
@example(  # a placement in more memory has a 7 % longer step here, and gives way
    seed=0, preset="dgx-a100", mode="training", fetch=None, extra_memory=0.3, samples=4096
)
def test_the_step_never_rises_with_memory(
    seed: int, preset: str, mode: str, fetch: str | None, extra_memory: float | None, samples: int
) -> None:
    topology = Topology.load(preset)
    workload = Workload(mode, fetch, samples * topology.ranks)  # type: ignore[arg-type]
    planned = place_fetched(counted(seed), topology, workload, PlanSettings(extra_memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SHARES", SHARES)
        points, placement = memory_curve(planned, topology)
    assert [p.extra_memory for p in points] == sorted({p.extra_memory for p in points})
    steps = [point.step_seconds for point in points]
    assert steps == sorted(steps, reverse=True)
    (mine,) = (point for point in points if point.plan)
    assert mine.step_seconds == predicted_seconds(placement) <= predicted_seconds(planned)
    assert mine.objective_seconds == placement.cost.objective_seconds
    assert placement.problem.asked == planned.problem.asked
    assert (placement.cost.memory_bytes <= placement.problem.capacity_bytes).all()
    gaps = [point.certified_gap for point in points if point.certified_gap is not None]
    assert all(gap >= -1e-9 for gap in gaps)
    plan = assemble(placement)
    assert plan.step_time is not None
    assert plan.step_time.seconds == mine.step_seconds
