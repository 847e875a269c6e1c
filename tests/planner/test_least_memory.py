"""Plans for which no memory was asked: the least that is nearly as good as what devices hold."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper.base.errors import OperError
from oper.checker.check import check
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import Limits, PlanSettings
from oper.planner import least_memory as module
from oper.planner import memory_curve as curve_module
from oper.planner import place_together as together_module
from oper.planner.assemble_plan import assemble
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import (
    EQUAL,
    LITTLE,
    MODEST,
    TOLERANCE,
    bound_seconds,
    least_share,
    place_in_memory,
    shares_up_to,
)
from oper.planner.make_placement import (
    InfeasibleError,
    Planned,
    Watch,
    make_placement,
    place,
)
from oper.planner.make_plan import make_plan, plan_and_placement
from oper.planner.memory_curve import memory_curve
from oper.planner.problem.problem import RESERVE, Problem, make_problem, with_limits
from oper.planner.replan.drift import drift
from oper.planner.replan.replan import replan
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.commands import fine, oper, write_log
from tests.support.planner.profiles import make_profile

PROFILE = make_profile(1, rows=(900, 40, 7))
# Copies of most rows save next to nothing.
TAIL = replace(PROFILE, accesses=np.where(np.arange(947) % 10, 1, 10_000).astype(np.uint32))
# Where copies pay in training too: few samples take less time than a latency of its own.
TWO_NODES = replace(Topology.load("2x2-a100"), latency=Latency.of_hops(1e-12))
MODES = ("training", "inference")


def workload(mode: str, batch: int = 256) -> Workload:
    return Workload(mode, "raw", batch)  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topology", [Topology.load("dgx-a100"), TWO_NODES], ids=["one", "two"])
@pytest.mark.parametrize(
    ("profile", "saves_little"), [(PROFILE, True), (TAIL, False)], ids=["even", "tail"]
)
def test_the_least_memory_that_is_enough(
    profile: Profile,
    saves_little: bool,
    topology: Topology,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A percent of the time is given for a tenth of the memory, and none for less."""
    monkeypatch.setattr(module, "MODEST", 0.0)
    planned = place_in_memory(profile, topology, workload(mode), PlanSettings())
    limits = DeviceLimits.of(make_problem(profile, topology, workload(mode), PlanSettings()))
    full = place(limits.within(limits.most_extra), Watch(lambda step: None))
    mine, all_of_it = planned.cost.extra_memory_ratio, full.cost.extra_memory_ratio
    if all_of_it == 0:  # latency: no copy pays
        assert (mode, topology.nodes) == ("training", 1)
    longer = planned.cost.objective_seconds / full.cost.objective_seconds - 1
    used = planned.problem.limits.extra_memory
    if mode == "training" or saves_little:
        assert longer < 1e-6
        tolerance = EQUAL
    else:
        assert longer <= TOLERANCE
        assert 1 + mine < (1 - LITTLE) * (1 + all_of_it)
        tolerance = TOLERANCE
    if mine > 0:
        below = bound_seconds(limits, 0.97 * used)
        assert below > bound_seconds(limits, limits.most_extra) * (1 + tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_the_search_by_bisection_finds_what_trying_all_finds(mode: str) -> None:
    limits = DeviceLimits.of(make_problem(PROFILE, TWO_NODES, workload(mode), PlanSettings()))
    shares = shares_up_to(limits.most_extra)[::60]
    seconds = [bound_seconds(limits, share) for share in shares]

    def least_within(tolerance: float) -> int:
        most = seconds[-1] * (1 + tolerance)
        return next(index for index, each in enumerate(seconds) if each <= most)

    least, equal = least_within(TOLERANCE), least_within(EQUAL)
    if 1 + shares[least] > (1 - LITTLE) * (1 + shares[equal]):
        least = equal
    assert least_share(limits, shares) == least


def test_plans_are_tried_where_the_bound_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound that asks for too little, real plans decide."""
    monkeypatch.setattr(module, "MODEST", 0.0)
    topology = Topology.load("2x2-a100")
    monkeypatch.setattr(module, "least_share", lambda limits, shares: 0)
    made: list[float | None] = []

    def counted(problem: Problem, watch: Watch) -> Planned:
        made.append(problem.limits.extra_memory)
        return place(problem, watch)

    monkeypatch.setattr(module, "place", counted)
    planned = place_in_memory(PROFILE, topology, workload("inference"), PlanSettings())
    best = planned.certificate.full_memory_bound_seconds
    assert best is not None
    assert planned.cost.objective_seconds <= best * 1.01 * (1 + 1e-3)
    assert made[:2] == [0.0, 3.0]
    tried = sorted(share for share in made[2:] if share is not None)
    used = planned.problem.limits.extra_memory
    assert used is not None
    # All that were tried with less memory were too slow.
    for share in tried[: tried.index(used) if used in tried else None]:
        slow = make_placement(PROFILE, topology, workload("inference"), PlanSettings(share))
        assert slow.cost.objective_seconds > best * (1 + TOLERANCE)
    assert 2 < len(made) <= 8


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_is_recorded_in_bytes_and_kept(tmp_path: Path, mode: str) -> None:
    topology = Topology.load("dgx-h100")
    made, planned = plan_and_placement(PROFILE, topology, workload(mode), PlanSettings())
    made.save(tmp_path / "p")
    step = planned.problem.step_memory.batch_bytes + planned.cost.allreduce_memory_bytes
    held = 64 * 10**9 - math.ceil(step)
    assert (made.cost.capacity_bytes == held).all()
    content = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert content["topology"]["capacity"] == f"{held}B"
    assert content["limits"]["reserve"] == 0.2
    assert content["asked"]["reserve"] is None
    assert content["memories"][0]["certificate"]["full_memory_bound_seconds"] > 0
    assert all(finding.ok for finding in check(tmp_path / "p"))

    plan = Plan.load(tmp_path / "p")
    assert plan.asked == planned.problem.asked == PlanSettings()
    assert plan.limits == planned.problem.limits
    found = drift(plan, PROFILE, 0.05)
    assert found.rank_seconds.now.max() == pytest.approx(found.rank_seconds.then.max(), rel=1e-12)
    again = replan(plan, make_profile(2, rows=(900, 40, 7)), 1000)
    assert (again.plan.cost.capacity_bytes == held).all()
    assert again.plan.asked == plan.asked
    assert again.plan.limits == plan.limits
    again.plan.save(tmp_path / "again")
    assert all(finding.ok for finding in check(tmp_path / "again"))


@pytest.mark.parametrize(
    "topology",
    [
        Topology.load("cpu:4"),
        replace(Topology.load("2x2-a100"), device_memory_bytes=None),
        Topology.load("2x2-a100").with_capacity("2"),
    ],
    ids=["host", "unknown", "capacity"],
)
def test_ranks_without_device_memory_have_the_papers(tmp_path: Path, topology: Topology) -> None:
    for name, settings in (("default", PlanSettings()), ("asked", PlanSettings(extra_memory=0.05))):
        make_plan(PROFILE, topology, workload("training"), settings).save(tmp_path / name)
    plan, asked = Plan.load(tmp_path / "default"), Plan.load(tmp_path / "asked")
    replace(plan, asked=asked.asked).save(tmp_path / "default", overwrite=True)
    assert files(tmp_path / "default") == files(tmp_path / "asked")
    assert plan.asked == PlanSettings()
    assert plan.limits == asked.limits == Limits(0.05)
    assert not plan.limits.by_devices
    assert plan.certificate is not None
    assert plan.certificate.full_memory_bound_seconds is None


def test_one_rank_and_nothing_read() -> None:
    alone = place_in_memory(
        PROFILE, Topology.load("1x1-a100"), workload("training"), PlanSettings()
    )
    assert alone.problem.limits.extra_memory == 0
    unread = replace(PROFILE, accesses=np.zeros_like(PROFILE.accesses))
    for mode, extra in (("training", 0), ("inference", 7)):
        planned = place_in_memory(unread, Topology.load("dgx-a100"), workload(mode), PlanSettings())
        assert planned.cost.extra_memory_ratio == extra


def test_reserves() -> None:
    topology = Topology.load("dgx-a100")
    for reserve, left in ((0.0, 40), (0.5, 20)):
        planned = place_in_memory(
            PROFILE, topology, workload("inference"), PlanSettings(reserve=reserve)
        )
        step = math.ceil(planned.problem.step_memory.batch_bytes)
        assert step > 0
        assert (planned.problem.capacity_bytes == left * 10**9 - step).all()
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(OperError, match="reserve"):
            PlanSettings(reserve=bad)


# Rows that were not read

# Two thirds of the rows were not read; of the last table none was read once, so that no unread row
# is expected to be.
COLD = replace(
    PROFILE,
    accesses=np.where(
        np.arange(947) % 3 == 0, np.where(np.arange(947) < 900, PROFILE.accesses, 50), 0
    ).astype(np.uint32),
    samples_with_row=np.where(np.arange(900, 940) % 3 == 0, 20, 0).astype(np.uint32),
)


def with_free_memory(topology: Topology, shares: float) -> Topology:
    """Return the topology with devices that have room for one copy of COLD and `shares` times
    that."""
    problem = make_problem(COLD, topology, workload("inference"), PlanSettings())
    total, ranks = problem.classes.total_bytes, topology.ranks
    spare = sum(problem.classes.width_memory)
    step = problem.step_memory.batch_bytes
    memory = math.ceil((total * (1 + shares) / ranks + spare + step) / (1 - RESERVE)) + 2
    return replace(topology, device_memory_bytes=(memory,) * ranks)


@pytest.mark.parametrize("preset", ["dgx-a100", "2x4-a100", "dgx-h100", "2x8-h100"])
def test_everything_is_copied_if_that_takes_little_of_the_free_memory(preset: str) -> None:
    """Unread rows are copied too, in inference over links alone."""
    topology = Topology.load(preset)
    planned = place_in_memory(COLD, topology, workload("inference"), PlanSettings())
    assert planned.cost.extra_memory_ratio == topology.ranks - 1
    assert planned.cost.link_bytes.sum() == 0
    trained = make_plan(COLD, topology, workload("training"))
    assert not trained.layout.unread_copies.any()


@pytest.mark.parametrize("free", [1.0, 4.0, 12.0, 27.0, 28.1, 40.0])
@pytest.mark.parametrize("preset", ["dgx-a100", "2x4-a100"])
def test_a_modest_part_of_the_free_memory_is_used_in_any_case(preset: str, free: float) -> None:
    topology = with_free_memory(Topology.load(preset), free)
    planned = place_in_memory(COLD, topology, workload("inference"), PlanSettings())
    used, whole = planned.cost.extra_memory_ratio, topology.ranks - 1
    row = whole * max(planned.problem.classes.width_memory) / planned.problem.classes.total_bytes
    assert used >= min(MODEST * free, whole) * (1 - 1e-2) - row
    assert used <= free + 1e-9
    if MODEST * free > whole:
        assert used == whole
    least = place_in_memory(COLD, topology, workload("inference"), PlanSettings(0.0))
    assert planned.cost.objective_seconds < least.cost.objective_seconds


@pytest.mark.parametrize("preset", ["dgx-a100", "2x4-a100"])
@pytest.mark.parametrize("factor", [1.05, 1.2, 1.5, 2.0])
def test_a_capacity_is_memory_for_copies_in_inference(preset: str, factor: float) -> None:
    topology = Topology.load(preset).with_capacity(str(factor))
    planned = place_in_memory(COLD, topology, workload("inference"), PlanSettings())
    assert planned.cost.feasible
    spare = topology.ranks * sum(planned.problem.classes.width_memory)
    room = factor - 1 - spare / planned.problem.classes.total_bytes
    assert planned.problem.limits.extra_memory == pytest.approx(max(room, 0.0), rel=1e-2)
    row = 7 * max(planned.problem.classes.width_memory) / planned.problem.classes.total_bytes
    assert planned.cost.extra_memory_ratio >= room * (1 - 1e-2) - row
    asked = place_in_memory(COLD, topology, workload("inference"), PlanSettings(0.01))
    assert asked.problem.limits == Limits(0.01)


@pytest.mark.parametrize("capacity", [None, "2"])
def test_no_copies_if_ranks_read_one_memory(capacity: str | None) -> None:
    topology = Topology.load("cpu:4")
    topology = topology if capacity is None else topology.with_capacity(capacity)
    planned = place_in_memory(COLD, topology, workload("inference"), PlanSettings())
    assert planned.problem.limits == Limits(0.05)
    assert planned.cost.extra_memory_ratio == 0


@pytest.mark.parametrize("hot_later", [0, 200])
def test_in_training_copies_shorten_the_step_on_later_counts_too(hot_later: int) -> None:
    """The hot rows of the first part stay hot in the second part, or others are hot there."""
    tables = (Table("t", 20_000, dim=128),)

    def counts(first_hot: int) -> np.ndarray:
        found = np.ones(20_000, np.uint32)
        found[first_hot : first_hot + 200] = 5_000
        return found

    def profile_of(accesses: np.ndarray) -> Profile:
        return Profile(tables, int(accesses.sum()), accesses, np.zeros(0, np.uint32), (False,))

    earlier, later = counts(0), counts(hot_later)
    first = profile_of(earlier)
    windowed = replace(profile_of(earlier + later), open_first_part=lambda: first)
    asked, ranks = workload("training", 1 << 19), Topology.load("dgx-h100")
    planned = place_in_memory(windowed, ranks, asked, PlanSettings())
    whole = place_in_memory(profile_of(earlier + later), ranks, asked, PlanSettings())
    assert whole.cost.extra_bytes > 0
    assert planned.cost.extra_bytes == (0 if hot_later else whole.cost.extra_bytes)
    assert planned.problem.asked == PlanSettings()
    full = whole.certificate.full_memory_bound_seconds
    assert planned.certificate.full_memory_bound_seconds == full


# The curve


def curve_of(planned: Planned, topology: Topology) -> list[dict[str, object]]:
    return [point.to_json() for point in memory_curve(planned, topology).points]


@pytest.mark.parametrize("asked", [None, 0.03])
@pytest.mark.parametrize("preset", ["2x2-a100", "cpu:4"])
def test_the_curve_falls_and_passes_through_the_plan(preset: str, asked: float | None) -> None:
    topology = Topology.load(preset)
    planned = place_in_memory(PROFILE, topology, workload("inference"), PlanSettings(asked))
    points = memory_curve(planned, topology).points
    assert [p.extra_memory for p in points] == sorted({p.extra_memory for p in points})
    assert points[0].extra_memory == 0
    seconds = [p.step_seconds for p in points]
    assert seconds == sorted(seconds, reverse=True)
    (mine,) = [p for p in points if p.plan]
    assert mine.objective_seconds == planned.cost.objective_seconds
    assert mine.memory_bytes == planned.cost.memory_bytes.max()
    assert all(p.extra_memory_ratio <= p.extra_memory for p in points)


def test_the_curve_ends_at_a_capacity() -> None:
    topology = Topology.load("2x2-a100").with_capacity("1.5")
    planned = make_placement(PROFILE, topology, workload("inference"), PlanSettings(0.05))
    points = memory_curve(planned, topology).points
    assert points[-1].extra_memory == 0.5
    assert points[-1].memory_bytes <= planned.problem.classes.total_bytes * 1.5 / 4


def test_the_curve_goes_on_past_shares_too_small_for_a_row() -> None:
    topology, few = Topology.load("dgx-a100"), make_profile(1, rows=(500,))
    planned = make_placement(few, topology, workload("inference"), PlanSettings(0.05))
    shares = [p.extra_memory for p in memory_curve(planned, topology).points]
    assert {0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0} <= set(shares)


def test_a_share_without_a_placement_loses_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology.load("2x2-a100")
    planned = make_placement(PROFILE, topology, workload("inference"), PlanSettings(0.0))
    monkeypatch.setattr(module, "MODEST", 0.0)
    monkeypatch.setattr(module, "least_share", lambda limits, shares: 0)

    def none_but_the_first(problem: Problem, watch: Watch) -> Planned:
        if problem.limits.extra_memory:
            raise InfeasibleError("capacity: none was found")
        return place(problem, watch)

    monkeypatch.setattr(module, "place", none_but_the_first)
    monkeypatch.setattr(together_module, "place", none_but_the_first)
    found = place_in_memory(PROFILE, topology, workload("inference"), PlanSettings())
    assert found.cost.objective_seconds == planned.cost.objective_seconds
    assert [p.extra_memory for p in memory_curve(planned, topology).points] == [0.0]

    def none(problem: Problem, watch: Watch) -> Planned:
        raise InfeasibleError("capacity: none was found")

    monkeypatch.setattr(module, "place", none)
    with pytest.raises(InfeasibleError, match="none was found"):
        place_in_memory(PROFILE, topology, workload("inference"), PlanSettings())


# The command line


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.parquet")
    fine("profile", "log.parquet", "-o", "p", "--columns", "C*")
    return tmp_path


PLAN = ("plan", "p", "--topology", "1x2-a100", "--mode", "inference")


def test_the_curve_needs_no_folder_and_may_have_one(saved: Path) -> None:
    said = json.loads(fine(*PLAN, "--curve", "--json"))
    assert said["plan"] is None
    assert sum(point["plan"] for point in said["curve"]) == 1
    assert not (saved / "q").exists()
    both = json.loads(fine(*PLAN, "--curve", "-o", "q", "--json"))
    assert both["curve"] == said["curve"]
    assert Plan.load(saved / "q").cost.objective_seconds == both["objective_seconds"]
    plan = Plan.load(saved / "q")
    assert (plan.cost.capacity_bytes + plan.cost.mailbox_bytes == 32 * 10**9).all()
    shown = " ".join(fine("plan", "show", "q").split())
    assert "all memory that plans may use, 32 GB a rank" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--reserve", "20%", "--extra-memory", "5%"), "--extra-memory says what"),
        (("--reserve", "20%", "--capacity", "2"), "a capacity says what"),
        (("--reserve", "100%"), "--reserve 1:"),
        (("--reserve", "much"), "--reserve 'much'"),
    ],
)
def test_reserves_that_say_nothing(saved: Path, options: tuple[str, ...], words: str) -> None:
    for command in ((*PLAN, "-o", "q"), ("compare", "p", "--topology", "2x2-a100")):
        said = oper(*command, *options)
        assert said.status == 2
        assert words in said.errors
    said = oper("plan", "p", "--topology", "cpu:2", "-o", "q", "--reserve", "1%")
    assert said.status == 2
    assert "cpu:2 has none" in said.errors


def test_methods_are_compared_at_what_devices_hold(saved: Path) -> None:
    methods = "oper,paper,memory_greedy,table_wise,row_wise"
    command = (
        "compare",
        "p",
        "--topology",
        "2x2-a100",
        "--mode",
        "inference",
        "--methods",
        methods,
    )
    (run,) = json.loads(fine(*command, "--json"))["runs"]
    step = run["methods"]["oper"]["mailbox_bytes"]
    assert run["settings"]["capacity_bytes"] == [32 * 10**9 - step] * 4
    assert all(entry["mailbox_bytes"] == step for entry in run["methods"].values())
    assert all(entry["status"] == "ok" for entry in run["methods"].values())
    assert 0 <= run["methods"]["oper"]["certified_gap"] <= 0.0101
    assert "32 GB of memory a rank" in " ".join(fine(*command).split())


@pytest.mark.parametrize(
    ("topology", "asked", "fetch"),
    [
        ("cpu:2", (), "raw"),
        ("2x2-a100", (), "distinct"),
        ("2x2-a100", ("--fetch", "raw"), "raw"),
        ("cpu:2", ("--fetch", "distinct"), "distinct"),
    ],
)
def test_between_nodes_each_row_travels_once_unless_told_otherwise(
    saved: Path, topology: str, asked: tuple[str, ...], fetch: str
) -> None:
    fine("plan", "p", "--topology", topology, "-o", "q", *asked)
    assert Plan.load(saved / "q").workload.fetch == fetch
    command = ("compare", "p", "--topology", topology, "--methods", "table_wise", "--json")
    (run,) = json.loads(fine(*command, *asked))["runs"]
    assert run["settings"]["fetch"] == (fetch if asked or topology == "cpu:2" else "auto")


def test_more_memory_takes_no_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A placement that is slower than one in less memory gives way to that one, the plan's too."""
    topology = Topology.load("2x2-a100")
    planned = place_in_memory(PROFILE, topology, workload("inference"), PlanSettings(0.01))
    place_alone = together_module.place_alone

    def without_copies(problem: Problem, watch: Watch) -> Planned:
        placed = place_alone(problem, watch)
        if problem.limits.extra_memory != 0.1:
            return placed
        none = make_placement(PROFILE, topology, problem.workload, PlanSettings(0.0))
        certificate = placed.certificate.of(none.cost.objective_seconds)
        rows = none.row_placement
        return replace(placed, row_placement=rows, certificate=certificate)

    monkeypatch.setattr(curve_module, "place_alone", without_copies)
    points = memory_curve(planned, topology).points
    seconds = [point.step_seconds for point in points]
    assert seconds == sorted(seconds, reverse=True)
    (before, kept) = (p for p in points if p.extra_memory in (0.05, 0.1))
    assert kept.objective_seconds == before.objective_seconds
    assert kept.extra_memory_ratio == before.extra_memory_ratio
    assert kept.lower_bound_seconds <= before.lower_bound_seconds
    larger = with_limits(planned.problem, planned.problem.topology, Limits(0.1))
    slow = without_copies(larger, Watch(lambda step: None))
    made, placed = memory_curve(slow, topology)
    (mine,) = (point for point in made if point.plan)
    assert mine == replace(kept, plan=True)
    assert placed.problem.limits == Limits(0.1)
    assert placed.certificate.lower_bound_seconds == slow.certificate.lower_bound_seconds
    assemble(placed).save(tmp_path / "p")
    assert all(finding.ok for finding in check(tmp_path / "p"))


def test_bounds_for_all_shares_find_prices_once() -> None:
    topology = Topology.load("2x4-a100")
    problem = make_problem(PROFILE, topology, workload("training"), PlanSettings())
    limits = DeviceLimits.of(problem)
    bound_seconds(limits, 0.01)
    found = Charges.of.cache_info().misses
    for share in (0.02, 0.05, 0.3):
        bound_seconds(limits, share)
    assert Charges.of.cache_info().misses == found
