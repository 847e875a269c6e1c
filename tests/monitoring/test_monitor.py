"""`oper.monitor` on ranks: what it counts is what they read, and what it says follows from that."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import oper
from oper.base.errors import OperError, OperWarning
from oper.monitoring.followed_plans import FollowedPlans
from oper.monitoring.json_lines import GrowingReports
from oper.monitoring.sampled_iterations import SampledIterations
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.runtime.migration.changed_rows import changed_rows
from oper.scheduler.cache_settings import CacheSettings
from oper.tables.table import VocabularyDigest
from tests.support.commands import fine
from tests.support.commands import oper as oper_command
from tests.support.monitoring import monitor_cases as cases
from tests.support.planner.drifting import make_profile
from tests.support.runtime import traffic_cases
from tests.support.runtime.worlds import Worlds
from tests.support.torchrec.models import SAMPLES, Model, batch

STEPS = 12


def of_batches(iterations: list[int], ranks: int) -> Profile:
    """The profile of what ranks read in some iterations."""
    seeds = [cases.seeds(rank, STEPS)[i] for rank in range(ranks) for i in iterations]
    return oper.profile([batch(seed) for seed in seeds], Model("meta"))


def assert_equal(found: Profile, expected: Profile) -> None:
    """Two profiles have equal counts of each table, whatever the tables' order."""
    assert found.samples == expected.samples
    names = [table.name for table in expected.tables]
    assert sorted(names) == sorted(table.name for table in found.tables)
    assert found.bag_lengths is not None
    assert expected.bag_lengths is not None
    for number, table in enumerate(found.tables):
        other = names.index(table.name)
        np.testing.assert_array_equal(found.table_accesses(number), expected.table_accesses(other))
        np.testing.assert_array_equal(
            found.table_samples_with_row(number), expected.table_samples_with_row(other)
        )
        assert found.bag_lengths.summary(number) == expected.bag_lengths.summary(other)


@pytest.mark.parametrize("pipeline", [None, "TrainPipelineSparseDist"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_profile_is_of_all_ranks_batches_that_were_chosen(
    ranks: Worlds, every: int, pipeline: str | None
) -> None:
    found = ranks.run(2, cases.trained, STEPS, pipeline, sample_every=every)
    chosen = [i for i in range(STEPS) if i in SampledIterations(every)]
    profile, nothing = found[0][0], found[1][0]
    assert nothing is None
    assert profile.source == {"monitored": {"sample_every": every, "periods": 0}}
    assert_equal(profile, of_batches(chosen, 2))


def test_training_has_the_same_bits(ranks: Worlds) -> None:
    with_it = ranks.run(2, cases.trained, STEPS, sample_every=2, period=3)
    without = ranks.run(2, cases.trained, STEPS, monitored=False)
    assert [outputs for _, outputs in with_it] == [outputs for _, outputs in without]


def test_periods_end_in_steps(ranks: Worlds, tmp_path: Path) -> None:
    ranks.run(2, cases.in_passing, tmp_path / "run.jsonl")
    reports = GrowingReports(tmp_path / "run.jsonl").new(9)
    sampled = SampledIterations(2)
    for number, report in enumerate(reports):
        iterations = range(5 * number, 5 * number + 5)
        counted = sum(i in sampled for i in iterations)
        assert (report.period, report.iterations, report.counted_iterations) == (number, 5, counted)
        assert report.samples == 2 * SAMPLES * counted
        assert report.last_iteration == 5 * number + 5
        assert report.judgement is None  # so few accesses tell nothing
        assert report.why_not_judged
    assert len(reports) == 3
    assert "16 iterations" not in fine("top", tmp_path / "run.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two tables by Zipf's law, as `cases.drifting` reads them."""
    return planned(tmp_path_factory.mktemp("monitored"))


def planned(place: Path, **settings: Any) -> Path:
    tables = (oper.Table("a", 3000, 8), oper.Table("b", 1000, 8))
    random = np.random.default_rng(7)
    counts = [
        np.bincount((random.zipf(1.3, 200_000) - 1) % t.rows, minlength=t.rows) for t in tables
    ]
    profile = make_profile(tables, [c.astype(np.uint32) for c in counts])
    workload = oper.Workload("training", "raw", 512)
    hosts = "host_memory: 1GB\nhost_bandwidth: 100MB/s\n"
    text = traffic_cases.TOPOLOGY.replace("[0, 0, 0]", "[0, 0]")
    (place / "topology.yaml").write_text(text + hosts)
    topology = oper.Topology.load(str(place / "topology.yaml"))
    plan = oper.make_plan(
        profile, topology, workload, oper.PlanSettings(extra_memory=0.02, **settings)
    )
    plan.save(place / "plan")
    return place / "plan"


@pytest.mark.parametrize("changes", [False, True])
def test_a_drift_is_found_and_none_where_there_is_none(
    ranks: Worlds, folder: Path, tmp_path: Path, changes: bool
) -> None:
    found = ranks.run(2, cases.drifting, folder, tmp_path / "run.jsonl", changes)
    assert found[1][0] == []
    reports, profile, (said, scalars) = found[0]
    verdicts = [report.verdict for report in reports]
    assert verdicts[:2] == ["not judged", "keep"]
    assert reports[0].why_not_judged == "no period before it to make a plan from"
    # A period after the rows changed, a plan can be made for them.
    assert verdicts[3:] == ["replan" if changes else "keep"] * 2
    last = reports[-1].judgement
    assert last is not None
    if changes:
        assert last.replan.moved_bytes > 0
        assert last.pays_after_steps(last.replan) is not None
        assert last.gain_seconds > 0.02 * last.best.step_seconds
    else:
        assert abs(last.worse) < 0.02

    # It is a profile as all others: a plan is made again by it, and then fits.
    profile.save(tmp_path / "profile")
    again = tmp_path / "plan-new"
    fine("replan", folder, tmp_path / "profile", "-o", again)
    after = oper.drift(again, tmp_path / "profile").judgement.keep.transfer_seconds
    before = oper.drift(folder, tmp_path / "profile").judgement.keep.transfer_seconds
    assert after <= before
    assert (after < 0.95 * before) == changes
    fine("plan", tmp_path / "profile", "--topology", "cpu:2", "-o", tmp_path / "fresh")

    # Everyone is told the same.
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [report.to_json() for report in reports]
    assert said == [report.sentence() for report in reports]
    assert scalars == [
        (name, value, report.last_iteration)
        for report in reports
        for name, value in report.scalars().items()
    ]


NODES = {
    "one node": traffic_cases.TOPOLOGY,
    "two nodes": """
name: two-slow-nodes
node_of: [0, 0, 1, 1]
bandwidth: {local: 4.0e+9, same_node: 1.0e+8, other_node: 5.0e+7}
allreduce_bandwidth: 3.0e+9
latency_seconds: 1.0e-9
memory: shared
""",
}


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_counted_traffic_is_what_the_plan_predicts(
    ranks: Worlds, tmp_path: Path, fetch: str, nodes: str
) -> None:
    """Between nodes distinct rows pass relays, on both sides of the comparison."""
    log = traffic_cases.write_log(tmp_path)
    (tmp_path / "topology.yaml").write_text(NODES[nodes])
    number = 3 if nodes == "one node" else 4
    measured = ("--batch-size", traffic_cases.BATCH, "--ranks", number)
    profile, plan = tmp_path / "profile", tmp_path / "plan"
    fine("profile", log, "-o", profile, "--tables", tmp_path / "tables.yaml", *measured)
    workload = ("--batch-size", traffic_cases.BATCH, "--fetch", fetch, "--extra-memory", "1%")
    fine("plan", profile, "-o", plan, "--topology", tmp_path / "topology.yaml", *workload)
    report = ranks.run(number, cases.counted_log, log, plan)[0]
    predicted, counted = report.predicted, report.counted
    assert report.batch_size == traffic_cases.BATCH
    assert Plan.load(plan).replica_accesses > 0
    assert counted.replica_share == pytest.approx(predicted.replica_share, rel=1e-9)
    np.testing.assert_allclose(counted.lookups, predicted.lookups, rtol=0.02)
    passed = predicted.link_bytes > 0
    assert passed.any()
    assert not counted.link_bytes[~passed].any()
    np.testing.assert_allclose(counted.link_bytes[passed], predicted.link_bytes[passed], rtol=0.05)
    for kind in ("fetch", "gradient"):
        assert getattr(counted.communication_bytes, kind) == pytest.approx(
            getattr(predicted.communication_bytes, kind), rel=0.02
        )


def test_rows_follow_what_is_read(ranks: Worlds, folder: Path, tmp_path: Path) -> None:
    """With every policy the outputs are the same bits; with "migrate" rows move while it trains."""
    found = {
        policy: ranks.run(2, cases.followed, folder, tmp_path / policy, policy)
        for policy in ("report", "propose", "migrate")
    }
    stayed = Plan.load(folder).profile
    for policy, of_ranks in found.items():
        for n, (_, outputs, moving, digest) in enumerate(of_ranks):
            assert outputs == found["report"][n][1]
            assert (moving > 0) == (policy == "migrate")
            assert (digest != stayed) == (policy == "migrate")
    assert not (tmp_path / "report").exists()
    for policy in ("propose", "migrate"):
        reports = found[policy][0][0]
        made = [report.new_plan for report in reports if report.new_plan]
        assert made
        written = {str(path) for path in (tmp_path / policy).iterdir()}
        assert written == set(made)
        last = Plan.load(made[-1])
        assert policy == "propose" or last.profile == found[policy][0][3]
        sentence = reports[int(made[0][-1])].sentence()
        assert "moves of " in sentence
        state = f"migrating to {made[0]}, not begun: " if policy == "migrate" else "new plan: "
        assert state in sentence
        assert made[0] in sentence
    proposed = found["propose"][0][0]
    # Nobody follows. In the first period of other rows all plans are made from older counts.
    assert [bool(report.new_plan) for report in proposed[2:]] == [False, True, True]
    # Rows that are read now are where they are read.
    balance = [report.counted.lookups_dob for report in found["migrate"][0][0]]
    assert balance[2] < 0.6
    assert balance[4] > 0.9


def test_cached_rows_follow_what_is_read(ranks: Worlds, tmp_path: Path) -> None:
    """A plan with a table in the tier is followed, and outputs are the same bits. Its counts are
    those of all periods, under which moves of the tier's rows gain nothing."""
    folder, cache = planned(tmp_path, tier=["a"]), CacheSettings("50%")
    found = {
        policy: ranks.run(2, cases.followed, folder, tmp_path / policy, policy, cache=cache)
        for policy in ("report", "migrate")
    }
    for n, (_, outputs, moving, _) in enumerate(found["migrate"]):
        assert outputs == found["report"][n][1]
        assert moving > 0
    reports = found["migrate"][0][0]
    plans = [Plan.load(folder), *(Plan.load(r.new_plan) for r in reports if r.new_plan)]
    rows = changed_rows(plans[0], plans[-1])
    assert 1 in rows.table


def test_a_plan_that_is_gone_ends_no_job(ranks: Worlds, folder: Path, tmp_path: Path) -> None:
    for said in ranks.run(2, cases.follows_nothing, folder, tmp_path / "plans"):
        assert len(said) == 1
        assert said[0].startswith("no migrations: ")
        assert "period-" in said[0]


def test_where_no_plan_can_be_written_it_is_judged(
    ranks: Worlds, folder: Path, tmp_path: Path
) -> None:
    for number in range(5):
        (tmp_path / "plans" / f"period-{number}").mkdir(parents=True)
        (tmp_path / "plans" / f"period-{number}" / "notes.txt").write_text("mine")
    found = ranks.run(2, cases.followed, folder, tmp_path / "plans", "migrate")
    assert [report.verdict for report in found[0][0]][3:] == ["replan"] * 2
    assert not any(report.new_plan for report in found[0][0])
    assert found[0][2] == 0


def test_a_rank_that_does_not_come_does_not_end_a_job(ranks: Worlds) -> None:
    said = ranks.run(2, cases.one_does_not_come)
    assert "no further periods: rank 1 did not come" in said[0]
    assert said[1] == ""


def test_what_is_refused_is_refused_on_all_ranks(ranks: Worlds, folder: Path) -> None:
    found = ranks.run(2, cases.refused, folder)
    expected = (
        "Linear: has no collection that OPER sharded",
        "monitor: model: expected ",
        "by another plan than the one given",
        "sample_every: expected 1, which counts all, to",
        "period: expected 1 to 1,099,511,627,776 iterations, or None, got 0",
        "period and policy are 10, 11 and report on rank 1 and 10, 10 and report on rank 0",
        "period: expected at least 100 iterations, of which one is counted (sample_every), got 10",
        "policy: expected one of report, propose, migrate, got 'move'",
        "policy 'propose' writes plans; say where",
        "100, 20,000 and migrate on rank 1 and 100, 20,000 and propose on rank 0",
        ("cannot be written", "rank 0 cannot begin"),
        "monitor: jsonl: expected ",
        ("rank 1 cannot begin; its own error says why", "period: expected 1 to"),
        ("rank 1 cannot begin", "deadline_seconds: expected a positive number of seconds, got -1"),
        "writer '3': has no add_scalar",
        "sample_every: expected 1, which counts all, to",
        "the monitor counted nothing yet",
        "the monitor is closed",
    )
    for rank, errors in enumerate(found):
        for words, error in zip(expected, errors, strict=True):
            assert (words if isinstance(words, str) else words[rank]) in error


def test_a_period_says_how_far_rows_are_on_their_way(tmp_path: Path) -> None:
    followed = FollowedPlans("migrate", tmp_path)
    assert followed.moving() is None
    followed._proposed = 3
    assert str(followed.moving()) == f"migrating to {tmp_path}/period-3, not begun"
    followed.migration = cast(Any, SimpleNamespace(steps_made=1034, steps=2000))
    followed._period = 3
    assert str(followed.moving()) == f"migrating to {tmp_path}/period-3, step 1,034 of 2,000"
    only_proposes = FollowedPlans("propose", tmp_path)
    only_proposes._proposed = 3
    assert only_proposes.moving() is None


@pytest.mark.parametrize("ranks_count", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("steps", "periods"), [(0, 0), (4, 0), (5, 1), (6, 1), (10, 2)])
def test_a_job_that_ends_with_a_period_reports_it(
    ranks: Worlds, tmp_path: Path, ranks_count: int, fails: bool, steps: int, periods: int
) -> None:
    ranks.run(ranks_count, cases.in_passing, tmp_path / "run.jsonl", steps, fails)
    reports = GrowingReports(tmp_path / "run.jsonl").new(9)
    assert [report.last_iteration for report in reports] == [5, 10][:periods]
    assert all(report.iterations == 5 for report in reports)


def test_a_rank_that_does_not_close_is_waited_for_until_the_deadline(ranks: Worlds) -> None:
    said = ranks.run(2, cases.one_does_not_close)
    assert "no further periods" in said[0]
    assert "rank 1 did not come within 1 s, while rank 0 waited for it to merge" in said[0]


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of texts, its profile, and a plan for two ranks."""
    place = tmp_path_factory.mktemp("texts")
    values = [f"v{n}" for n in np.random.default_rng(0).zipf(1.5, 2000) % 300]
    pq.write_table(pa.table({"item": values}), place / "log.parquet")
    fine("profile", place / "log.parquet", "-o", place / "counted", "--dim", "8")
    fine("plan", place / "counted", "--topology", "cpu:2", "-o", place / "planned")
    return place


def test_a_monitors_profile_has_the_vocabularies_of_the_plan(
    ranks: Worlds, of_texts: Path, tmp_path: Path
) -> None:
    """So that plans made from it read raw values, and later profiles are compared with them."""
    ranks.run(2, cases.saved_profile, of_texts / "planned", tmp_path)
    for name, loaded in (
        ("profile", Profile.load(tmp_path / "profile")),
        ("plan", Plan.load(tmp_path / "plan")),
    ):
        found = loaded.prepared().vocabularies["item"]
        assert found.equals(Profile.load(of_texts / "counted").prepared().vocabularies["item"])
        fine(
            "profile",
            of_texts / "log.parquet",
            "--tables",
            tmp_path / name,
            "-o",
            tmp_path / f"by-{name}",
        )
    fine("drift", tmp_path / "plan", of_texts / "counted")
    pq.write_table(pa.table({"item": [f"v{n % 400}" for n in range(3000)]}), tmp_path / "b.parquet")
    fine("profile", tmp_path / "b.parquet", "-o", tmp_path / "other", "--dim", "8")
    for command in (("drift",), ("replan", "-o", tmp_path / "new")):
        said = oper_command(command[0], tmp_path / "plan", tmp_path / "other", *command[1:])
        assert said.status == 2
        assert "table 'item'" in said.errors


def test_a_plan_that_lost_its_vocabularies_is_still_compared(
    ranks: Worlds, of_texts: Path, tmp_path: Path
) -> None:
    """A profile of a plan whose vocabularies are in memory alone, and gone, keeps their digests."""
    profile = Profile.load(of_texts / "counted")
    lost = replace(profile, vocabulary_folder=None, read_vocabularies=_gone)
    with pytest.warns(OperWarning, match="vocabularies of the monitored plan are left out: gone"):
        lost.save(tmp_path / "lost")
    assert Profile.load(tmp_path / "lost").numbered_tables() == profile.numbered_tables()
    fine("plan", tmp_path / "lost", "--topology", "cpu:2", "-o", tmp_path / "plan")
    table = profile.tables[0]
    digest = VocabularyDigest(table.rows - 1, "0" * 64)
    other = replace(profile, tables=(replace(table, ids=replace(table.ids, vocabulary=digest)),))
    with pytest.raises(OperError, match="table 'item'"):
        oper.drift(tmp_path / "plan", other)


def _gone() -> Any:
    raise OperError("gone")
