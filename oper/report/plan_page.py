"""Page of one plan: its decisions, costs, quality and omissions.

In: a plan and, if given, its profile, a comparison, drifts and counters. Out: `Page`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from oper.analysis.plan_facts import fit
from oper.analysis.wording import shard_line, use
from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.base.formatting import format_bytes, format_duration, format_gap, format_share, plural
from oper.base.spoken import option
from oper.cost.workload import Fetch
from oper.plan.memories import DEVICE, HOST
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import RowsByKind, rows_by_kind
from oper.planner.compare import Comparison
from oper.planner.make_placement import Watch
from oper.planner.memory_curve import CurvePoint, memory_curve
from oper.planner.place_together import place_alone
from oper.planner.price_plan import problem_of
from oper.profiling.profile import Profile
from oper.report import sentences
from oper.report.charts.comparison_charts import comparison_chart, sweep_chart
from oper.report.charts.drift_lines import NamedDrift, drift_chart
from oper.report.charts.link_matrix import link_charts
from oper.report.charts.memory_line import memory_curve_chart
from oper.report.charts.predicted_and_counted import RankCounters, counted_chart
from oper.report.charts.rank_bars import (
    RankBars,
    kinds_of_row_bars,
    kinds_of_work_bars,
    memory_bars,
)
from oper.report.charts.skew_curve import skew_chart
from oper.report.glossary import words_of
from oper.report.render_page import Page, Section, Snippet
from oper.report.table_list import table_list
from oper.report.time_by_row_kind import KindTimes, check_profile, kind_times


@dataclass(frozen=True)
class Material:
    """Material of a report, in addition to the plan."""

    profile: Profile | None = None
    runs: Sequence[Comparison] = ()  # of a comparison
    drifts: Sequence[NamedDrift] = ()
    counters: Sequence[RankCounters] | None = None  # `oper.counters(model)` of each rank


@dataclass(frozen=True)
class Measured:
    """Figures that take planning or a pass over all rows: only with a profile."""

    times: KindTimes
    curve: Sequence[CurvePoint]


_DIGITS = 12  # of a digest
LEFT_OUT = "What the predicted times leave out"


def plan_page(
    plan: Plan,
    title: str,
    material: Material,
    report: Callable[[str], None] = lambda step: None,
    folder: str | None = None,
) -> Page:
    """Return the page of a plan, which is in `folder` if that is known; `report` is called with
    each step as it begins.

    Raises OperError if the material is of another plan.
    """
    runs = _runs_of(plan, material.runs)
    drifts = _drift(plan, material.drifts)
    counted = _counted(plan, material.counters)
    report("rows")
    kinds = rows_by_kind(plan)
    measured = None
    if material.profile is not None:
        check_profile(plan, material.profile)
        report("time by kind of row")
        times = kind_times(plan, material.profile)
        report("memory curve")
        measured = Measured(times, _curve(plan, material.profile))
    report("page")
    sections = [
        _first_screen(plan, kinds, runs[0] if runs else None, measured, folder),
        _ranks(plan),
        _tables(plan, kinds, material.profile),
        *_methods(runs),
        _memory(plan, measured),
        *drifts,
        *counted,
        Section("proof", "How good the plan is", sentences.certificate_sentences(plan)),
        Section("left-out", LEFT_OUT, points=sentences.left_out(plan)),
        Section("made", "How it was made", words=sentences.making(plan)),
        Section("words", "Glossary", words=words_of(plan, runs)),
    ]
    return Page(title, "A sharding plan for embedding tables", sections)


def _first_screen(
    plan: Plan,
    kinds: RowsByKind,
    run: Comparison | None,
    measured: Measured | None,
    folder: str | None,
) -> Section:
    used, fits, certificate = plan.cost.extra_memory_ratio, fit(plan), plan.certificate
    tiles = []
    if plan.step_time is not None:
        tiles.append(("predicted step", format_duration(plan.step_time.seconds)))
    tiles.append(("transfer time", format_duration(plan.cost.objective_seconds)))
    if certificate is not None:
        gap = format_gap(certificate.certified_gap)
        tiles.append(("above the proved bound, at most", gap))
    if plan.held_out is not None:
        seconds = format_duration(plan.held_out.step_seconds)
        tiles.insert(1, ("step, on data held out", seconds))
    tiles += [
        ("fullest rank", f"{format_bytes(fits.held_bytes)} of {format_bytes(fits.room_bytes)}"),
        ("copies of rows", f"{format_share(used)} extra memory" if used else "none"),
    ]
    bars = memory_of_ranks(plan, kinds)
    bound = None if certificate is None else certificate.lower_bound_seconds
    if measured is None:
        bars.append(work_of_ranks(plan))
    else:
        bars.append(kinds_of_row_bars(_time_parts(measured.times), bound))
    said = sentences.headline(plan, run)
    return Section(
        "plan",
        "The plan",
        said,
        emphasis=True,
        tiles=tiles,
        snippet=use_of(plan, folder),
        charts=[each.chart() for each in bars],
    )


def use_of(plan: Plan, folder: str | None) -> Snippet:
    """Return the lines of a script that shard a model by the plan."""
    where = "plan" if folder is None else folder
    saved = "  # the folder of plan.save" if folder is None else ""
    code = f"import oper\n\nplan = oper.Plan.load({where!r}){saved}\n{shard_line(plan, 'plan')}"
    page = "docs/scheduler.md" if plan.tier else "docs/torchrec.md"
    return Snippet(
        f"{use(plan).capitalize()} with this plan",
        code,
        "The model is any module with TorchRec's embedding collections, on "
        f"{plural(plan.ranks, 'rank')} that torchrun started; the rest of the script stays as it "
        f"is ({page}). Its row ids must be those that the profile counted: oper.read(LOG, "
        f"plan.tables, folder={where!r}) reads a log with them. Before a job, oper doctor checks "
        "whether plan, model and machines fit.",
    )


def memory_of_ranks(plan: Plan, kinds: RowsByKind) -> list[RankBars]:
    """Return the memory of each rank's device by kind of row, and of its host's with a tier."""
    bars = []
    if plan.memories[0].tables:
        held = kinds.memory[DEVICE]
        parts = {
            "striped rows": (held.striped + held.unused).astype(np.float64),
            "listed rows": held.listed.astype(np.float64),
            "replicated rows": held.replicated.astype(np.float64),
        }
        bars.append(
            memory_bars(parts, plan.cost.capacity_bytes.astype(np.float64), _allowance(plan))
        )
    if plan.host is not None:
        parts = {"rows in the host's memory": kinds.memory[HOST].total.astype(np.float64)}
        room = plan.host.cost.capacity_bytes.astype(np.float64)
        of_hosts = memory_bars(parts, room, " on its host")
        bars.append(replace(of_hosts, key="host-memory", title="Memory of each rank's host"))
    return bars


def _allowance(plan: Plan) -> str:
    """Return the source of the limit on a rank's memory, if it is not the device."""
    if plan.limits is None or plan.limits.by_devices:
        return ""
    if plan.topology.capacity is not None:
        return " by the capacity that the topology was given"
    share = f"{100 * plan.limits.extra_memory:.4g}%"
    if plan.asked.extra_memory is None:
        return f" by the default of {share} extra memory"
    return f" by the {share} of extra memory that was asked for"


def _time_parts(times: KindTimes) -> dict[str, Floats]:
    return {
        "striped rows": times.striped,
        "listed rows": times.listed,
        "replicated rows": times.replicated,
        "rows in the host's memory": times.in_hosts,
    }


def work_of_ranks(plan: Plan) -> RankBars:
    """Return the time of each rank by kind of work."""
    prediction = plan.cost
    looked_up, fetched = prediction.lookup_seconds, prediction.link_seconds.sum(axis=1)
    parts = {"looking rows up": looked_up, "fetching rows": fetched}
    if plan.workload.training:
        parts["updating rows"] = prediction.rank_seconds - looked_up - fetched
    return kinds_of_work_bars(parts)


def _ranks(plan: Plan) -> Section:
    charts = link_charts(plan)
    said = sentences.time_sentences(plan)
    return Section(
        "ranks", "Work and links of the ranks", said, charts=[work_of_ranks(plan).chart(), *charts]
    )


def _tables(plan: Plan, kinds: RowsByKind, profile: Profile | None) -> Section:
    listed = table_list(plan, kinds, profile)
    skew = (
        None
        if profile is None
        else skew_chart(profile, int(kinds.replicated.sum()), int(kinds.listed.sum()))
    )
    charts = [] if skew is None else [skew]
    said = [listed.sentence, sentences.kinds_sentence(plan, kinds)]
    return Section("tables", "Tables and rows", said, charts=charts, table=listed)


def _methods(runs: Sequence[Comparison]) -> list[Section]:
    if not runs:
        return []
    charts = [comparison_chart(runs[0])]
    sweep = sweep_chart(runs)
    return [Section("methods", "Other methods", charts=charts + ([] if sweep is None else [sweep]))]


def _memory(plan: Plan, measured: Measured | None) -> Section:
    curve = measured.curve if measured else None
    chart = memory_curve_chart(curve) if curve else None
    said = sentences.memory_sentences(plan, curve)
    return Section("memory-limit", "Memory", said, charts=[] if chart is None else [chart])


def _drift(plan: Plan, drifts: Sequence[NamedDrift]) -> list[Section]:
    if not drifts:
        return []
    charts = []
    for number, drift in enumerate(drifts):
        if drift.plan != plan.digest:
            raise OperError(
                f"{option('--drift')}: expected the drift of this plan ({plan.digest[:_DIGITS]}…), "
                f"got that of another one ({drift.plan[:_DIGITS]}…, counts of {drift.profile}); "
                "give what `oper drift PLAN PROFILE --json` prints for this plan"
            )
        charts.append(drift_chart(drift, number))
    return [Section("drift", "When the data changes", charts=charts)]


def _counted(plan: Plan, counters: Sequence[RankCounters] | None) -> list[Section]:
    if counters is None:
        return []
    try:
        chart = counted_chart(plan, counters)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise OperError(
            f"{option('--counters')}: expected what `oper.counters(model)` returns, got what "
            f"another version does, or what was changed ({type(error).__name__}: {error}); count "
            "the run again"
        ) from error
    return [Section("run", "After a run", charts=[chart])]


def _curve(plan: Plan, profile: Profile) -> list[CurvePoint]:
    """Return the memory curve around the plan, which has its own figures there; none of plans with
    a tier."""
    if plan.tier:
        return []
    planned = place_alone(problem_of(plan, profile), Watch(lambda step: None))
    found: list[CurvePoint] = []
    own: CurvePoint | None = None
    for point in memory_curve(planned, plan.topology).points:
        if point.plan:
            own = point = _own_point(plan, point)
        elif own is not None and own.step_seconds < point.step_seconds:
            point = own.in_memory_of(point)
        found.append(point)
    return found


def _own_point(plan: Plan, point: CurvePoint) -> CurvePoint:
    """Return the point of the curve with the plan's own figures."""
    cost, certificate = plan.cost, plan.certificate
    return replace(
        point,
        extra_memory_ratio=cost.extra_memory_ratio,
        memory_bytes=int(cost.memory_bytes.max()),
        step_seconds=point.step_seconds if plan.step_time is None else plan.step_time.seconds,
        objective_seconds=cost.objective_seconds,
        certified_gap=point.certified_gap if certificate is None else certificate.certified_gap,
    )


def _runs_of(plan: Plan, runs: Sequence[Comparison]) -> list[Comparison]:
    """Return the runs of a comparison, that with the extra memory (then the threshold) nearest to
    the plan's first; raise OperError if they are of another topology, workload or profile."""
    for run in runs:
        for name, compared, of_plan in (
            ("topology", run.topology, plan.topology.name),
            ("ranks", run.ranks, plan.ranks),
            ("mode", run.workload.mode, plan.workload.mode),
            ("fetch", _fetch_of(run, plan), plan.workload.fetch),
            ("batch size", run.workload.batch_size, plan.workload.batch_size),
            ("profile", run.profile, plan.profile),
        ):
            if compared != of_plan:
                digits = _DIGITS if name == "profile" else None
                raise OperError(
                    f"{option('--compare')}: expected {name} {str(of_plan)[:digits]}, as the plan "
                    f"has, got {str(compared)[:digits]}; compare with the plan's own profile and "
                    "options"
                )
    allowed = 0.0 if plan.limits is None else plan.limits.extra_memory

    def unlike(run: Comparison) -> tuple[float, float]:
        extra = abs(run.limits.extra_memory - allowed)
        return extra, abs(run.asked.threshold - plan.asked.threshold)

    return sorted(runs, key=unlike)


def _fetch_of(run: Comparison, plan: Plan) -> Fetch | None:
    """Return the fetch of a comparison; of one with `auto` that of a plan with the tables that
    OPER's pools there."""
    fetch, ours = run.workload.fetch, run.oper
    chosen = fetch == "auto" and ours is not None and ours.pooled_tables == plan.pooled_tables
    return plan.workload.fetch if chosen else fetch


def not_given(material: Material) -> list[str]:
    """Return the options for further parts of the page."""
    parts = (
        (
            material.profile,
            f"{option('--profile')}: accesses of each table, their skew, the time by kind of "
            "row, and what more memory would do",
        ),
        (material.runs, f"{option('--compare')}, from `oper compare --json`: other methods"),
        (material.drifts, f"{option('--drift')}, from `oper drift --json`: newer data"),
        (
            material.counters,
            f"{option('--counters')}, from a run: predicted and counted traffic",
        ),
    )
    return [option for value, option in parts if not value]
