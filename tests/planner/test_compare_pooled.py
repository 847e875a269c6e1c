"""`oper compare` where tables are pooled: what other methods' placements cost, against the cost of
single rows written out and of counts as plans have them; the tables that each pools; what is
printed, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from oper.base.errors import OperError
from oper.cost.workload import Fetch, Workload
from oper.plan.settings import PlanSettings
from oper.planner.baselines import torchrec_planner as trec
from oper.planner.baselines.baseline import Baseline, PooledBytes, Status, TorchRecNotes
from oper.planner.baselines.registry import BASELINES, make_baseline
from oper.planner.compare import Comparison, compare
from oper.planner.place_by_table import Way, poolable, ways_to_fetch
from oper.planner.price_fetched import cheaper_pooled_of, price_fetched, refetched
from oper.planner.price_plan import price_counts
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.profile import Profile
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology
from tests.planner.test_place_pooled import cost_written_out, profiled, topology
from tests.support.commands import fine, refused
from tests.support.planner.gaps import known_gap

pytestmark = pytest.mark.usefixtures("small_programmes")

Mode = Literal["training", "inference"]
QUICK = ("oper", *(name for name, rule in BASELINES.items() if rule.quick is not None))
ROWS = (900, 70, 400)
BATCH = 64
SETTINGS = PlanSettings(extra_memory=0.3, threshold=0.02)


def way(profile: Profile, mode: Mode, pooled: tuple[str, ...]) -> Way:
    """The way to fetch that pools these tables; all of them as `--fetch pooled` does."""
    fetch: Fetch = "pooled" if len(pooled) == len(profile.tables) else "distinct"
    return Way(frozenset(pooled), Workload(mode, fetch, BATCH))


def problem_of(
    profile: Profile, ranks: Topology, mode: Mode, pooled: tuple[str, ...] = ()
) -> Problem:
    return way(profile, mode, pooled).problem(profile, ranks, SETTINGS, by_table=True)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("fetch", ["pooled", "auto"])
def test_the_command_compares_what_oper_plan_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: str, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    profiled(tmp_path, 1, ROWS, 600)
    (tmp_path / "t.json").write_text(json.dumps(topology().to_dict()), encoding="utf-8")
    given = f"--topology t.json --mode {mode} --fetch {fetch} --batch-size 512 --extra-memory 0.3"
    options = given.split()
    of_plan = json.loads(fine("plan", "p", "-o", "q", *options, "--json"))
    methods = ("--methods", ",".join((*QUICK, "milp")), "--time-limit", 0.5)
    (run,) = json.loads(fine("compare", "p", *options, *methods, "--json"))["runs"]
    ours = run["methods"]["oper"]
    assert ours["objective_seconds"] == of_plan["objective_seconds"]
    assert ours["certified_gap"] == of_plan["certified_gap"] >= 0
    assert ours["pooled_tables"] == of_plan["pooled_tables"]
    assert run["settings"]["fetch"] == fetch
    assert Comparison.from_json(run).to_json() == run
    text = fine("compare", "p", *options, *methods)
    assert max(map(len, text.splitlines())) <= 100
    said = " ".join(text.split())
    solver = run["methods"]["milp"]
    if fetch == "pooled":
        assert "other nodes add up the rows of each bag (pooled fetches)" in said
        assert "Other methods than oper place rows as without pooling" in said
        assert (solver["status"], solver["objective_seconds"]) == (Status.NOT_POOLED, None)
        assert "milp: its costs add up row by row" in said
        assert all(run["methods"][name]["pooled_tables"] == ["t0", "t1", "t2"] for name in QUICK)
    else:
        assert "each method's tables pooled or not, as is shortest (fetch auto)" in said
        pooled = any(result["pooled_tables"] for result in run["methods"].values())
        assert ("Tables pooled: " in said) == pooled
        assert "any placement within these limits with" in said
        assert solver["pooled_tables"] == []


@pytest.mark.parametrize("memory", ["linked", "shared"])
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("pooled", [("t0",), ("t0", "t1", "t2")])
@pytest.mark.parametrize("name", ["table_wise", "row_wise", "memory_greedy"])
def test_a_placement_costs_what_its_rows_do(
    tmp_path: Path, name: str, pooled: tuple[str, ...], mode: Mode, memory: str
) -> None:
    """As the log's own samples are read, row by row."""
    profile, ranks = profiled(tmp_path, 2, ROWS, 60), topology(memory)
    placed = make_baseline(name, problem_of(profile, ranks, mode), 1.0)
    problem = problem_of(profile, ranks, mode, pooled)
    counted = make_problem(
        profile,
        problem.topology,
        problem.workload,
        SETTINGS,
        as_counted=True,
        by_table=True,
    )
    assert placed.under is not None
    assert placed.pieces is not None
    owner = np.split(placed.pieces.owners().astype(np.int64), profile.offsets[1:-1])
    found = price_fetched(counted, placed.under(counted))
    written = cost_written_out(profile, BATCH, owner, mode == "training", ranks, pooled)
    assert found.objective_seconds == pytest.approx(written, rel=1e-6)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("pooled", [(), ("t0",), ("t0", "t1", "t2")])
@pytest.mark.parametrize("name", [name for name in QUICK if name != "oper"])
def test_a_placement_costs_what_a_plan_of_it_would(
    tmp_path: Path, name: str, pooled: tuple[str, ...], mode: Mode
) -> None:
    """As `oper drift` and `oper replan` price rows where a plan has them."""
    profile, ranks = profiled(tmp_path, 3, ROWS, 600), topology()
    problem = problem_of(profile, ranks, mode, pooled)
    placed = refetched(problem, make_baseline(name, problem_of(profile, ranks, mode), 1.0))
    assert placed.cells is not None
    counts = placed.cells.dense(len(problem.classes), len(placed.holder_sets))
    wanted = price_counts(problem, placed.holder_sets, counts)
    found = price_fetched(problem, placed)
    np.testing.assert_allclose(found.rank_seconds, wanted.rank_seconds, rtol=1e-9)


def shards(problem: Problem, *of_first: tuple[int, int, int]) -> Baseline:
    """TorchRec's shards: of the first table rank, first column and columns of each, of the second
    whole rows on ranks 1 and 2, and the third on all ranks."""
    first, second, third, end = problem.profile.offsets.tolist()
    half = (second + third) // 2
    found = [
        trec.Shard(0, "column_wise", rank, first, second, columns, column)
        for rank, column, columns in of_first
    ]
    found.append(trec.Shard(1, "row_wise", 1, second, half, 8))
    found.append(trec.Shard(1, "row_wise", 2, half, third, 8))
    found.append(trec.Shard(2, "data_parallel", -1, third, end, 12))
    notes = TorchRecNotes(1.0, 0.0, 0.0, {}, PooledBytes(0.0, 0.0, 0.0, 0.0))
    return trec.shards_baseline(problem, found, trec.count_shards(problem, found), notes)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("pooled", [("t0",), ("t0", "t1", "t2")])
def test_columns_send_their_part_of_a_vector(
    tmp_path: Path, pooled: tuple[str, ...], mode: Mode
) -> None:
    """Half of the columns on one rank and half on another take the mean of all on the one and all
    on the other."""
    profile, ranks = profiled(tmp_path, 4, ROWS, 600), topology()
    problem = problem_of(profile, ranks, mode, pooled)
    near, far, halved = (
        price_fetched(problem, shards(problem, *of_first))
        for of_first in ([(0, 0, 4)], [(3, 0, 4)], [(0, 0, 2), (3, 2, 2)])
    )
    mean = (near.rank_seconds + far.rank_seconds) / 2
    np.testing.assert_allclose(halved.rank_seconds, mean, rtol=1e-9)
    assert near.lookups.sum() < halved.lookups.sum()  # both halves look every access up


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("name", ["table_wise", "row_wise", "access_greedy", "paper", "shards"])
def test_tables_that_a_placement_reads_faster_pooled(tmp_path: Path, name: str, mode: Mode) -> None:
    """By pricing all with one table pooled after the other."""
    profile, ranks = profiled(tmp_path, 5, ROWS, 600), topology()
    names = tuple(table.name for table in profile.tables)
    unpooled = problem_of(profile, ranks, mode)
    if name == "shards":
        placed = shards(unpooled, (0, 0, 2), (3, 2, 2))
    else:
        placed = make_baseline(name, unpooled, 1.0)

    def mean(*pooled: str) -> float:
        problem = problem_of(profile, ranks, mode, pooled)
        return float(price_fetched(problem, refetched(problem, placed)).rank_seconds.mean())

    wanted = {table for table in names if mean(table) < mean()}
    assert cheaper_pooled_of(unpooled, problem_of(profile, ranks, mode, names), placed) == wanted


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_with_auto_no_method_is_longer_than_either_way(
    tmp_path: Path, seed: int, alike: bool, mode: Mode
) -> None:
    """And none is below the bound of its own way, on ranks that are alike or not."""
    profile, ranks = profiled(tmp_path, seed, ROWS, 600), topology()
    if not alike:
        factors = np.random.default_rng(seed).uniform(0.5, 2.0, ranks.link_cost.shape)
        ranks = replace(ranks, link_cost=ranks.link_cost * factors)
    found: dict[str, Comparison] = {
        fetch: compare(profile, ranks, Workload(mode, fetch, 512), SETTINGS, QUICK)
        for fetch in ("distinct", "pooled", "auto")
    }
    for name in QUICK:
        mine = {fetch: run.methods[name] for fetch, run in found.items()}
        for run in found.values():
            result = run.methods[name]
            assert result.certificate is None or known_gap(result.certificate) >= -1e-9
            seconds = result.objective_seconds
            assert seconds is not None
            assert not result.fits or seconds >= run.lower_bound_seconds * (1 - 1e-9)
        if name != "oper":  # which takes the shortest step
            times = {fetch: result.objective_seconds or 0.0 for fetch, result in mine.items()}
            assert times["auto"] <= min(times["distinct"], times["pooled"]) * (1 + 1e-9)


def test_data_that_follow_are_priced_with_the_tables_that_a_method_pools(tmp_path: Path) -> None:
    profile = profiled(tmp_path, 1, ROWS, 600)
    profile.following = profile  # as if the same came again
    for fetch in ("pooled", "auto"):
        workload = Workload("training", fetch, 512)
        found = compare(profile, topology(), workload, SETTINGS, QUICK)
        assert found.held_out is not None
        assert found.held_out.lower_bound_seconds == pytest.approx(found.lower_bound_seconds)
        for name in ("oper", "table_wise", "row_wise", "memory_greedy"):
            result = found.methods[name]
            assert result.held_out_seconds == pytest.approx(result.objective_seconds)
            # For OPER's striped rows the prediction knows only the ranks' shares.
            tolerance = 0.02 if name == "oper" else 1e-9
            assert result.held_out_step_seconds == pytest.approx(result.step_seconds, rel=tolerance)


def test_devices_decide_on_the_memory(tmp_path: Path) -> None:
    profile = profiled(tmp_path, 1, ROWS, 600)
    ranks = replace(topology(), device_memory_bytes=(10**7,) * 4)
    for fetch in ("pooled", "auto"):
        workload = Workload("inference", fetch, 512)
        found = compare(profile, ranks, workload, PlanSettings(), QUICK)
        assert found.limits.by_devices
        for name in found.fitting:
            assert (found.methods[name].certified_gap or 0.0) >= -1e-9


def test_on_one_node_nothing_is_pooled(tmp_path: Path) -> None:
    profile = profiled(tmp_path, 3)
    found = compare(profile, "cpu:2", Workload("training", "auto", 64), SETTINGS, QUICK)
    raw = compare(profile, "cpu:2", Workload("training", "raw", 64), SETTINGS, QUICK)
    assert found.workload.fetch == "raw"
    for name, result in found.methods.items():
        assert result.pooled_tables == ()
        assert result.objective_seconds == raw.methods[name].objective_seconds


def test_what_cannot_be_pooled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile, ranks = profiled(tmp_path, 3), topology()
    pooled, auto = (Workload("training", fetch, 64) for fetch in ("pooled", "auto"))
    given = "--topology 2x2-a100 --batch-size 2 --methods row_wise"
    for fetch in ("pooled", "auto"):
        refused(f"compare p {given} --fetch {fetch}", "expected at least a sample for each of")
    tables = profile.tables
    profile.tables = (replace(tables[0], pooling="none"), *tables[1:])
    with pytest.raises(OperError, match=r"1 table without pooling \(t0\).*fetch='auto'"):
        compare(profile, ranks, pooled, SETTINGS, ("row_wise",))
    assert poolable(profile) == {"t1"}
    found = compare(profile, ranks, auto, SETTINGS, QUICK)
    assert all(set(result.pooled_tables) <= {"t1"} for result in found.methods.values())
    ways = ways_to_fetch(profile, ranks, auto, SETTINGS)
    assert [each.pooled for each in ways] == [frozenset(), {"t1"}]
    assert isinstance(ways[1].problem(profile, ranks, SETTINGS, True).topology, PooledTopology)
    profile.tables, profile.bag_lengths = tables, None
    for workload in (pooled, auto):
        with pytest.raises(OperError, match="does not say how long bags are"):
            compare(profile, ranks, workload, SETTINGS, ("row_wise",))
