"""Tables of a few rows in two memories, and the ranks' times in every placement of them."""

import itertools
from typing import NamedTuple

import numpy as np

from oper.cost.holder_sets import everywhere_set, single_owner_sets
from oper.cost.objective import evaluate
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.problem.problem import ClassProblem
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.planner.drifting import make_profile
from tests.support.planner.tiers import with_hosts


class Tiny(NamedTuple):
    """What a plan with a tier is made from: a table on the devices and one in the tier."""

    profile: Profile
    topology: Topology
    workload: Workload
    asked: PlanSettings


def tiny(seed: int) -> Tiny:
    """Two or three ranks, alike or not, and up to four rows in each memory."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 4))
    cost = random.choice([1e-9, 2e-9, 1e-8], (ranks, ranks))
    if random.random() < 0.5:
        cost = np.where(np.eye(ranks), 1e-9, 4e-9)
    latency = Latency.of_hops(float(random.choice([0.0, 1e-7])))
    bare = Topology(
        "tiny", (0,) * ranks, cost, 1e10, latency, capacity=float(random.choice([2, 4]))
    )
    topology = with_hosts(random, bare)
    tables = tuple(Table(name, int(random.integers(1, 5)), dim=4) for name in "ab")
    counts = [random.choice([0, 1, 5, 40, 300], table.rows) for table in tables]
    extra = float(random.choice([0.0, 0.7]))
    return Tiny(
        make_profile(tables, counts),
        topology,
        Workload("training", "raw", 64),
        PlanSettings(extra, tier=("b",)),
    )


def all_times(problem: ClassProblem) -> np.ndarray:
    """The ranks' times in every placement of single rows within the limits, [placements, M]."""
    ranks, classes = problem.ranks, problem.classes
    sets = single_owner_sets(ranks)
    if (ranks - 1) * classes.m.min() <= problem.budget_bytes:
        sets = sets + everywhere_set(ranks)
    each = np.repeat(np.arange(len(classes)), classes.rows)
    holders = np.array(list(itertools.product(range(len(sets)), repeat=len(each))))
    counts = np.zeros((len(holders), len(classes), len(sets)), dtype=np.int64)
    np.add.at(counts, (np.arange(len(holders))[:, None], each, holders), 1)
    found = []
    for placed in np.unique(counts, axis=0):  # equal rows are interchangeable
        cost = evaluate(
            problem.topology, problem.workload, sets, classes.sums(placed), problem.capacity_bytes
        )
        if cost.feasible and cost.extra_bytes <= problem.budget_bytes:
            found.append(cost.rank_seconds)
    return np.stack(found)


def least_seconds(devices: ClassProblem, tier: ClassProblem) -> float:
    """The least that the slowest rank takes in any placement of both memories."""
    return float((all_times(devices)[:, None] + all_times(tier)[None]).max(axis=2).min())
