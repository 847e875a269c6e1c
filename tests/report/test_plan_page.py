"""The page of a plan: figures that are the plan's, sentences that are true of it, and errors if
material belongs to another plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oper
from oper.base.errors import OperError
from oper.base.formatting import format_bytes, format_duration
from oper.cost.workload import Workload
from oper.plan.certificate import Certificate
from oper.plan.memories import Memory
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import rows_by_kind
from oper.plan.settings import Limits, PlanSettings
from oper.planner import memory_curve as curve_module
from oper.planner.compare import Comparison
from oper.planner.make_plan import make_plan
from oper.planner.memory_curve import CurvePoint
from oper.planner.replan.replan import replan
from oper.profiling.profile import Profile
from oper.report import plan_page as plan_page_module
from oper.report.charts.chart import Chart
from oper.report.charts.comparison_charts import beside, comparison_chart
from oper.report.charts.memory_line import memory_curve_chart
from oper.report.plan_page import Material, memory_of_ranks, plan_page
from oper.report.render_page import Page
from oper.report.table_list import shares_that_add_up, table_list
from oper.report.time_by_row_kind import kind_times
from oper.report.two_plans_page import two_plans_page
from oper.report.write_report import write_report
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.report.conftest import Reported
from tests.support.commands import fine
from tests.support.examples import examples
from tests.support.planner.profiles import make_profile

pytestmark = pytest.mark.usefixtures("small_programmes")

TOPOLOGIES = ("dgx-a100", "2x2-a100", "cpu:3", "1x1-a100", "3x2-h100")


@pytest.fixture(scope="module")
def plan(reported: Reported) -> Plan:
    return Plan.load(reported.file("plan"))


@examples(12)
@given(
    st.integers(0, 10_000),
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(["training", "inference"]),
    st.sampled_from([0.0, 0.3, 2.0]),
)
def test_the_time_of_all_kinds_is_the_predicted_time(
    tmp_path_factory: pytest.TempPathFactory, seed: int, name: str, mode: str, extra: float
) -> None:
    profile = make_profile(seed)
    made = planned(tmp_path_factory.mktemp("plan"), profile, name, mode, extra)
    times = kind_times(made, profile)
    total = times.replicated + times.listed + times.striped + times.in_hosts
    np.testing.assert_allclose(total, made.cost.rank_seconds, rtol=1e-12)
    assert not times.in_hosts.any()


def planned(folder: Path, profile: Profile, name: str, mode: str, extra: float) -> Plan:
    workload = Workload(mode, batch_size=64)  # type: ignore[arg-type]
    asked = PlanSettings(extra_memory=extra)
    make_plan(profile, Topology.load(name), workload, asked).save(folder / "plan")
    return Plan.load(folder / "plan")


def test_the_time_of_a_tier_is_its_parts_own(tmp_path: Path) -> None:
    profile = make_profile(3)
    tier = [profile.tables[0].name]
    workload = Workload("training", batch_size=64)
    make_plan(profile, Topology.load("dgx-a100"), workload, PlanSettings(tier=tier)).save(
        tmp_path / "p"
    )
    made = Plan.load(tmp_path / "p")
    times = kind_times(made, profile)
    assert made.host is not None
    of_tier = made.host.cost.rank_seconds
    np.testing.assert_allclose(times.in_hosts, of_tier, rtol=1e-12)
    devices = times.replicated + times.listed + times.striped
    np.testing.assert_allclose(devices + of_tier, made.cost.rank_seconds, rtol=1e-12)
    page = plan_page(made, "p", Material(profile))
    kinds = rows_by_kind(made)
    for key, held in (
        ("memory", kinds.memory["device"].total),
        ("host-memory", kinds.memory["host"].total),
    ):
        totals = [row[-1] for row in chart(page, key).rows]
        assert totals == [format_bytes(int(total)) for total in held], key


def test_a_plan_whose_tables_are_all_in_the_tier(tmp_path: Path) -> None:
    profile = make_profile(3)
    workload = Workload("training", batch_size=64)
    make_plan(profile, Topology.load("cpu:2"), workload, PlanSettings(tier="all")).save(
        tmp_path / "p"
    )
    page = plan_page(Plan.load(tmp_path / "p"), "p", Material(profile))
    assert [c.key for c in page.sections[0].charts] == ["host-memory", "time"]
    assert "All tables are in the hosts' memory" in words(page, "memory-limit")
    assert "hosts' memory" in words(page, "ranks")


def chart(page: Page, key: str) -> Chart:
    (found,) = (chart for section in page.sections for chart in section.charts if chart.key == key)
    return found


def words(page: Page, key: str) -> str:
    (section,) = (section for section in page.sections if section.key == key)
    return " ".join(section.sentences)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_every_kind_of_plan_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    profile = make_profile(5)
    made = planned(tmp_path, profile, name, mode, 0.3)
    # Both pages below have one curve, which takes the longest.
    monkeypatch.setattr(curve_module, "_SHARES", (0.0, 0.2))
    curve = plan_page_module._curve(made, profile)
    monkeypatch.setattr(plan_page_module, "_curve", lambda *_: curve)
    for material in (Material(), Material(profile)):
        page = plan_page(made, "a plan", material)
        bars = chart(page, "memory")
        assert len(bars.rows) == made.ranks
        sums: dict[str, float] = {}
        for value in bars.spec["data"]["values"]:
            sums[value["rank"]] = sums.get(value["rank"], 0.0) + value["value"]
        assert len(sums) == made.ranks
        ratios = np.array([*sums.values()]) / made.cost.memory_bytes
        assert ratios.min() == pytest.approx(ratios.max(), rel=1e-3)
    write_report(made, tmp_path / "page.html", profile)
    assert (tmp_path / "page.html").stat().st_size < 5_000_000


def test_of_many_ranks_a_column_is_of_several(tmp_path: Path) -> None:
    profile = make_profile(5)
    workload = Workload("training", batch_size=4096)
    make_plan(profile, Topology.load("50x4-a100"), workload, PlanSettings()).save(tmp_path / "p")
    made = Plan.load(tmp_path / "p")
    page = plan_page(made, "many", Material())
    bars = chart(page, "memory")
    ranks = [value["rank"] for value in bars.spec["data"]["values"]]
    assert len(set(ranks)) == 50
    assert ranks[-1] == "196-199"
    assert "A column is the mean of 4 ranks." in bars.caption
    assert len(bars.rows) == 200
    links = chart(page, "links").spec["data"]["values"]
    assert len(links) <= 32 * 32
    # The mean of a cell times its pairs is what the ranks fetch in all.
    sizes = {name: rank_count(name) for name in {value["reader"] for value in links}}
    total = sum(
        value["value"]
        * (
            sizes[value["reader"]] * sizes[value["source"]]
            - (value["reader"] == value["source"]) * sizes[value["reader"]]
        )
        for value in links
    )
    fetched = made.cost.link_bytes.sum()
    unit = round(np.log10(fetched / total))  # the axis' unit is a power of a thousand
    assert total * 10.0**unit == pytest.approx(fetched, rel=1e-3)


def rank_count(name: str) -> int:
    first, _, last = name.partition("-")
    return int(last or first) - int(first) + 1


def test_memory_is_a_limit_where_all_of_it_is_used(plan: Plan, reported: Reported) -> None:
    assert plan.limits is not None
    assert plan.cost.extra_memory_ratio >= 0.99 * plan.limits.extra_memory
    profile = Profile.load(reported.file("profile"))
    said = words(plan_page(plan, "p", Material(profile)), "memory-limit")
    assert said.startswith("Memory is a limit: 20% of extra memory was allowed")
    unknown = words(plan_page(plan, "p", Material()), "memory-limit")
    assert unknown.startswith("20% of extra memory was allowed for copies, and all is used: more")
    none = replace(plan, limits=Limits(0.0), memories=(without_copies(plan),))
    said = words(plan_page(none, "p", Material()), "memory-limit")
    assert said.startswith("No copies of rows were allowed")


def test_the_chart_of_memory_says_where_its_limit_comes_from(plan: Plan) -> None:
    """Nobody asked for a default, or for the share that a capacity leaves for copies."""

    def allowance(made: Plan) -> str:
        (bars,) = memory_of_ranks(made, rows_by_kind(made))
        return bars.caption

    assert "by the 20% of extra memory that was asked for" in allowance(plan)
    default = replace(plan, asked=PlanSettings(), limits=Limits(0.05))
    assert "by the default of 5% extra memory" in allowance(default)
    given = replace(plan, asked=PlanSettings(), limits=Limits(1.57))
    given = replace(given, topology=plan.topology.with_capacity("3"))
    assert "by the capacity that the topology was given" in allowance(given)
    by_devices = allowance(replace(plan, limits=Limits(0.2, 0.2)))
    assert not {"asked", "default", "capacity"} & set(by_devices.split())


def without_copies(plan: Plan) -> Memory:
    """The only memory of a plan, as if no row had a copy."""
    (memory,) = plan.memories
    return replace(memory, cost=replace(memory.cost, extra_bytes=0.0))


def test_memory_is_no_limit_where_the_devices_decided(tmp_path: Path) -> None:
    """A re-planned plan keeps the extra memory that was found, which nobody asked for."""
    profile, newer = make_profile(1), make_profile(2)
    workload = Workload("training", batch_size=64)
    for tier in ((), ("t0",), "all"):
        folder = tmp_path / f"{len(tier)}"
        asked = PlanSettings(tier=tier)
        make_plan(profile, Topology.load("dgx-a100"), workload, asked).save(folder)
        again = replan(Plan.load(folder), newer, 1000).plan
        for made in (Plan.load(folder), again):
            said = words(plan_page(made, "p", Material()), "memory-limit")
            assert "Memory is a limit" not in said
            assert "allowed for copies" not in said


def test_a_plan_without_a_certificate_says_so(plan: Plan) -> None:
    (memory,) = plan.memories
    unproved = replace(plan, memories=(replace(memory, certificate=None),))
    page = plan_page(unproved, "p", Material())
    assert "Nothing was proved" in words(page, "plan")
    assert "above the proved bound, at most" not in dict(page.sections[0].tiles)


def test_what_is_missing_is_offered(reported: Reported, tmp_path: Path) -> None:
    said = fine("report", reported.file("plan"), "-o", tmp_path / "x.html")
    for option in ("--profile", "--compare", "--drift", "--counters"):
        assert f"it could show more with {option}" in said
    every: list[object] = ["--profile", reported.file("profile")]
    for name in ("compare", "drift", "counters"):
        every += [f"--{name}", reported.file(f"{name}.json")]
    assert "more" not in fine("report", reported.file("plan"), *every, "-o", tmp_path / "y.html")


def test_names_of_tables_are_text(tmp_path: Path) -> None:
    name = "</script><script>alert('x')</script>"
    profile = make_profile(1)
    tables = (replace(profile.tables[0], name=name), *profile.tables[1:])
    named = Profile(
        tables,
        profile.samples,
        profile.accesses,
        profile.samples_with_row,
        profile.bagged,
    )
    made = planned(tmp_path, named, "dgx-a100", "training", 0.3)
    write_report(made, tmp_path / "page.html", title=name)
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert" in text


def test_the_counters_are_of_the_mean_rank(plan: Plan, reported: Reported) -> None:
    counters = json.loads(reported.file("counters.json").read_text())
    counted = chart(plan_page(plan, "p", Material(counters=counters)), "counted")
    for row, kind in zip(counted.rows, ("fetch", "gradient", "allreduce"), strict=True):
        if getattr(plan.cost.communication_bytes, kind):
            assert row[-1] == "1.100", kind


def test_material_of_another_plan_is_refused(
    plan: Plan, reported: Reported, tmp_path: Path
) -> None:
    with pytest.raises(OperError, match="made from another profile"):
        write_report(plan, tmp_path / "x.html", f"{reported.file('days')}@0")
    counters = json.loads(reported.file("counters.json").read_text())
    with pytest.raises(OperError, match=r"counters of the plan's 4 ranks.*got those of 3"):
        plan_page(plan, "p", Material(counters=counters[:3]))
    first, *others = runs_of(reported)
    for changed in (
        replace(first, workload=replace(first.workload, mode="training")),
        replace(first, workload=replace(first.workload, batch_size=4)),
        replace(first, workload=replace(first.workload, fetch="distinct")),
        replace(first, topology="x"),
        replace(first, ranks=2),
        replace(first, profile="x"),
    ):
        with pytest.raises(OperError, match=r"`compare`: expected .*, as the plan has, got"):
            plan_page(plan, "p", Material(runs=[changed, *others]))


def runs_of(reported: Reported) -> list[Comparison]:
    """The comparison, with a run for each of two amounts of extra memory."""
    content = json.loads(reported.file("compare.json").read_text())
    return [Comparison.from_json(run) for run in content["runs"]]


def test_nothing_read_is_no_division(tmp_path: Path) -> None:
    profile = make_profile(1)
    silent = Profile(
        profile.tables, 100, profile.accesses * 0, profile.samples_with_row * 0, profile.bagged
    )
    made = planned(tmp_path, silent, "dgx-a100", "training", 0.3)
    write_report(made, tmp_path / "page.html", silent)
    text = (tmp_path / "page.html").read_text()
    drawn = text[: text.index('id="config"')]
    assert "nan" not in drawn.lower().replace("nano", "")
    assert "No rank reads a row." in drawn


def test_the_first_sentences_are_of_the_run_like_the_plan(plan: Plan, reported: Reported) -> None:
    runs = runs_of(reported)
    assert plan.limits is not None
    wanted = next(
        run.methods["paper"].step_seconds
        for run in runs
        if run.limits.extra_memory == plan.limits.extra_memory
    )
    assert wanted is not None
    for ordered in (runs, runs[::-1]):
        bars = chart(plan_page(plan, "p", Material(runs=ordered)), "comparison")
        (paper,) = (row for row in bars.rows if row[0] == "the paper's procedure")
        assert paper[1] == format_duration(wanted)
    coarse = replace(runs[1], asked=replace(runs[1].asked, threshold=0.5))
    (section,) = (
        section
        for section in plan_page(plan, "p", Material(runs=[coarse, runs[1]])).sections
        if section.key == "methods"
    )
    assert section.charts[0].rows == comparison_chart(runs[1]).rows


def times_said(page: Page) -> str:
    """Return the sentence of the first screen with the step and the gains."""
    (said,) = (s for s in page.sections[0].sentences if s.startswith("A step is predicted"))
    return said


def test_each_gain_is_said_once(plan: Plan, reported: Reported) -> None:
    profile = Profile.load(reported.file("profile"))
    runs = runs_of(reported)
    for material in (Material(), Material(profile), Material(runs=runs), Material(profile, runs)):
        said = times_said(plan_page(plan, "p", material))
        for method in ("table-wise", "row-wise", "the paper's procedure"):
            assert said.count(method) <= 1, said
        assert said.count("table-wise") == said.count("row-wise") == 1
        assert ("the paper's procedure" in said) == bool(material.runs)


def test_simple_plans_that_do_not_fit_have_no_times(plan: Plan) -> None:
    over = tuple(replace(each, fits=False, memory_factor=2.0) for each in plan.simple_plans)
    said = times_said(plan_page(replace(plan, simple_plans=over), "p", Material()))
    assert "s; table-wise does not fit: it takes 2.00 times " in said


def test_the_page_says_how_to_use_the_plan(
    reported: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines load the plan from the folder that was given, with caches for a tier."""
    used: dict[str, Any] = {}

    def shard(model: object, plan: Plan, cache: object = None) -> object:
        used.update(model=model, plan=plan, cache=cache)
        return model

    monkeypatch.setattr(oper, "shard", shard)
    profile = make_profile(3)
    workload = Workload("training", batch_size=64)
    tier = tmp_path / "it's a tier"
    make_plan(profile, Topology.load("cpu:2"), workload, PlanSettings(tier="all")).save(tier)
    for folder, title in ((reported.file("plan"), "Serve"), (tier, "Train")):
        loaded = Plan.load(folder)
        snippet = plan_page(loaded, "p", Material(), folder=str(folder)).sections[0].snippet
        assert snippet is not None
        assert snippet.title == f"{title} with this plan"
        exec(snippet.code, {"model": "a model"})
        assert used["plan"].digest == loaded.digest
        assert (used["cache"] is not None) == (folder == tier)
    unsaved = plan_page(loaded, "p", Material()).sections[0].snippet
    assert unsaved is not None
    assert "the folder of plan.save" in unsaved.code


def test_equal_times_are_called_equal(reported: Reported) -> None:
    run, paper = runs_of(reported)[0], runs_of(reported)[0].methods["paper"]
    ours = run.methods["oper"].step_seconds
    assert ours is not None
    for factor, said in ((1.0, "as long"), (1.001, "as long"), (2.0, "2.00 times as long")):
        fits = replace(paper, step_seconds=factor * ours, certificate=Certificate(ours, ours))
        compared = beside(replace(run, methods={"paper": fits}), ours)
        assert compared is not None
        assert compared.startswith("with the next best method that fits into memory")
        assert compared.endswith(f", it takes {said}")


def test_the_capacity_is_a_line_where_it_is_near(plan: Plan) -> None:
    layers = chart(plan_page(plan, "p", Material()), "memory").spec["layer"]
    lines = [layer["data"]["values"][0] for layer in layers if layer["mark"]["type"] == "rule"]
    (unit,) = {axis["y"]["axis"]["title"] for axis in (layers[0]["encoding"],)}
    size = {"kB": 1e3, "MB": 1e6}[unit]
    assert [line["name"] for line in lines] == ["capacity"]
    assert lines[0]["y"] * size == pytest.approx(plan.cost.capacity_bytes.max(), rel=1e-4)


def test_two_plans_of_other_ranks_compare_no_rows(tmp_path: Path) -> None:
    profile = make_profile(1)
    plans = []
    for name in ("cpu:1", "cpu:3"):
        folder = tmp_path / name.replace(":", "")
        plans.append(planned(folder, profile, name, "training", 0.3))
    page = two_plans_page(plans[0], plans[1], ("one", "three"))
    assert "numbers of ranks differ" in words(page, "moved")


def test_bars_of_two_plans_are_on_one_axis(tmp_path: Path) -> None:
    """A bar that is four times as high is four times as much, also beside the other plan's."""
    profile = make_profile(5)
    plans = [
        planned(tmp_path / name, profile, name.replace("-", ":"), "training", 0.3)
        for name in ("cpu-1", "cpu-4")
    ]
    page = two_plans_page(plans[0], plans[1], ("one", "four"))
    for kind, highest in (("memory", "memory_bytes"), ("work", "rank_seconds")):
        axes = [chart(page, f"{kind}-{n}").spec["layer"][0]["encoding"]["y"] for n in (0, 1)]
        assert axes[0] == axes[1]
        size = {"kB": 1e3, "MB": 1e6, "bytes": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
        reach = axes[0]["scale"]["domain"][1] * size[axes[0]["axis"]["title"]]
        most = max(getattr(plan.cost, highest).max() for plan in plans)
        assert reach >= (1 - 1e-4) * most
        drawn = [chart(page, f"{kind}-{n}").spec["data"]["values"] for n in (0, 1)]
        heights = [sum(v["value"] for v in values if v["order"] == 0) for values in drawn]
        amounts = [getattr(plan.cost, highest)[0] for plan in plans]
        assert heights[0] / heights[1] == pytest.approx(amounts[0] / amounts[1], rel=1e-3)


@examples(60)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8).filter(any))
def test_shares_add_up_to_the_whole(amounts: list[int]) -> None:
    shown = shares_that_add_up(amounts)
    total = sum(amounts)
    exact = [share for share in shown if share.endswith("%") and " " not in share]
    if "more than 99.9%" not in shown:
        assert sum(round(10 * float(share[:-1])) for share in exact) == 1000
    for amount, share in zip(amounts, shown, strict=True):
        assert (share == "none") == (amount == 0)
        assert share != "0.0%"
        assert (share == "100.0%") == (amount == total)
        if share in exact:
            assert abs(float(share[:-1]) - 100 * amount / total) <= 0.1 + 1e-9


def test_tables_too_small_to_name_are_counted_together(tmp_path: Path) -> None:
    """Tables of 0.0 % are not named, and what is printed is not more than it is."""
    tables = tuple(Table(f"t{n}", rows, 4) for n, rows in enumerate((30_000, 10_000, 3, 3, 2)))
    accesses = np.ones(sum(table.rows for table in tables), np.uint32)
    profile = Profile(tables, 100, accesses, accesses, (False,) * 5)
    made = planned(tmp_path, profile, "cpu:2", "training", 0.0)
    sentence = table_list(made, rows_by_kind(made), profile).sentence
    assert "Of the bytes: t0 75.0%, t1 25.0%, the other 3 tables together less than 0.1%." in (
        sentence
    )


def curve(*points: tuple[int, float]) -> list[CurvePoint]:
    """Points of these bytes and seconds; the first is the plan's."""
    return [
        CurvePoint(0.0, 0.0, held, seconds, seconds, seconds, 0.0, number == 0)
        for number, (held, seconds) in enumerate(points)
    ]


def test_a_little_more_memory_is_drawn_as_a_little() -> None:
    drawn = memory_curve_chart(curve((22_330_000, 3e-6), (22_420_000, 2e-6)))
    assert drawn is not None
    least, most = drawn.spec["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert most / least == pytest.approx(2, rel=1e-3)
    assert least < 22.33 < 22.42 < most
    assert "0.40% more than this one, and save at best 33.33% of the step" in drawn.caption
    same = memory_curve_chart(curve((10**9, 3e-6), (10**9 + 1, 3e-6)))
    assert same is not None
    assert "as much as this one, and save at best no time" in same.caption
    wide = memory_curve_chart(curve((10**6, 3e-6), (10**7, 2e-6)))
    assert wide is not None
    assert wide.spec["layer"][0]["encoding"]["x"]["scale"]["domain"] == [1, 10]
