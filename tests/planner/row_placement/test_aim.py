"""What swaps make small, against the cost of every row in every holder set."""

from typing import Literal

import numpy as np
import pytest

from oper.cost.holder_sets import single_owner_sets
from oper.cost.objective import evaluate
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.place_pooled import unplaced
from oper.planner.problem.problem import make_problem
from oper.planner.row_placement.aim import aimed_at, aimed_directions
from oper.profiling.profile import Profile
from oper.topology.relays import relayed
from tests.planner.test_place_pooled import M, profiled, topology


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profiled(tmp_path_factory.mktemp("p"), 1, (60, 50))


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("balance", ["time", "link"])
@pytest.mark.parametrize("pooled", [("t0",), ("t0", "t1")])
def test_directions_of_pooled_tables_and_others_are_what_their_rows_cost(
    profile: Profile,
    mode: str,
    fetch: str,
    balance: Literal["time", "link"],
    pooled: tuple[str, ...],
) -> None:
    workload = Workload(mode, fetch, 64)  # type: ignore[arg-type]
    settings = PlanSettings(extra_memory=0.2, balance=balance)
    fetched = relayed(topology(), fetch == "distinct")
    ranks = unplaced(profile, fetched, workload.training, frozenset(pooled))
    problem = make_problem(profile, ranks, workload, settings, by_table=True)
    sets = single_owner_sets(M)
    directions = aimed_directions(problem, sets)
    for c in range(0, len(problem.classes), 3):
        for owner in range(M):
            counts = np.zeros((len(problem.classes), M), dtype=np.int64)
            counts[c, owner] = 1
            limits = (problem.classes.sums(counts), problem.capacity_bytes)
            cost = evaluate(problem.topology, problem.workload, sets, *limits)
            moved = sum(bytes[c] * columns[owner] for bytes, columns in directions)
            np.testing.assert_allclose(moved, aimed_at(problem, cost), rtol=1e-9)
