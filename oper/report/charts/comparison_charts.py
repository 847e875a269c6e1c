"""Methods side by side: the predicted step of each as a bar, and over a sweep as lines."""

from collections.abc import Sequence

from oper.analysis.wording import AS_LONG, METHOD_NAMES, times_as_long
from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_factor,
    format_gap,
    format_share,
)
from oper.planner.compare import Comparison, MethodResult
from oper.report.charts.chart import ACCENT, INK, MUTED, WARNING, Chart, axis, duration_unit, spec

NAMES = {
    "oper": "OPER",
    "paper": "the paper's procedure",
    "memory_greedy": "memory-greedy",
    "access_greedy": "access-greedy",
    **METHOD_NAMES,
    "torchrec": "TorchRec's planner",
    "milp": "exact solver (MILP)",
}
_FITS, _TOO_LARGE, _OURS = "others that fit", "others, too large", "OPER"
_ALIKE = 5e-5  # times with a smaller relative difference print equally
_CLOSE = 5e-3  # a factor that differs from 1 by less prints as 1.00
# The axis is longer than the longest bar, which leaves its label room: on a phone a shorter label.
_PHONE, _ROOM_ON_PHONE, _ROOM = "width < 300", 2.0, 1.4


def next_best(run: Comparison, above: float = 0.0) -> tuple[str, float] | None:
    """Return the method, other than OPER and the exact solver, with the shortest step of those that
    fit and take longer than `above` seconds."""
    others = [
        (result.step_seconds, name)
        for name, result in run.methods.items()
        if name not in ("oper", "milp")
        and result.fits
        and result.step_seconds is not None
        and result.step_seconds > above
    ]
    if not others:
        return None
    seconds, name = min(others)
    return NAMES.get(name, name), seconds


def beside(run: Comparison, ours: float) -> str | None:
    """Return the step of the next best method relative to `ours`, in words; None if no other
    fits."""
    best = next_best(run)
    if best is None or not ours:
        return None
    name, seconds = best
    times = times_as_long(seconds, ours)
    taken = "as long" if times is None else f"{times} as long"
    said = f"with the next best method that fits into memory, {name}, it takes {taken}"
    if times is None:
        later = next_best(run, above=ours / (1 - AS_LONG))
        if later is not None and (times := times_as_long(later[1], ours)):
            said += f", and {times} as long with the best after it, {later[0]}"
    return said


def comparison_chart(run: Comparison) -> Chart:
    """Return the methods of one run of a comparison."""
    times = {name: result.step_seconds for name, result in run.methods.items()}
    placed = sorted(
        ((name, seconds) for name, seconds in times.items() if seconds), key=lambda pair: pair[1]
    )
    ours = None if run.oper is None else run.oper.step_seconds
    slowest = max((seconds for _, seconds in placed), default=1.0)
    unit = duration_unit(slowest)
    values = [
        {
            "method": NAMES.get(name, name),
            "value": unit.scaled(seconds),
            "shown": format_duration(seconds),
            "label": _label(seconds, None if name == "oper" else ours),
            "state": _OURS if name == "oper" else _FITS if run.methods[name].fits else _TOO_LARGE,
        }
        for name, seconds in placed
    ]
    states = {
        state: colour
        for state, colour in ((_OURS, ACCENT), (_FITS, MUTED), (_TOO_LARGE, WARNING))
        if any(value["state"] == state for value in values)
    }
    method = {
        "field": "method",
        "type": "nominal",
        "sort": None,
        "axis": axis(None, labelLimit=170),
    }
    time = {
        "field": "value",
        "type": "quantitative",
        "axis": axis(f"predicted step, {unit.name}", tickCount=5),
        "scale": {
            "domainMax": {
                "expr": f"{_PHONE} ? {unit.scaled(_ROOM_ON_PHONE * slowest)} : "
                f"{unit.scaled(_ROOM * slowest)}"
            }
        },
    }
    bars = {
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "y": method,
            "x": time,
            "color": {
                "field": "state",
                "type": "nominal",
                "scale": {"domain": [*states], "range": [*states.values()]},
                "legend": {"title": None, "orient": "top"},
            },
            "tooltip": [
                {"field": "method", "title": "method"},
                {"field": "shown", "title": "predicted step"},
                {"field": "state", "title": "memory"},
            ],
        },
    }
    labels = {
        "mark": {"type": "text", "align": "left", "dx": 4, "color": INK},
        "encoding": {
            "y": method,
            "x": time,
            "text": {"condition": {"test": _PHONE, "field": "shown"}, "field": "label"},
        },
    }
    return Chart(
        key="comparison",
        title="OPER and other methods",
        caption=_caption(run),
        spec=spec(values, height=34 * max(len(values), 2), layer=[bars, labels]),
        headers=(
            "method",
            "step",
            "times OPER's",
            "fits",
            "fullest rank",
            "planned in",
            "above the proved bound, at most",
        ),
        rows=[
            _row(name, run.methods[name], ours)
            for name in [*(name for name, _ in placed), *(n for n in times if not times[n])]
        ],
    )


def _caption(run: Comparison) -> str:
    ours = None if run.oper is None else run.oper.step_seconds
    compared = None if ours is None else beside(run, ours)
    if ours is None or compared is None:
        return "All methods are priced by the same cost model."
    caption = (
        f"A step of OPER's plan takes {format_duration(ours)}; {compared}. All methods are priced "
        "by the same cost model."
    )
    if run.workload.fetch == "auto":
        caption += " Each pools the tables with which it is shortest."
    solver = run.methods.get("milp")
    solved = None if solver is None else solver.step_seconds
    if solver and solved:
        caption += (
            f" The exact solver took {format_duration(solver.total_seconds)} and may use all "
            f"the memory allowed; it comes to {format_duration(solved)}."
        )
    return caption


def _label(seconds: float, ours: float | None) -> str:
    """Return a bar's figure, and how much longer that is than OPER's."""
    shown = format_duration(seconds)
    if not ours:
        return shown
    factor = seconds / ours
    if abs(factor - 1) < _ALIKE:
        return shown
    if abs(factor - 1) < _CLOSE:
        return f"{shown} ({'+' if factor > 1 else '-'}{format_share(abs(factor - 1))})"
    return f"{shown} ({format_factor(factor)} times)"


def _row(name: str, result: MethodResult, ours: float | None) -> tuple[str, ...]:
    planned, shown = format_duration(result.total_seconds), NAMES.get(name, name)
    seconds = result.step_seconds
    if result.cost is None or result.capacity_factor is None or seconds is None:
        return shown, "no plan", "", result.reason or "", "", planned, ""
    factor = f"{seconds / ours:.2f}" if ours else ""
    room = "yes" if result.fits else "no: more copies than allowed"
    if result.capacity_factor > 1:
        room = f"no: {format_factor(result.capacity_factor)} times what a rank may hold"
    gap = "" if result.certified_gap is None else format_gap(result.certified_gap)
    fullest = format_bytes(int(result.cost.memory_bytes.max()))
    return shown, format_duration(seconds), factor, room, fullest, planned, gap


def sweep_chart(runs: Sequence[Comparison]) -> Chart | None:
    """Return the time of each method over the extra memory, or the threshold, of several runs; None
    of runs that differ in neither."""
    asked = [(run.limits.extra_memory, run.asked.threshold) for run in runs]
    which = next((n for n in (0, 1) if len({each[n] for each in asked}) > 1), None)
    if which is None:
        return None
    title = ("extra memory", "threshold")[which]
    other = "threshold" if which == 0 else "extra memory"
    values, rows = [], []
    times = [result.step_seconds for run in runs for result in run.methods.values()]
    unit = duration_unit(max((seconds for seconds in times if seconds), default=1.0))
    for run, shares in zip(runs, asked, strict=True):
        for name, result in run.methods.items():
            seconds = result.step_seconds
            if not seconds:
                continue
            shown = NAMES.get(name, name), format_duration(seconds)
            share = f"{100 * shares[which]:g}%"
            values.append(
                {
                    "share": shares[which],
                    "value": unit.scaled(seconds),
                    "method": shown[0],
                    "shown": shown[1],
                    "asked": share,
                    "other": f"{other} {100 * shares[1 - which]:g}%",
                }
            )
            rows.append((share, f"{100 * shares[1 - which]:g}%", *shown))
    encoding = {
        "x": {"field": "share", "type": "quantitative", "axis": axis(title, format="~%")},
        "y": {"field": "value", "type": "quantitative", "axis": axis(unit.name)},
        "color": {"field": "method", "type": "nominal", "legend": {"title": None, "orient": "top"}},
        "detail": {"field": "other"},
        "tooltip": [
            {"field": "method", "title": "method"},
            {"field": "asked", "title": title},
            {"field": "shown", "title": "predicted step"},
        ],
    }
    return Chart(
        key="sweep",
        title=f"The methods over the {title}",
        caption=f"Every method was run with {len({each[which] for each in asked})} values of the "
        f"{title}.",
        spec=spec(values, mark={"type": "line", "point": True, "tooltip": True}, encoding=encoding),
        headers=(title, other, "method", "step"),
        rows=rows,
    )
