"""Replan for other tables and ranks: exact placements, rows that stay, moves that are counted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject

from oper.plan.plan import Plan
from oper.plan.validate import validate
from oper.planner.make_placement import InfeasibleError
from oper.planner.replan.replan import replan
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.profile import Profile
from oper.tables.table import Table, offsets
from oper.topology.capacity import CapacityError
from oper.topology.topology import Topology
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import (
    assert_exact,
    cost_row_by_row,
    make_profile,
    planned,
    random_topology,
    seeds,
    slots_of,
)
from tests.support.planner.instances import zipf_counts

pytestmark = pytest.mark.usefixtures("small_programmes")


def counts_for(random: np.random.Generator, tables) -> Profile:
    return make_profile(
        tables, [random.permutation(zipf_counts(t.rows, 15 * t.rows, 1.05)) for t in tables]
    )


def changed_tables(random: np.random.Generator, tables) -> tuple[Table, ...]:
    """Some tables with more rows, without some, with new ones, in another order."""
    kept = [t for t in tables if random.random() < 0.7] or [tables[0]]
    grown = [
        replace(t, rows=t.rows + int(random.integers(0, t.rows // 2 + 3)))
        if random.random() < 0.6
        else t
        for t in kept
    ]
    new = [
        Table(f"new{n}", int(random.choice([1, 50, 1200])), dim=int(random.choice([8, 16, 24])))
        for n in range(int(random.integers(0, 3)))
    ]
    tables = [*grown, *new]
    return tuple(tables[n] for n in random.permutation(len(tables)))


def old_ids(old: Plan, new: Plan) -> np.ndarray:
    """The id in the old plan of each row of the new one; -1: it has none."""
    first = dict(zip((t.name for t in old.tables), offsets(old.tables).tolist(), strict=False))
    rows = {t.name: t.rows for t in old.tables}
    ids = []
    for table in new.tables:
        number = np.arange(table.rows)
        known = number < rows.get(table.name, 0)
        ids.append(np.where(known, first.get(table.name, 0) + number, -1))
    return np.concatenate(ids)


def held_before(old: Plan, new: Plan) -> np.ndarray:
    """The slots in the old plan of each row of the new one, on the ranks of both; -1: none."""
    ids, slots = old_ids(old, new), slots_of(old)
    more = max(new.ranks - old.ranks, 0)
    slots = np.pad(slots, ((0, 0), (0, more)), constant_values=-1)
    return np.where(ids[:, None] >= 0, slots[ids], -1)


def assert_counted_right(old: Plan, found) -> None:
    """The moves lead to the new slots, and rows and bytes are those that a row by row look at both
    plans finds."""
    new, moves = found.plan, found.moves.entries
    before, ranks = held_before(old, new), found.plan.ranks
    after = slots_of(new)
    known = old_ids(old, new) >= 0
    memory = np.repeat(
        [t.memory_bytes(new.workload.mode) for t in new.tables], [t.rows for t in new.tables]
    )
    arrives = (after >= 0) & (before[:, :ranks] < 0)
    assert found.migration.rows == (arrives.any(axis=1) & known).sum()
    assert found.migration.link_bytes == (arrives.sum(axis=1) * memory)[known].sum()
    assert found.migration.placed_rows == (~known).sum()
    assert found.migration.placed_bytes == (arrives.sum(axis=1) * memory)[~known].sum()
    # The entries, carried out: what is not in them is where it was, on ranks that are left.
    reached = before[:, :ranks].copy()
    for entry in moves:
        assert before[entry["row"], entry["source_rank"]] == entry["source_slot"]
    reached[moves["row"]] = -1
    reached[moves["row"], moves["rank"]] = moves["slot"]
    assert (reached[known] == after[known]).all()


def assert_no_worse_for_more(found) -> None:
    worse = found.new_seconds > found.fresh_seconds * (1 + 1e-9)
    assert not worse or found.migration.link_bytes <= found.fresh_migration.link_bytes


def assert_right(old: Plan, found, profile: Profile) -> None:
    validate(found.plan)
    assert_exact(found.plan)
    assert_counted_right(old, found)
    assert_no_worse_for_more(found)
    cost = cost_row_by_row(found.plan, profile)
    for name in ("rank_seconds", "link_bytes", "memory_bytes"):
        assert np.allclose(getattr(found.plan.cost, name), getattr(cost, name), rtol=1e-9), name
    assert found.new_seconds <= found.old_seconds * (1 + 1e-9)


@at_least(20)
@given(seeds)
@examples(40)
def test_other_tables(seed):
    random = np.random.default_rng(seed)
    old = some_plan(seed)
    profile = counts_for(random, changed_tables(random, old.tables))
    found = replanned(old, profile, int(random.choice([1, 100, 10**6])))
    assert_right(old, found, profile)


@at_least(20)
@given(seeds)
@examples(40)
def test_other_ranks(seed):
    random = np.random.default_rng(seed)
    old = some_plan(seed)
    tables = changed_tables(random, old.tables) if random.random() < 0.3 else old.tables
    profile, topology = counts_for(random, tables), random_topology(random)
    horizon = int(random.choice([1, 100, 10**6]))
    found = replanned(old, profile, horizon, topology)
    assert found.plan.ranks == topology.ranks
    assert_right(old, found, profile)
    # Then it is a plan for that topology, which the same counts leave as it is.
    again = replan(found.plan, profile, horizon, topology=topology)
    assert again.carried_over is None
    assert len(again.moves.entries) == 0


def some_plan(seed: int) -> Plan:
    """A plan, or one that was made from it, with rows that are not where they were striped."""
    old, (_, newer) = planned(seed, 2)
    return replan(old, newer, 10**6).plan if seed % 2 else old


def replanned(
    old: Plan, profile: Profile, horizon: int, topology: Topology | None = None
) -> Replanned:
    """The plan. Examples are left out whose ranks cannot hold the tables."""
    try:
        return replan(old, profile, horizon, topology=topology)
    except (CapacityError, InfeasibleError):
        reject()
