"""Plans and drifted profiles for tests of drift and replan, and what holds between two plans."""

import numpy as np
from hypothesis import assume, reject
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.expected_counts import as_many, expected_counts
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.objective import evaluate
from oper.cost.workload import Workload
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.plan import Plan
from oper.plan.row_moves import RowMoves
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.planner.problem.classes import group
from oper.profiling.profile import Profile
from oper.tables.table import Table, offsets
from oper.topology.latency import Latency
from oper.topology.links import NodeMemory
from oper.topology.relays import relayed_sizes
from oper.topology.topology import Topology
from tests.support.planner.instances import zipf_counts

SAMPLES = 10_000


def make_profile(tables, accesses) -> Profile:
    """A profile of counts alone; every second table has bags."""
    bagged = tuple(t % 2 == 1 for t in range(len(tables)))
    counts = [np.asarray(a, dtype=np.uint32) for a in accesses]
    samples_with_row = [a - a // 3 for a, has in zip(counts, bagged, strict=True) if has]
    none = np.zeros(0, np.uint32)
    return Profile(
        tables, SAMPLES, np.concatenate(counts), np.concatenate([none, *samples_with_row]), bagged
    )


# Everything follows from one seed: hypothesis, left to choose each part, mostly chooses the
# simplest, a table or two without drift.
seeds = st.integers(0, 2**32 - 1)


def drifting(random: np.random.Generator, number: int) -> list[Profile]:
    """Profiles of the same tables, of one or two widths, whose hot rows change by and by."""
    dims = ((16,), (8, 32))[random.integers(2)]
    # Planning lists all rows of small widths: some tables are large enough for stripes.
    rows = random.choice([1, 60, 700, 9000], size=random.integers(1, 4)).tolist()
    tables = tuple(Table(f"t{t}", n, dim=dims[t % len(dims)]) for t, n in enumerate(rows))
    exponent, drift = random.uniform(0.5, 1.6), random.choice([0.03, 0.3, 1.0])
    never = random.choice([0.0, 0.5, 0.8])
    now = []
    for n in rows:
        counts = zipf_counts(n, 15 * n, exponent)
        counts[int(n * (1 - never)) + 1 :] = 0
        now.append(random.permutation(counts))
    profiles = [make_profile(tables, now)]
    while len(profiles) < number:
        for counts in now:
            moved = np.flatnonzero(random.random(len(counts)) < drift)
            counts[moved] = counts[random.permutation(moved)]
        profiles.append(make_profile(tables, now))
    return profiles


def drifted(seed=0, rows=(9000, 400, 1), dims=(16, 16, 16), moved=0.1, windows=2):
    """Profiles of Zipf tables, in each of which `moved` of the rows take other rows' counts."""
    random = np.random.default_rng(seed)
    tables = tuple(
        Table(f"t{t}", n, dim=d) for t, (n, d) in enumerate(zip(rows, dims, strict=True))
    )
    counts = [random.permutation(zipf_counts(n, 20 * n, 1.05)) for n in rows]
    profiles = []
    for _ in range(windows):
        profiles.append(make_profile(tables, counts))
        for of_table in counts:
            which = np.flatnonzero(random.random(len(of_table)) < moved)
            of_table[which] = of_table[random.permutation(which)]
    return profiles


def random_topology(random: np.random.Generator) -> Topology:
    """Two to four ranks, homogeneous more often than not."""
    ranks = int(random.integers(2, 5))
    nodes = int(random.integers(1, 3)) if ranks % 2 == 0 else 1
    node_of = tuple(r * nodes // ranks for r in range(ranks))
    cost = np.where(np.equal.outer(node_of, node_of), 1 / 240e9, 1 / 19e9)
    np.fill_diagonal(cost, 1 / 1244e9)
    capacity = None
    if random.random() < 0.3:
        cost = cost * random.uniform(0.5, 2.0, (ranks, ranks))
        if random.random() < 0.5:
            capacity = tuple(random.uniform(1.2, 2.0, ranks).tolist())
    kinds: list[NodeMemory] = ["linked", "linked", "shared"]
    memory = (kinds[int(random.integers(0, 3))],) * nodes
    return Topology(
        "random", node_of, cost, 72e9, Latency.of_hops(2e-7), capacity=capacity, memory=memory
    )


def planned(seed: int, number: int = 2) -> tuple[Plan, list[Profile]]:
    """A plan for the first of several profiles."""
    random = np.random.default_rng(seed)
    profiles, topology = drifting(random, number), random_topology(random)
    workload = Workload(
        ("training", "inference")[random.integers(2)],
        ("raw", "distinct")[random.integers(2)],
        int(random.choice([64, 4096, 1 << 16])),
    )
    settings = PlanSettings(
        extra_memory=float(random.choice([0.0, 0.05, 0.3])),
        threshold=float(random.choice([0.01, 0.2])),
    )
    return plan_where_rows_fit(profiles[0], topology, workload, settings), profiles


def plan_where_rows_fit(
    profile: Profile, topology: Topology, workload: Workload, settings: PlanSettings
) -> Plan:
    """The plan. Examples are left out whose capacities are too small for whole rows."""
    try:
        plan = assemble(make_placement(profile, topology, workload, settings))
    except OperError:
        reject()
    assume(plan.cost.feasible)
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


def moved_by(moves: RowMoves, slots: np.ndarray) -> np.ndarray:
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
    memory = np.zeros(plan.ranks)
    for t, (first, table) in enumerate(zip(offsets(plan.tables)[:-1], plan.tables, strict=True)):
        copies = (slots[first : first + table.rows] >= 0).sum(axis=0)
        memory += copies * plan.tables[t].memory_bytes(plan.workload.mode)
    assert memory.tolist() == plan.cost.memory_bytes.tolist()
    assert (memory <= plan.cost.capacity_bytes).all()


def cost_row_by_row(plan: Plan, profile: Profile, as_counted: bool = False):
    """What the plan's placement costs under a profile, priced with each row as a group; by what
    further samples are expected to read, or `as_counted`."""
    return cost_of_rows(plan, profile, slots_of(plan) >= 0, sources_of(plan), as_counted)


def cost_of_rows(
    plan: Plan, profile: Profile, holds: np.ndarray, sources: np.ndarray, as_counted: bool = False
):
    """The same of rows on other ranks, [rows, M]: which hold them, and which each reads from."""
    tables = np.repeat(np.arange(len(plan.tables)), [t.rows for t in plan.tables])
    accesses = profile.accesses.astype(np.int64)
    samples_with_row = np.concatenate(
        [profile.table_samples_with_row(t) for t in range(len(plan.tables))]
    ).astype(np.int64)
    ones = np.ones(len(tables), dtype=np.int64)
    counts = tables, accesses, samples_with_row, ones
    topology = plan.cost_topology
    sizes = relayed_sizes(topology)
    classes = group(profile, plan.workload, plan.ranks, *counts, as_counted, node_sizes=sizes)
    # The classes' entries are the rows, in another order: of equal rows it does not matter which.
    estimated = not (as_counted or plan.workload.training)
    expected = expected_counts(*counts) if estimated else as_many(accesses, samples_with_row)
    foreseen = np.where(expected.differs, expected.accesses, 0)
    width = plan.layout.width_of_table[tables]
    order = np.lexsort((-samples_with_row, -foreseen, width, -accesses))
    c = classes.entry_class
    S, m, R, D, U = classes.S[c], classes.m[c], classes.R[c], classes.D[c], classes.U[c]
    f, of_node = classes.accesses[c].astype(float), classes.D_of_node[c]
    sums = Sums.of_rows(S, m, f, R, D, U, of_node)
    sets = HolderSets(sources[order].astype(np.uint16), holds[order])
    capacity = plan.cost.capacity_bytes.tolist()
    return evaluate(topology, plan.workload, sets, sums, capacity)
