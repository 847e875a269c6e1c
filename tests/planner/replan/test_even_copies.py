"""Rows that change when a plan is made again are spread over the ranks: as copies, and by ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.held_out import churning_windows
from oper.cost.workload import Workload
from oper.plan.plan_parts import plans_of_memories
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import priced_under, problems_of_memories
from oper.planner.replan.migration.flows import Flows
from oper.planner.replan.migration.rows_to_move import _in_turn
from oper.planner.replan.replan import plan_again
from oper.topology.topology import Topology

pytestmark = pytest.mark.usefixtures("small_programmes")


def test_new_rows_are_read_from_all_ranks_alike() -> None:
    """80 % of the next window's reads are of new rows. When copies filled the memory in the order
    of the ranks, two of eight ranks served twice as many of them as the others."""
    first, second, third = churning_windows(3, 0.25)
    topology = Topology.load("2x4-a100").with_capacity("1.2")
    plan = make_plan(first, topology, Workload("inference"))
    again = plan_again(plan, second).plan
    (problem,) = problems_of_memories(again, third, as_counted=True)
    (priced,) = priced_under(plans_of_memories(again), [problem])
    lookups = priced.cost.lookups
    assert lookups.min() > 0.85 * lookups.max()
    copies = [
        int(priced.by_holder_set[:, k].sum())
        for k in np.flatnonzero(priced.holder_sets.copies == topology.nodes)
    ]
    assert len(copies) == topology.ranks // topology.nodes
    assert min(copies) > 0.9 * max(copies)


flows = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(2, 5), st.integers(1, 9)),
    min_size=1,
    max_size=8,
    unique_by=lambda flow: flow[:3],
)


@given(flows)
def test_rows_of_a_class_take_their_new_columns_in_turn(given_flows: list[tuple[int, ...]]) -> None:
    """Any run of a group's rows has, of each new column, its share within a row."""
    columns = [np.array(each, dtype=np.int64) for each in zip(*given_flows, strict=True)]
    found = Flows(*columns)
    after = _in_turn(found)
    start = 0
    for group in sorted({flow[:2] for flow in given_flows}):
        rows = {flow[2]: flow[3] for flow in given_flows if flow[:2] == group}
        total = sum(rows.values())
        mine = after[start : start + total]
        start += total
        for column, number in rows.items():
            so_far = np.cumsum(mine == column)
            assert so_far[-1] == number
            expected = number * np.arange(1, total + 1) / total
            assert (abs(so_far - expected) <= 2).all()
    assert start == len(after)
