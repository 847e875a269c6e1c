"""Plans with a tier: limits of both memories, one address a row, true figures, bounds that hold."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, reject

from oper.base.errors import OperError
from oper.checker.check import check
from oper.cost.holder_sets import single_owner_sets
from oper.cost.objective import evaluate
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.plan_parts import part_of, plans_of_memories
from oper.plan.settings import PlanSettings
from oper.planner.bounds.certify import certify
from oper.planner.bounds.hot_rows_bound import whole_rows_bound
from oper.planner.bounds.tier_bound import methods_of, weighted_mean_bound
from oper.planner.compare import compare
from oper.planner.make_plan import make_plan
from oper.planner.place_with_tier import PlannedWithTier, plan_with_tier
from oper.planner.price_plan import predict_priced, priced_under, problems_of_memories
from oper.planner.problem.problem import make_problem
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.host_tier import tier_topology
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.examples import at_least, examples
from tests.support.planner.both_memories import least_seconds, tiny
from tests.support.planner.drifting import make_profile, seeds, slots_of
from tests.support.planner.tiers import assert_figures_are_true, drawn


def planned(seed: int) -> tuple[PlannedWithTier, Profile]:
    """A plan; examples whose memory is too small for whole rows are left out."""
    (profile,), topology, workload, asked = drawn(seed)
    try:
        return plan_with_tier(profile, topology, workload, asked), profile
    except OperError:
        reject()


@at_least(10)
@given(seeds)
@examples(16)
@example(35)  # where the sum of both parts' bounds is none
def test_plans_hold_what_they_promise(seed):
    made, profile = planned(seed)
    with TemporaryDirectory() as place:
        folder = Path(place) / "plan"
        made.plan.save(folder)
        assert [f.wrong for f in check(folder) if not f.ok] == []
        plan = Plan.load(folder)
    assert plan.tier == made.plan.tier
    assert plan.to_json() == json.loads(json.dumps(made.plan.to_json()))
    assert_one_place_a_row(plan)
    assert_memory_is_kept(plan)
    assert_figures_are_true(plan, profile)
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_seconds <= plan.cost.objective_seconds
    assert plan.certificate == made.plan.certificate
    assert plan.certificate.objective_seconds == plan.cost.objective_seconds
    assert_step_is_of_both_memories(plan, profile)


def assert_step_is_of_both_memories(plan: Plan, profile: Profile) -> None:
    """Assert that the phases are those of the devices' tables, then of the hosts', each priced
    alone.

    For striped rows a plan's step knows only the ranks' shares.
    """
    assert plan.step_time is not None
    problems = problems_of_memories(plan, profile)
    priced = priced_under(plans_of_memories(plan), problems)
    steps = [predict_priced(*each) for each in zip(problems, priced, strict=True)]
    names = [[phase.name for phase in step.phases] for step in steps]
    of_hosts = [f"host {name}" for name in names.pop()]
    assert [p.name for p in plan.step_time.phases] == [*itertools.chain(*names), *of_hosts]
    wanted = sum(step.seconds for step in steps)
    assert plan.step_time.seconds == pytest.approx(wanted, rel=0.05)


def assert_one_place_a_row(plan: Plan) -> None:
    """No two rows of one arena share a slot, a row of the tier is on one rank, and the tier's
    arenas have no others' rows."""
    slots = slots_of(plan)
    table = np.repeat(np.arange(len(plan.tables)), plan.layout.rows)
    in_tier = np.isin(table, plan.tier)
    assert ((slots[in_tier] >= 0).sum(axis=1) == 1).all()
    width = plan.layout.width_of_table[table]
    assert not np.isin(width[in_tier], width[~in_tier]).any()
    for w in range(len(plan.layout.slots)):
        for rank in range(plan.ranks):
            used = np.sort(slots[width == w, rank])
            assert np.array_equal(used[used >= 0], np.arange(plan.layout.slots[w, rank]))


def assert_memory_is_kept(plan: Plan) -> None:
    memory = np.array([t.memory_bytes("training") for t in plan.tables])
    table = np.repeat(np.arange(len(plan.tables)), plan.layout.rows)
    held = (slots_of(plan) >= 0) * memory[table][:, None]
    in_tier = np.isin(table, plan.tier)
    assert (held[~in_tier].sum(axis=0) == plan.cost.memory_bytes).all()
    assert (plan.cost.memory_bytes <= plan.cost.capacity_bytes).all()
    assert plan.host is not None
    assert (held[in_tier].sum(axis=0) == plan.host.cost.memory_bytes).all()
    assert (held[in_tier].sum(axis=0) <= np.array(plan.topology.host_memory_bytes)).all()


# Plan and bounds, against all placements of a few rows in both memories


@at_least(30)
@given(seeds)
@examples(40)
@example(3)  # one by one, both memories' hot rows go to the same rank
def test_plans_of_few_rows_are_the_best_and_no_bound_is_above(seed):
    given = tiny(seed)
    try:
        plan = plan_with_tier(*given).plan
    except OperError:  # the capacities are too small for whole rows
        reject()
    devices, tier = problems_of_memories(plan, given.profile)
    best = least_seconds(devices, tier)
    assert plan.cost.objective_seconds == pytest.approx(best, rel=1e-5)
    assert plan.certificate is not None
    assert 0 < plan.certificate.lower_bound_seconds <= best or not best
    # The bounds that larger problems have, each by itself.
    split = [weighted_mean_bound(memories) for memories in methods_of(devices, tier)]
    whole = [whole_rows_bound(memories, best) for memories in methods_of(devices, tier)]
    assert min(split) <= best
    assert min(map(max, split, whole)) <= best
    one_by_one = [certify(problem, 2 * best).lower_bound_seconds for problem in (devices, tier)]
    assert max(one_by_one) <= best


def test_the_sum_of_two_bounds_would_be_wrong():
    """A hot row on the devices and one in the tier go to different ranks."""
    topology = Topology(
        "t", (0, 0), np.full((2, 2), 1e-9), 1e10, Latency.of_hops(0.0), capacity=2.0
    )
    topology = replace(topology, host_bandwidth=(1e9, 1e9), host_memory_bytes=(10**6,) * 2)
    counts = [np.array([100, 0, 0, 0])] * 2
    profile = make_profile((Table("a", 4, dim=4), Table("b", 4, dim=4)), counts)
    workload = Workload("training", "raw", 64)
    a = certify(make_problem(profile.select([0]), topology, workload, PlanSettings(0.0)), 1)
    hosts = tier_topology(topology)
    b = certify(make_problem(profile.select([1]), hosts, workload, PlanSettings(0.0)), 1)
    sets, rows = single_owner_sets(2), np.eye(2)
    best = np.inf
    for first, second in itertools.product(range(2), repeat=2):
        problem = make_problem(profile.select([0]), topology, workload, PlanSettings(0.0))
        other = make_problem(profile.select([1]), hosts, workload, PlanSettings(0.0))
        times = np.zeros(2)
        for one, owner in ((problem, first), (other, second)):
            hot = np.outer(one.classes.accesses > 0, rows[owner])
            cold = np.outer((one.classes.accesses == 0) * one.classes.rows, rows[1 - owner])
            sums = one.classes.sums(hot + cold)
            times += evaluate(one.topology, workload, sets, sums, one.capacity_bytes).rank_seconds
        best = min(best, float(times.max()))
    assert a.lower_bound_seconds + b.lower_bound_seconds > best


# What is asked, and what cannot be


def small(rows: tuple[int, ...] = (300, 40, 300)) -> Profile:
    tables = tuple(Table(f"table_{t}", n, dim=16) for t, n in enumerate(rows))
    return make_profile(tables, [np.arange(n) % 50 for n in rows])


WORKLOAD = Workload("training", "raw", 64)


def test_equal_tables_of_both_memories_share_no_arena(tmp_path: Path):
    make_plan(small(), "dgx-a100", WORKLOAD, PlanSettings(tier=["table_2"])).save(tmp_path / "plan")
    plan = Plan.load(tmp_path / "plan")
    assert plan.layout.width_of_table.tolist() == [0, 0, 1]
    assert plan.tier == (2,)
    content = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert [memory["tables"] for memory in content["memories"]] == [[0, 1], [2]]
    assert content["asked"]["tier"] == ["table_2"]
    assert plan.asked.tier == ("table_2",)


def test_rows_that_would_get_copies_on_devices_get_none_in_the_tier(tmp_path: Path):
    counts = [np.arange(n)[::-1].astype(np.int64) ** 2 for n in (300, 40, 300)]
    profile = make_profile(small().tables, counts)
    workload, asked = Workload("training", "raw", 1 << 16), PlanSettings(0.3)
    on_devices = make_plan(profile, "2x2-a100", workload, asked)
    on_devices.save(tmp_path / "devices")
    assert on_devices.cost.extra_bytes
    made = make_plan(profile, "2x2-a100", workload, replace(asked, tier="all"))
    made.save(tmp_path / "tier")
    assert made.tier == (0, 1, 2)
    assert (made.layout.holds.sum(axis=1) == 1).all()
    assert made.replica_accesses == 0
    both = replace(asked, tier=["table_0"])
    some = make_plan(profile, "2x2-a100", workload, both)
    some.save(tmp_path / "both")
    assert some.cost.extra_memory_ratio > 0
    assert all(finding.ok for finding in check(tmp_path / "both"))


def test_without_a_tier_nothing_is_said_of_it(tmp_path: Path):
    make_plan(small(), "dgx-a100", WORKLOAD, PlanSettings()).save(tmp_path / "plan")
    content = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert [memory["name"] for memory in content["memories"]] == ["device"]
    assert content["certificate"] is None
    assert not {"host_memory", "host_bandwidth"} & content["topology"].keys()
    plan = Plan.load(tmp_path / "plan")
    assert plan.host is None
    assert plan.tier == ()
    assert plan.certificate == plan.memories[0].certificate is not None


@pytest.mark.parametrize("spec", ["dgx-a100", "cpu:2"])
def test_all_tables(tmp_path: Path, spec: str):
    made = make_plan(small(), spec, WORKLOAD, PlanSettings(tier="all"))
    made.save(tmp_path / "plan")
    plan = Plan.load(tmp_path / "plan")
    assert plan.tier == (0, 1, 2)
    assert plan.host is not None
    assert plan.memories[0].tables == ()
    assert plan.main is plan.host
    assert not plan.cost.memory_bytes.any()
    assert made.to_json()["tier"] == ["table_0", "table_1", "table_2"]
    memory = 0.8 * 40e9 - plan.cost.mailbox_bytes if spec == "dgx-a100" else 0.0
    assert plan.cost.capacity_bytes == pytest.approx(np.full(plan.ranks, memory), abs=2)
    assert [f.wrong for f in check(tmp_path / "plan") if not f.ok] == []


def test_a_plan_for_cpus_does_not_depend_on_the_machine(tmp_path: Path):
    topology = Topology.load("cpu:2")
    other = replace(topology, host_memory_bytes=(10**12,) * 2, device_memory_bytes=(10**12,) * 2)
    for name, ranks in (("one", topology), ("other", other)):
        make_plan(small(), ranks, WORKLOAD, PlanSettings(tier=["table_0"])).save(tmp_path / name)
    one, two = ((tmp_path / name / "plan.json").read_bytes() for name in ("one", "other"))
    assert one == two


def test_parts_of_a_plan_keep_its_tier(tmp_path: Path):
    make_plan(small(), "2x2-a100", WORKLOAD, PlanSettings(tier=["table_2"])).save(tmp_path / "plan")
    plan = Plan.load(tmp_path / "plan")
    assert part_of(plan, [1, 2]).tier == (1,)
    assert part_of(plan, [2]).tier == (0,)
    without = part_of(plan, [0, 1])
    assert without.tier == ()
    assert without.host is None


def place(profile: Profile, topology: Topology, workload: Workload = WORKLOAD, **asked):
    return plan_with_tier(profile, topology, workload, PlanSettings(**asked))


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        (["tabel_1"], r"'tabel_1' is not in the profile; near it: table_1"),
        (["zzz"], r"'zzz' is not in the profile; it has table_0, table_1, table_2$"),
        (["table_1", "table_1"], r"'table_1' is named twice"),
        ("table_1", r"tier: expected a list of tables' names, or 'all', got 'table_1'"),
        ([""], "expected names of tables, got '' among them"),
        ([3], "expected names of tables, got 3 among them"),
    ],
)
def test_tiers_of_unknown_tables_are_refused(tier, message):
    with pytest.raises(OperError, match=message):
        place(small(), Topology.load("cpu:2"), tier=tier)


def test_what_no_tier_can_be_planned_for_is_refused():
    topology = Topology.load("dgx-a100")
    inference = Workload("inference", "raw", 64)
    with pytest.raises(OperError, match="caches of a tier are for training"):
        place(small(), topology, inference, tier="all")
    with pytest.raises(OperError, match=r"no host_memory .* and no host_bandwidth"):
        place(small(), Topology("t", (0,), np.ones((1, 1)), 1.0, Latency.of_hops(0.0)), tier="all")
    with pytest.raises(OperError, match="only a plan's folder can have one"):
        compare(small(), topology, WORKLOAD, PlanSettings(tier="all"), ["oper"], 1.0)


def test_hosts_that_are_too_small_say_by_how_much():
    bytes_needed = 340 * 68
    topology = replace(Topology.load("dgx-a100"), host_memory_bytes=(680,) * 8)
    message = (
        rf"tier: host_memory of .*take {bytes_needed:,} bytes .* {bytes_needed - 5440:,} too few"
    )
    with pytest.raises(OperError, match=message):
        place(small(), topology, tier=["table_0", "table_1"], extra_memory=0.0)
    with pytest.raises(OperError, match=r"tier: host_memory .*fits on no rank"):
        place(small(), replace(topology, host_memory_bytes=(10,) * 8), tier="all")
    # Tables on devices are none of the hosts' business.
    assert place(small(), topology, tier=["table_1"], extra_memory=0.0).plan.tier == (1,)
