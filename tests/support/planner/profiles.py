"""Small profiles for tests, and the problems they make."""

from typing import Literal

import numpy as np

from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.topology import Topology


def make_profile(seed: int, rows: tuple[int, ...] = (40, 3, 1, 25), bags: bool = True) -> Profile:
    """Zipf-like counts in tables of mixed widths; the second table has bags."""
    random = np.random.default_rng(seed)
    tables = tuple(
        Table(name=f"t{t}", rows=n, dim=(16, 8)[t % 2], features=(f"f{t}",))
        for t, n in enumerate(rows)
    )
    total = sum(rows)
    accesses = (random.zipf(1.3, total) % 400).astype(np.uint32)
    bagged = tuple(bags and t == 1 for t in range(len(rows)))
    samples = 1000
    samples_with_row = [
        np.minimum(accesses[begin : begin + n], samples) // 2
        for begin, n, has in zip(np.cumsum((0, *rows)), rows, bagged, strict=False)
        if has
    ]
    return Profile(
        tables=tables,
        samples=samples,
        accesses=accesses,
        samples_with_row=np.concatenate([np.zeros(0, np.uint32), *samples_with_row]).astype(
            np.uint32
        ),
        bagged=bagged,
        distinct=None,
        source={},
    )


def profile_problem(
    profile: Profile,
    topology: str = "2x2-a100",
    mode: Literal["training", "inference"] = "inference",
    extra: float = 0.2,
    threshold: float = 0.05,
) -> Problem:
    """The problem of a profile at a global batch of 64, raw fetches."""
    settings = PlanSettings(extra_memory=extra, threshold=threshold)
    return make_problem(profile, Topology.load(topology), Workload(mode, "raw", 64), settings)
