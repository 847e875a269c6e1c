"""The programme that knows what moves cost: free ones reach what a new plan does, dear ones are not
made."""

import pytest

from oper.cost.workload import Workload
from oper.plan.row_locator import RowLocator
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.planner.price_plan import price_counts
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.problem import make_problem
from oper.planner.replan.migration.flows import net_flows
from oper.planner.replan.migration.migration_cost import MigrationCost
from oper.planner.replan.programme_with_moves import (
    LAST_GAIN,
    FreeMoves,
    MovableRows,
    WantedRows,
    counts_by_programme,
)
from tests.planner.replan.test_replan import random_links
from tests.support.planner.drifting import drifted


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("balance", ["time", "link"])
@pytest.mark.parametrize("seed", [0, 2])
def test_free_moves_gain_all_and_dear_ones_are_not_made(mode, balance, seed) -> None:
    first, second = drifted(seed, rows=(9000, 400, 1))
    topology, workload = random_links(), Workload(mode, "raw", 512)
    asked = PlanSettings(0.02, balance=balance)
    plan = assemble(make_placement(first, topology, workload, asked))
    problem = make_problem(second, topology, workload, asked, plan.limits)
    free = FreeMoves.of(problem)
    locator = RowLocator(plan, free.placement.holder_sets)
    sets = locator.holder_sets
    now = locator.by_holder_set(locator.count(ClassFinder(second, problem.classes)))
    moving = MigrationCost.of(sets, sets, topology)

    def wanted_rows(times_price: float) -> WantedRows:
        rows = MovableRows(problem, sets, now, moving.seconds * times_price, free)
        return counts_by_programme([rows])[0]

    dear = wanted_rows(1e6)
    flows = net_flows(now, dear.counts, moving)
    assert not moving.seconds[flows.before, flows.after].any()  # copies may be given up

    wanted = wanted_rows(1e-9)
    assert (wanted.counts.sum(axis=1) == now.sum(axis=1)).all()
    assert wanted.times_price >= 1
    if balance == "time":
        before, after = (
            price_counts(problem, sets, counts).objective_seconds for counts in (now, wanted.counts)
        )
        least = free.placement.seconds
        assert before > 1.005 * least
        # Rows are whole, and buckets are averages: over six seeds 2.6 to 4.7 % of the gain are left
        # in inference (of a third of the rows 0.2 to 9.7 %, so that chance decides).
        assert after - least <= (LAST_GAIN + 0.05) * (before - least)
