"""Plans with a tier for tests: random hosts, tables and tiers, and what their figures must be."""

from dataclasses import replace

import numpy as np

from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.plan.settings import PlanSettings
from oper.profiling.profile import Profile
from oper.topology.topology import Topology
from tests.support.planner.drifting import cost_row_by_row, drifting, random_topology


def with_hosts(random: np.random.Generator, topology: Topology) -> Topology:
    """The same with hosts whose links are slower or faster than those between the ranks."""
    rates = random.choice([1e9, 25e9, 900e9], topology.ranks if random.random() < 0.3 else 1)
    return replace(
        topology,
        host_bandwidth=tuple(np.resize(rates, topology.ranks).tolist()),
        host_memory_bytes=(int(random.choice([2**20, 2**40])),) * topology.ranks,
    )


def drawn(seed: int, number: int = 1) -> tuple[list[Profile], Topology, Workload, PlanSettings]:
    """Profiles of a few tables whose hot rows change, a topology with hosts, and any tier."""
    random = np.random.default_rng(seed)
    profiles = drifting(random, number)
    names = [table.name for table in profiles[0].tables]
    tier = random.choice(names, random.integers(1, len(names) + 1), replace=False).tolist()
    topology = with_hosts(random, random_topology(random))
    fetch = ("raw", "distinct")[random.integers(2)]
    workload = Workload("training", fetch, int(random.choice([64, 4096])))  # type: ignore[arg-type]
    extra = float(random.choice([0.0, 0.05, 0.3]))
    return profiles, topology, workload, PlanSettings(extra, threshold=0.05, tier=tier)


def rank_seconds_row_by_row(plan: Plan, profile: Profile) -> np.ndarray:
    """T of each rank under a profile: the rows of each memory priced one by one, on its own links,
    and added up."""
    return sum(cost.rank_seconds for _, cost in parts_row_by_row(plan, profile))


def parts_row_by_row(plan: Plan, profile: Profile):
    """Each memory's plan, and what its rows cost."""
    others = np.setdiff1d(np.arange(len(plan.tables)), plan.tier).tolist()
    numbers = [tables for tables in (others, list(plan.tier)) if tables]
    for part, tables in zip(plans_of_memories(plan), numbers, strict=True):
        yield part, cost_row_by_row(part, profile.select(tables))


def assert_figures_are_true(plan: Plan, profile: Profile) -> None:
    """Each part's figures are those of its rows, and the whole's their sums."""
    for part, cost in parts_row_by_row(plan, profile):
        for name in ("rank_seconds", "link_bytes", "memory_bytes", "lookups"):
            expected = getattr(cost, name)
            assert np.allclose(getattr(part.cost, name), expected, rtol=1e-9, atol=1e-30)
    seconds = rank_seconds_row_by_row(plan, profile)
    assert np.allclose(plan.cost.rank_seconds, seconds, rtol=1e-9)
    assert plan.cost.objective_seconds == plan.cost.rank_seconds.max()
    assert plan.owner_accesses.sum() + plan.replica_accesses == profile.accesses.sum()
