"""The limits that devices set: what they leave for rows, and shares of three digits."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.step_memory import DeviceStep, ProcessorStep, StepMemory
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import shares_up_to
from oper.planner.make_placement import Watch, place
from oper.planner.problem.problem import RESERVE, Problem, make_problem, round_down
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from oper.topology.transports import STAGE_BYTES
from tests.support.examples import examples
from tests.support.planner.profiles import make_profile

pytestmark = pytest.mark.usefixtures("small_programmes")

TABLES = (900, 40, 7)


def device_problem(
    memory: tuple[int, ...], mode: str, reserve: float | None = None, seed: int = 1
) -> Problem:
    """Of ranks on nodes of their own, where replicas pay in training too."""
    topology = replace(
        Topology.load(f"{len(memory)}x1-a100"),
        device_memory_bytes=memory,
        latency=Latency.of_hops(1e-12),
    )
    workload = Workload(mode, "raw", 2048)  # type: ignore[arg-type]
    return make_problem(
        make_profile(seed, TABLES), topology, workload, PlanSettings(reserve=reserve)
    )


def beside_a_step(
    memory: tuple[int, ...], mode: str, reserve: float | None = None, seed: int = 1
) -> Problem:
    """Of devices that hold so much beside what a step takes but for replicas."""
    step = device_problem(memory, mode, reserve, seed).step_memory.batch_bytes
    more = math.ceil(step / (1 - (RESERVE if reserve is None else reserve)))
    return device_problem(tuple(size + more for size in memory), mode, reserve, seed)


@given(st.floats(0, 1e5, allow_subnormal=False))
def test_round_down_is_the_last_share_not_above(share: float) -> None:
    rounded = round_down(share)
    assert rounded <= share
    assert rounded == float(f"{rounded:.3g}")
    if rounded > 0:
        assert share < rounded * 1.0101
    assert round_down(rounded) == rounded


@given(st.floats(0, 300, allow_subnormal=False).map(round_down))
def test_shares_are_all_of_three_digits_up_to_the_most(most: float) -> None:
    shares = shares_up_to(most)
    assert shares == sorted(set(shares))
    assert shares[0] == 0
    assert shares[-1] == most
    assert all(share == float(f"{share:.3g}") for share in shares)
    assert all(after <= before * 1.0101 for before, after in pairwise(shares[1:]))


@examples(15)
@given(
    st.sampled_from(["training", "inference"]),
    st.lists(st.integers(50_000, 400_000), min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from([None, 0.0, 0.5]),
    st.integers(0, 3),
)
@example("training", [105_930] * 3, True, 0.0, 0)  # whose AllReduce would not fit beside all rows
def test_plans_fit_beside_the_reserve_the_mailbox_and_the_allreduce(
    mode: str, sizes: list[int], equal: bool, reserve: float | None, seed: int
) -> None:
    problem = beside_a_step(tuple(sizes[:1] * len(sizes) if equal else sizes), mode, reserve, seed)
    memory = problem.topology.memory_for_plans
    assert memory is not None
    try:
        limits = DeviceLimits.of(problem)
    except OperError:
        return
    kept = RESERVE if reserve is None else reserve
    event(f"{mode}, {limits.most_allreduce_bytes > 0=}")
    for extra in (limits.most_extra / 3, limits.most_extra):
        planned = place(limits.within(extra), Watch(lambda step: None))
        figures = planned.cost
        assert (
            figures.memory_bytes + figures.step_bytes <= np.array(memory) * (1 - kept) + 2
        ).all()
        assert planned.cost.feasible
        # In bytes, so that neither a preset nor a reserve changes it later.
        assert planned.problem.topology.capacity == tuple(figures.capacity_bytes.astype(int))


def test_the_most_is_nearly_all_there_is() -> None:
    """A sixteenth more extra memory would not fit beside its AllReduce, but for a row a rank."""
    for mode in ("training", "inference"):
        problem = beside_a_step((60_000,) * 3, mode)
        limits = DeviceLimits.of(problem)
        assert 0 < limits.most_extra < 2
        assert (limits.most_allreduce_bytes > 0) == (mode == "training")
        more = problem.classes.total_bytes * (1 + 1.0625 * limits.most_extra) / 3 + 2 * 100
        assert more + 1.0625 * limits.most_allreduce_bytes > 48_000


@given(
    st.sampled_from(["training", "inference"]),
    st.integers(1, 4),
    st.integers(4, 10_000),
    st.integers(0, 5),
)
def test_a_step_is_of_the_ranks_accesses_and_the_widest_rows(
    mode: str, ranks: int, batch: int, seed: int
) -> None:
    profile = make_profile(seed, TABLES)
    of_profile = profile.accesses.sum(dtype=np.int64)

    def step_of(topology: Topology) -> StepMemory:
        workload = Workload(mode, "raw", batch)  # type: ignore[arg-type]
        return make_problem(profile, topology, workload, PlanSettings()).step_memory

    step = step_of(Topology.load(f"1x{ranks}-h100"))
    assert isinstance(step, DeviceStep)
    assert step.accesses * profile.samples * ranks == pytest.approx(of_profile * batch, rel=1e-9)
    assert (step.dim, step.ranks, step.training) == (16, ranks, mode == "training")
    assert step.gradient_ratio == 1
    on_cpu = step_of(Topology.load(f"cpu:{ranks}"))
    assert isinstance(on_cpu, ProcessorStep)
    assert (on_cpu.batch_bytes > 0) == (mode == "training")
    assert on_cpu.batch_bytes <= step.accesses * (8 + 4 * 16)


def test_rows_on_all_ranks_are_the_most() -> None:
    assert DeviceLimits.of(device_problem((10**9,) * 3, "inference")).most_extra == 2


def test_devices_that_cannot_hold_the_tables() -> None:
    with pytest.raises(
        OperError, match=r"number of ranks that is enough is \d+.*20% \(`?reserve`?"
    ):
        DeviceLimits.of(beside_a_step((20_000,) * 3, "inference"))
    with pytest.raises(OperError, match=r"nothing is left for rows.*`?extra_memory`?"):
        DeviceLimits.of(device_problem((1,) * 3, "training"))


def test_with_nvshmem_no_rank_has_more_rows_than_the_smallest_device_holds() -> None:
    """All ranks have as much symmetric memory as the one with the most rows."""
    memory = (23_000 + STAGE_BYTES, 400_000 + STAGE_BYTES, 400_000 + STAGE_BYTES)
    problem = beside_a_step(memory, "inference", reserve=0.0)
    usual = place(DeviceLimits.of(problem).within(0.5), Watch(lambda step: None))
    assert max(usual.cost.memory_bytes) > 23_000
    by_gets = replace(problem, topology=replace(problem.topology, transport="nvshmem"))
    limits = DeviceLimits.of(by_gets)
    assert set(limits.room.capacities(0.0)) == {23_000}
    planned = place(limits.within(limits.most_extra), Watch(lambda step: None))
    assert max(planned.cost.memory_bytes) <= 23_000


def test_with_nvshmem_a_step_has_the_distinct_rows_of_its_batch() -> None:
    problem = device_problem((10**9,) * 3, "inference")
    by_gets = replace(problem, topology=replace(problem.topology, transport="nvshmem"))
    distinct = replace(by_gets, workload=replace(by_gets.workload, fetch="distinct"))
    usual = problem.step_memory.batch_bytes
    assert by_gets.step_memory.batch_bytes == usual  # raw
    accesses = usual / 48
    widest = max(problem.classes.width_memory)
    found = distinct.step_memory.batch_bytes
    assert found == pytest.approx(usual + accesses * (69 + 1.25 * widest))
