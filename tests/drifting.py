"""Plans and drifted profiles for the tests of drift and replan, and what holds between two plans."""

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from oper.cost import Groups, Workload, evaluate
from oper.errors import OperError
from oper.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan import Plan
from oper.planner.assemble import assemble
from oper.planner.classes import group
from oper.planner.moves import Moves
from oper.planner.planner import Settings, make_plan
from oper.planner.profile import Profile
from oper.tables import Table, offsets
from oper.topology import Topology
from tests.instances import topologies, workloads, zipf_counts

SAMPLES = 10_000


def make_profile(tables, accesses) -> Profile:
    """A profile of counts alone; every second table has bags."""
    bagged = tuple(t % 2 == 1 for t in range(len(tables)))
    counts = [np.asarray(a, dtype=np.uint32) for a in accesses]
    containing = [a - a // 3 for a, has in zip(counts, bagged, strict=True) if has]
    none = np.zeros(0, np.uint32)
    return Profile(
        tables, SAMPLES, np.concatenate(counts), np.concatenate([none, *containing]), bagged
    )


@st.composite
def drifting(draw: st.DrawFn, most_profiles: int = 2) -> list[Profile]:
    """Profiles of the same tables, of one or two widths, whose hot rows change by and by."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dims = draw(st.sampled_from([(16,), (8, 32)]))
    rows = draw(st.lists(st.sampled_from([1, 7, 60, 500]), min_size=1, max_size=4))
    tables = tuple(Table(f"t{t}", n, dim=dims[t % len(dims)]) for t, n in enumerate(rows))
    exponent, drift = draw(st.floats(0.3, 1.6)), draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    now = [random.permutation(zipf_counts(n, 15 * n, exponent)) for n in rows]
    profiles = [make_profile(tables, now)]
    while len(profiles) < most_profiles:
        for counts in now:
            moved = np.flatnonzero(random.random(len(counts)) < drift)
            counts[moved] = counts[random.permutation(moved)]
        profiles.append(make_profile(tables, now))
    return profiles


plan_settings = st.builds(
    Settings,
    extra_memory=st.sampled_from([0.0, 0.05, 0.3]),
    threshold=st.sampled_from([0.05, 0.5]),
)


@st.composite
def planned(draw: st.DrawFn, most_profiles: int = 2) -> tuple[Plan, list[Profile]]:
    """A plan for the first of several profiles."""
    profiles = draw(drifting(most_profiles))
    topology, workload = draw(topologies(alike=draw(st.booleans()))), draw(workloads)
    return plan_or_skip(profiles[0], topology, workload, draw(plan_settings)), profiles


def plan_or_skip(
    profile: Profile, topology: Topology, workload: Workload, settings: Settings
) -> Plan:
    """The plan; capacities too small for whole rows are left out, as the planner would say."""
    try:
        plan = assemble(profile, make_plan(profile, topology, workload, settings))
    except OperError:
        assume(False)
        raise
    assume(plan.figures["feasible"])
    return plan


def slots_of(plan: Plan) -> np.ndarray:
    """The slot of every row on every rank, [rows, M], -1 where it is not held: by the reference in
    NumPy, from each rank's own view of it."""
    of_tables = []
    for t, table in enumerate(plan.tables):
        ids = np.arange(table.rows)
        views = np.stack([plan.layout.addresses(t, ids, r) for r in range(plan.ranks)], axis=1)
        of_tables.append(np.where(views >> SLOT_BITS == LOCAL, views & SLOT_MASK, -1))
    return np.concatenate(of_tables)


def sources_of(plan: Plan) -> np.ndarray:
    """The rank that each rank reads each row from, [rows, M]."""
    of_tables = []
    for t, table in enumerate(plan.tables):
        ids = np.arange(table.rows)
        views = np.stack([plan.layout.addresses(t, ids, r) for r in range(plan.ranks)], axis=1)
        field = views >> SLOT_BITS
        of_tables.append(np.where(field == LOCAL, np.arange(plan.ranks), field))
    return np.concatenate(of_tables)


def moved_by(moves: Moves, slots: np.ndarray) -> np.ndarray:
    """Slots [rows, M] after the moves: every entry reads what lies at its source before any is
    written, as contents of slots. -1 where a rank holds no copy."""
    after = slots.copy()
    for entry in moves.entries:
        assert slots[entry["row"], entry["source_rank"]] == entry["source_slot"]
    after[moves.entries["row"]] = -1
    after[moves.entries["row"], moves.entries["rank"]] = moves.entries["slot"]
    return after


def width_of_rows(plan: Plan) -> np.ndarray:
    """The arena that each row's slots index."""
    return np.repeat(plan.layout.width_of_table, [t.rows for t in plan.tables])


def assert_exact(plan: Plan) -> None:
    """Every rank reads each row where a holder has it; slots are dense; replicas on all ranks lie
    at equal slots; the capacities are kept."""
    slots, sources = slots_of(plan), sources_of(plan)
    held = np.take_along_axis(slots, sources, axis=1)
    assert (held >= 0).all()
    width = width_of_rows(plan)
    for w in range(len(plan.layout.slots)):
        for r in range(plan.ranks):
            used = slots[width == w, r]
            used = np.sort(used[used >= 0])
            assert (used == np.arange(plan.layout.slots[w, r])).all()
    everywhere = slots[(slots >= 0).all(axis=1)]
    assert (everywhere == everywhere[:, :1]).all()
    figures = plan.figures
    memory = np.zeros(plan.ranks)
    for t, (first, table) in enumerate(zip(offsets(plan.tables), plan.tables, strict=False)):
        copies = (slots[first : first + table.rows] >= 0).sum(axis=0)
        memory += copies * plan.tables[t].memory_bytes(plan.workload.mode)
    assert memory.tolist() == figures["memory_bytes"]
    assert (memory <= figures["capacity_bytes"]).all()


def cost_row_by_row(plan: Plan, profile: Profile):
    """What the plan's placement costs under a profile, priced with each row as a group."""
    slots, sources = slots_of(plan), sources_of(plan)
    tables = np.repeat(np.arange(len(plan.tables)), [t.rows for t in plan.tables])
    accesses = profile.accesses.astype(np.int64)
    containing = np.concatenate(
        [profile.table_containing(t) for t in range(len(plan.tables))]
    ).astype(np.int64)
    ones = np.ones(len(tables), dtype=np.int64)
    classes = group(profile, plan.workload, plan.ranks, tables, accesses, containing, ones)
    # The classes' entries are the rows, in another order.
    order = np.lexsort((-containing, plan.layout.width_of_table[tables], -accesses))
    sums = classes.sums(np.eye(len(classes), dtype=np.int64)[classes.entry_class].T)
    groups = Groups(sources[order].astype(np.uint16), slots[order] >= 0)
    return evaluate(plan.topology, plan.workload, groups, sums, plan.figures["capacity_bytes"])
