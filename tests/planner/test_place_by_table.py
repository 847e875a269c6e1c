"""Plans of which some tables are pooled and others fetched row by row: their figures and bounds
against rows whose cost is written out, and which tables are pooled."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import oper
from benchmarks.planning.held_out import churning_windows, of_plan
from oper.base.defaults import POOLED_GAIN
from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.bounds.certify import certify
from oper.planner.least_memory import place_in_memory
from oper.planner.make_placement import Planned
from oper.planner.make_plan import make_plan, place_like
from oper.planner.place_by_table import FetchChoice, place_by_table
from oper.planner.place_pooled import place_pooled, predicted_seconds
from oper.planner.price_plan import costs_under, problem_of
from oper.profiling.profile import Profile
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.planner.test_place_pooled import (
    NODES,
    PER_NODE,
    M,
    cost_written_out,
    owners,
    profiled,
    seconds_written_out,
    topology,
    write_log,
)
from tests.support.commands import fine, refused
from tests.support.examples import examples
from tests.support.planner.gaps import known_gap

pytestmark = pytest.mark.usefixtures("small_programmes")

_ROWS = (60, 50, 3, 40)


def mixed(
    profile: Profile,
    ranks: Topology,
    pooled: tuple[str, ...],
    extra_memory: float,
    mode: str = "training",
    batch: int = 64,
) -> Planned:
    workload = Workload(mode, "distinct", batch)  # type: ignore[arg-type]
    settings = PlanSettings(extra_memory=extra_memory)
    return place_pooled(profile, ranks, workload, settings, tables=frozenset(pooled))


@pytest.mark.parametrize("memory", ["linked", "shared"])
@pytest.mark.parametrize("extra", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_plan_states_what_its_rows_cost(
    tmp_path: Path, seed: int, extra: float, memory: str
) -> None:
    rows = (900, 70, 400) if seed else _ROWS
    profile, ranks, pooled = profiled(tmp_path, seed, rows, 60), topology(memory), ("t0", "t2")
    assemble(mixed(profile, ranks, pooled, extra)).save(tmp_path / "q")
    plan = Plan.load(tmp_path / "q")
    assert plan.pooled_tables == pooled
    assert plan.workload.fetch == "distinct"
    written = seconds_written_out(profile, 64, owners(plan), True, ranks, pooled)
    stated = plan.cost.rank_seconds - plan.cost.allreduce_seconds
    np.testing.assert_allclose(stated, written, rtol=1e-6)


def write_bags(folder: Path, long: int = 20) -> Profile:
    """The profile of a log of one id of three rows, `long` bags of many, and one id of many."""
    random, samples = np.random.default_rng(3), 1000
    columns, tables = {}, []
    for name, rows, length in (
        ("few", 3, 1),
        ("many", 5000, long),
        ("more", 5000, long),
        ("single", 5000, 1),
    ):
        ids = random.integers(0, rows, length * samples)
        offsets = pa.array(np.arange(samples + 1) * length, pa.int32())
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(ids))
        tables.append(f"- {{name: {name}, rows: {rows}, dim: 8}}")
    pq.write_table(pa.table(columns), folder / "log.parquet")
    (folder / "tables.yaml").write_text("\n".join(tables), encoding="utf-8")
    given = folder / "log.parquet", "-o", folder / "p", "--tables", folder / "tables.yaml"
    fine("profile", *given)
    return Profile.load(folder / "p")


def test_tables_that_are_not_pooled_make_nodes_even(tmp_path: Path) -> None:
    """One pooled table lies on one node; the others' rows lie where ranks have time."""
    planned = mixed(write_bags(tmp_path), topology(), ("single",), 0.5, batch=512)
    assert known_gap(planned.certificate) < 0.01


def tried(
    profile: Profile, random: np.random.Generator, trial: int, pooled: tuple[str, ...]
) -> list[np.ndarray]:
    """Some owner of each row, as `owners` has them; whole tables on one node among them."""
    found = []
    for table in profile.tables:
        homes = random.choice(M, size=random.integers(1, M + 1), replace=False)
        if trial % 2:
            node = random.integers(NODES)
            homes = np.arange(node * PER_NODE, (node + 1) * PER_NODE)
        of_rows = random.choice(homes, table.rows)
        if trial % 3 == 0:
            of_rows[random.random(table.rows) < random.random()] = M
        if trial % 5 == 0 and table.name in pooled:
            copied = random.random(table.rows) < random.random()
            of_rows[copied] = M + 1 + random.integers(PER_NODE, size=int(copied.sum()))
        found.append(of_rows)
    return found


@pytest.mark.parametrize("memory", ["linked", "shared"])
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("pooled", [("t0",), ("t1",)])
def test_no_placement_is_better_than_the_bound(
    tmp_path: Path, pooled: tuple[str, ...], mode: str, memory: str
) -> None:
    profile, ranks = profiled(tmp_path, len(memory)), topology(memory)
    training, random = mode == "training", np.random.default_rng(5)
    # No smaller than the log, whose samples then are drawn one by one.
    planned = mixed(profile, ranks, pooled, 3.0, mode, 64)
    # In inference plans are for further samples; here the log's own are read.
    problem = problem_of(assemble(planned), profile, as_counted=True)
    bound = certify(problem, 1.0).lower_bound_seconds
    costs = [
        cost_written_out(
            profile, 64, tried(profile, random, trial, pooled), training, ranks, pooled
        )
        for trial in range(150)
    ]
    assert 0 < bound <= min(costs) * (1 + 1e-9)
    assert known_gap(planned.certificate) >= 0


@examples(3)
@given(
    seed=st.integers(0, 5),
    extra=st.sampled_from([0.0, 0.1, 3.0]),
    batch=st.sampled_from([16, 4096]),
    mode=st.just("training"),
    hop=st.sampled_from([0.0, 1e-3]),
)
@example(seed=0, extra=0.1, batch=64, mode="inference", hop=0.0)
def test_auto_pools_tables_only_if_that_gains_enough(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    extra: float,
    batch: int,
    mode: str,
    hop: float,
) -> None:
    profile = profiled(tmp_path_factory.mktemp("auto"), seed, _ROWS, 60)
    ranks = replace(topology(), latency=Latency.of_hops(hop))
    workload, settings = Workload(mode, None, batch), PlanSettings(extra_memory=extra)  # type: ignore[arg-type]
    found = place_by_table(profile, ranks, workload, settings)
    distinct = place_in_memory(profile, ranks, replace(workload, fetch="distinct"), settings)
    choice = FetchChoice.of(found)
    assert choice is not None
    assert choice.unpooled_step_seconds == predicted_seconds(distinct)
    if choice.pooled_tables:
        assert choice.share >= POOLED_GAIN
        assert predicted_seconds(found) <= predicted_seconds(distinct) * (1 - POOLED_GAIN)
    else:
        assert predicted_seconds(found) == predicted_seconds(distinct)
    assert found.cost.feasible
    plan = assemble(found)
    assert plan.step_time is not None
    assert plan.step_time.seconds == pytest.approx(predicted_seconds(found))
    (again,) = costs_under([plan], [problem_of(plan, profile)])
    np.testing.assert_allclose(again.rank_seconds, plan.cost.rank_seconds)


def test_long_bags_of_cold_rows_are_pooled_and_single_ids_fetched(tmp_path: Path) -> None:
    """Three rows that every rank has a copy of are pooled with the long bags, as that saves an
    exchange: by the steps of all four plans, too."""
    workload = Workload("training", "auto", 2048)
    ranks = replace(topology(), latency=Latency.of_hops(0.0))
    plan = make_plan(write_bags(tmp_path), ranks, workload, PlanSettings(extra_memory=0.5))
    assert plan.pooled_tables == ("few", "many", "more")
    assert plan.workload.fetch == "distinct"


def test_steps_name_the_tables_that_are_pooled(tmp_path: Path) -> None:
    profile, said = write_bags(tmp_path), list[str]()
    workload, settings = Workload("training", "auto", 2048), PlanSettings(extra_memory=0.05)
    make_plan(profile, topology(), workload, settings, report=said.append)
    assert said[0].startswith("no table pooled, ")
    assert any(step.startswith("3 tables pooled, ") for step in said)
    said.clear()
    make_plan(
        profile, topology(), replace(workload, fetch="distinct"), settings, report=said.append
    )
    assert not [step for step in said if "pooled" in step]


def test_kernels_that_read_rows_of_other_nodes_pool_none(tmp_path: Path) -> None:
    profile, settings = write_bags(tmp_path), PlanSettings(extra_memory=0.5)
    by_gets = replace(topology(), latency=Latency.of_hops(0.0), transport="nvshmem")
    plan = make_plan(profile, by_gets, Workload("training", "auto", 2048), settings)
    assert (plan.pooled_tables, plan.workload.fetch) == ((), "distinct")
    with pytest.raises(OperError, match="fetch pooled: the topology's transport is nvshmem"):
        make_plan(profile, by_gets, Workload("training", "pooled", 2048), settings)


def test_tables_without_pooling_are_fetched(tmp_path: Path) -> None:
    profile = profiled(tmp_path, 2, (3000, 5000), 3000)
    profile.tables = (replace(profile.tables[0], pooling="none"), profile.tables[1])
    for extra in (0.0, 3.0):
        plan = make_plan(
            profile, topology(), Workload("training", "auto", 64), PlanSettings(extra_memory=extra)
        )
        assert set(plan.pooled_tables) <= {"t1"}


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("balance", ["time", "link"])
@pytest.mark.parametrize("alike", [True, False])
def test_tables_without_pooling_on_any_ranks(
    tmp_path: Path, alike: bool, balance: Literal["time", "link"], mode: str
) -> None:
    """Links that are to be even, or differ, beside a pooled table."""
    profile = profiled(tmp_path, 2, (300, 500), 300)
    profile.tables = (replace(profile.tables[0], pooling="none"), profile.tables[1])
    cost = topology().link_cost
    uneven = cost * np.random.default_rng(1).uniform(0.5, 2.0, cost.shape)
    ranks = replace(topology(), link_cost=cost if alike else uneven)
    workload, settings = Workload(mode, "auto", 64), PlanSettings(0.3, balance=balance)  # type: ignore[arg-type]
    plan = make_plan(profile, ranks, workload, settings)
    assert set(plan.pooled_tables) <= {"t1"}
    assert plan.certificate is not None
    assert known_gap(plan.certificate) >= 0


def test_vectors_that_cost_less_than_reads_near_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For inference, where the nodes have unlike shares of what is read as well."""
    monkeypatch.chdir(tmp_path)
    profile, ranks = write_bags(tmp_path, 60), Topology.load("2x2-a100")
    planned = mixed(profile, ranks, ("many",), 0.0, "inference", 4096)
    assert not planned.problem.topology.near_first
    assert known_gap(planned.certificate) >= 0
    assemble(planned).save("q")
    fine("report", "q", "--profile", "p", "-o", "q.html")


def with_an_unread_table(folder: Path) -> Profile:
    """Return the profile of a log that never reads its table t0."""
    write_log(folder, 2, (300, 500), 300)
    log = pq.read_table(folder / "log.parquet")
    never = pa.array([[]] * len(log), pa.list_(pa.int64()))
    pq.write_table(log.set_column(0, "t0", never), folder / "log.parquet")
    return oper.profile(folder / "log.parquet", folder / "tables.yaml")


def test_a_table_that_is_never_read_beside_pooled_ones(tmp_path: Path) -> None:
    profile = with_an_unread_table(tmp_path)
    planned = mixed(profile, topology(), ("t1",), 0.3)
    assert planned.cost.feasible
    assert known_gap(planned.certificate) >= 0


def test_inference_on_ranks_with_unequal_memory_pools_all_tables_or_none(tmp_path: Path) -> None:
    """An unread table was fetched next to a pooled one."""
    profile = with_an_unread_table(tmp_path)
    sizes = (40 * 10**9, 80 * 10**9) + (40 * 10**9,) * (M - 2)
    for memory in ("linked", "shared"):
        ranks = replace(topology(memory), device_memory_bytes=sizes)
        plan = make_plan(profile, ranks, Workload("inference", "auto", 64), PlanSettings())
        assert set(plan.pooled_tables) in (set(), {"t0", "t1"})
        assert plan.cost.feasible


def test_commands_know_plans_with_some_pooled_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_bags(tmp_path)
    ranks = replace(topology(), latency=Latency.of_hops(0.0))
    Path("t.json").write_text(json.dumps(ranks.to_dict()), encoding="utf-8")
    options = ("--topology", "t.json", "--batch-size", 2048, "--extra-memory", 0.5)
    fine("plan", "p", "-o", "q", *options, "--fetch", "auto")
    text = " ".join(fine("plan", "check", "q", "log.parquet").split())
    assert "ok the figures add up" in text
    assert "table many: a bag needs" in text
    assert "table single" not in text
    shown = " ".join(fine("plan", "show", "q", "--profile", "p", "-v").split())
    pooled = json.loads(fine("plan", "show", "q", "--json"))["pooled_tables"]
    assert pooled == list(Plan.load("q").pooled_tables)
    assert f"but of {len(pooled)} of the tables other nodes add up the rows of each bag" in shown
    assert f"pooled of {len(pooled)} of 4 tables ({', '.join(pooled)})" in shown
    for table in ("single", "many"):
        fine("plan", "explain", "q", "--table", table, "--row", 1, "--profile", "p")
    drift = json.loads(fine("drift", "q", "p", "--json"))
    keep = drift["judgement"]["candidates"][0]
    assert keep["transfer_seconds"] == pytest.approx(Plan.load("q").cost.objective_seconds)
    said = json.loads(fine("plan", "p", "-o", "by-default", *options, "--json"))["fetch_auto"]
    auto = Plan.load("q")
    assert Plan.load("by-default").digest == auto.digest
    assert said["pooled_tables"] == len(pooled)
    text = " ".join(fine("plan", "p", "-o", "d", *options, "--fetch", "distinct").split())
    assert " pooled: step " not in text
    mine = Plan.load("d")
    assert mine.step_time is not None
    assert auto.step_time is not None
    assert said["unpooled_step_seconds"] == pytest.approx(mine.step_time.seconds)
    assert said["share"] == pytest.approx(1 - auto.step_time.seconds / mine.step_time.seconds)
    text = " ".join(fine("plan", "p", "-o", "by-default", *options, "--force").split())
    assert f"fetch {len(pooled)} of 4 tables pooled: step " in text
    assert "--fetch distinct keeps them" in text
    assert "compared " in text  # with simple plans
    fine("plan", "diff", "d", "q")
    fine("report", "q", "--profile", "p", "-o", "q.html")
    fine("plan", "p", "--curve", *options, "--fetch", "auto")
    assert "nothing moves" in fine("replan", "q", "p", "-o", "r")
    said = fine("compare", "p", *options, "--fetch", "auto", "--methods", "oper,row_wise", "--json")
    Path("compare.json").write_text(said, encoding="utf-8")
    fine("report", "q", "--compare", "compare.json", "-o", "compared.html")
    page = Path("compared.html").read_text(encoding="utf-8")
    assert "Each pools the tables with which it is shortest." in page
    refused(
        "report d --compare compare.json -o d.html",
        "--compare: expected fetch distinct, as the plan has, got auto",
    )


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("capacity", ["2", None])
def test_pooled_tables_are_no_loss_on_the_next_window(window: int, capacity: str | None) -> None:
    """Four of five reads of each window go to rows that the window before did not read. With copies
    of only those that it read, pooled tables took 10 times as long on the next: the case of window
    0 with capacity 2."""
    windows, ranks = churning_windows(4, 1.0, 5), Topology.load("2x4-a100")
    if capacity is not None:
        ranks = ranks.with_capacity(capacity)
    plans = [
        make_plan(windows[window], ranks, Workload("inference", fetch))
        for fetch in (None, "distinct")
    ]
    assert bool(plans[0].pooled_tables) == (capacity is None)  # all rows have copies there
    ours, distinct = (of_plan(plan, windows[window + 1]).step for plan in plans)
    assert ours <= distinct * (1 + 1e-9)


def test_pooled_plans_copy_unread_rows_while_memory_is_free() -> None:
    """The copies come last, so that rows that are read have theirs in any case."""
    (counts,), ranks = churning_windows(1, 0.1, 5), Topology.load("2x4-a100")
    assert (counts.accesses == 0).any()
    plan = make_plan(counts, ranks, Workload("inference", "pooled"))
    assert plan.cost.extra_memory_ratio == ranks.ranks - 1


def test_a_plan_keeps_its_pooled_tables(tmp_path: Path) -> None:
    """Planned again for other ranks, which by default would have other tables pooled."""
    profile, ranks = write_bags(tmp_path), replace(topology(), latency=Latency.of_hops(0.0))
    settings = PlanSettings(extra_memory=0.5)
    plan = make_plan(profile, ranks, Workload("training", None, 2048), settings)
    assert plan.pooled_tables == ("few", "many", "more")
    some = assemble(mixed(profile, ranks, ("more",), 0.5, batch=2048))
    assert assemble(place_like(some, profile, ranks, settings)).pooled_tables == ("more",)
    none = make_plan(profile, ranks, Workload("training", "distinct", 2048), settings)
    assert assemble(place_like(none, profile, ranks, settings)).pooled_tables == ()


def test_tables_of_one_id_are_not_pooled() -> None:
    """Sums of one row save nothing but exchanges."""
    (counts,), ranks = churning_windows(1, 0.1), Topology.load("2x4-a100")
    assert make_plan(counts, ranks, Workload("inference", "auto")).pooled_tables == ()


@pytest.mark.parametrize("change", ["one node", "nvshmem", "link", "unequal", "no lengths"])
def test_rows_are_fetched_as_usual_where_tables_cannot_be_chosen(
    tmp_path: Path, change: str
) -> None:
    profile, ranks = write_bags(tmp_path), replace(topology(), latency=Latency.of_hops(0.0))
    settings = PlanSettings(extra_memory=0.5, balance="link" if change == "link" else "time")
    if change == "one node":
        ranks = Topology.load("cpu:4")
    elif change == "nvshmem":
        ranks = replace(ranks, transport="nvshmem")
    elif change == "unequal":
        cost = ranks.link_cost * np.random.default_rng(1).uniform(0.3, 3.0, ranks.link_cost.shape)
        ranks = replace(ranks, link_cost=cost)
    elif change == "no lengths":
        profile.bag_lengths = None
    plan = make_plan(profile, ranks, Workload("training", None, 2048), settings)
    assert plan.pooled_tables == ()
    assert plan.workload.fetch == ("raw" if change == "one node" else "distinct")
