"""A plan under newer counts: what it costs, and what a plan from scratch would."""

from dataclasses import dataclass
from typing import Any

from oper.analysis.wording import HELD_OUT_DATA
from oper.base.formatting import format_digits, format_duration, format_share, plural
from oper.plan.reference_figures import HeldOutSource
from oper.planner.enough_accesses import ENOUGH_ACCESSES
from oper.planner.replan.drift import Drift, Window, WindowDrift
from oper.report.charts.chart import ACCENT, INK, MUTED, Chart, axis, duration_unit, spec

_NOW, _FRESH = "this plan", "a plan from scratch"


@dataclass(frozen=True)
class NamedDrift:
    """The drift of a plan under newer data, or under each window of them, and what these are
    called. `plan` is the plan's digest."""

    profile: str
    found: Drift | WindowDrift
    plan: str

    @property
    def first(self) -> Drift:
        """The drift, or that in the first window."""
        return self.found if isinstance(self.found, Drift) else self.found.windows[0].drift


def drift_chart(drift: NamedDrift, number: int) -> Chart:
    """Return the drift of a plan as the `number`th chart of its kind on a page."""
    found = drift.found
    if isinstance(found, Drift):
        seconds = found.objective_seconds
        bars = _bars(
            [
                ("when it was made", seconds.then, None),
                (drift.profile, *found.judged_seconds),
            ]
        )
        rows = [
            ("when it was made", format_duration(seconds.then), "", "", ""),
            _row(drift.profile, found),
        ]
        now, fresh = map(format_duration, found.judged_seconds)
        caption = (
            f"On {judged_data(found, drift.profile)} transfers take {now} a step with the plan, "
            f"and {fresh} with the one from scratch. {_advice(found)}"
        )
    else:
        bars = _losses(found)
        rows = [_row_of_window(n, window) for n, window in enumerate(found.windows)]
        caption = _cost_of_windows(found)
    return Chart(
        key=f"drift-{number}",
        title=f"The plan under newer data: {drift.profile}",
        caption=caption,
        spec=bars,
        headers=("data", _NOW, _FRESH, "longer by", "verdict"),
        rows=rows,
    )


def judged_data(drift: Drift, profile: str) -> str:
    """Return the data of the verdict, and their part that the plan from scratch has seen."""
    unseen = drift.unseen
    if unseen is None:
        return f"{profile}, which a plan from scratch is made from here,"
    if unseen.source == HeldOutSource.THIS_WINDOW:
        return f"{profile}, compared with a plan made from the window before,"
    return f"{HELD_OUT_DATA[unseen.source]}, compared with a plan made from {profile},"


def _row(name: str, drift: Drift) -> tuple[str, ...]:
    return (
        name,
        *map(format_duration, drift.judged_seconds),
        format_share(drift.judged_worse),
        drift.verdict,
    )


def _row_of_window(number: int, window: Window) -> tuple[str, ...]:
    *figures, verdict = _row(f"@{number}", window.drift)
    return *figures, "too small" if window.too_small else verdict


def _cost_of_windows(drift: WindowDrift) -> str:
    """Return the cost of not re-planning, over all windows that can tell and in the worst one."""
    windows = drift.judged
    small = len(drift.windows) - len(windows)
    left_out = ""
    if small:
        left_out = (
            f" {plural(small, 'window')} of fewer than {ENOUGH_ACCESSES:,} accesses a rank "
            f"{'is' if small == 1 else 'are'} left out: there chance looks like drift."
        )
    if not windows:
        return f"No window is large enough to tell.{left_out}"
    worst = max(windows, key=lambda n: windows[n].drift.judged_worse)
    iterations = format_digits(sum(window.iterations for window in windows.values()), 4)
    return (
        f"Not re-planning costs {format_share(drift.cost_share)} of the time that plans from "
        f"scratch, made after each of {plural(len(windows), 'window')} for the next, take: "
        f"{format_duration(drift.cost_seconds)} over their {iterations} steps. It costs the "
        f"most in @{worst}, {format_share(windows[worst].drift.judged_worse)}. {_advice(drift)}"
        f"{left_out}"
    )


def _advice(drift: Drift | WindowDrift) -> str:
    limit = format_share(drift.threshold)
    if drift.verdict == "replan":
        return f"That is more than the {limit} that were allowed: re-plan."
    return f"That is within the {limit} that were allowed: keep the plan."


def _bars(points: list[tuple[str, float, float | None]]) -> dict[str, Any]:
    """Return bars of the transfer time when the plan was made and now, and from scratch."""
    unit = duration_unit(max(max(now, fresh or 0.0) for _, now, fresh in points))
    values = [
        {
            "data": name,
            "value": unit.scaled(seconds),
            "plan": plan,
            "shown": format_duration(seconds),
        }
        for name, now, fresh in points
        for plan, seconds in ((_NOW, now), (_FRESH, fresh))
        if seconds is not None
    ]
    encoding = {
        "x": {"field": "data", "type": "nominal", "sort": None, "axis": axis(None, labelAngle=0)},
        "xOffset": {"field": "plan", "sort": [_NOW, _FRESH]},
        "y": {
            "field": "value",
            "type": "quantitative",
            "axis": axis(f"transfer time, {unit.name}"),
        },
        "color": {
            "field": "plan",
            "type": "nominal",
            "scale": {"domain": [_NOW, _FRESH], "range": [ACCENT, MUTED]},
            "legend": {"title": None, "orient": "top"},
        },
        "tooltip": [
            {"field": "data", "title": "data"},
            {"field": "plan", "title": "plan"},
            {"field": "shown", "title": "transfer time"},
        ],
    }
    return spec(values, mark={"type": "bar", "tooltip": True}, encoding=encoding)


def _losses(drift: WindowDrift) -> dict[str, Any]:
    """Return the loss of the plan against one from scratch in each window that can tell, under the
    tolerance: without that line a hundredth of a percent would fill the chart."""
    values = [
        {
            "window": f"@{number}",
            "value": 100 * max(window.drift.judged_worse, 0.0),
            "shown": format_share(window.drift.judged_worse),
            "now": format_duration(window.drift.judged_seconds.now),
            "fresh": format_duration(window.drift.judged_seconds.fresh),
        }
        for number, window in drift.judged.items()
    ]
    tolerated = {"values": [{"value": 100 * drift.threshold, "name": "tolerated"}]}
    height = {"field": "value", "type": "quantitative"}
    text = {"type": "text", "align": "left", "baseline": "bottom", "dx": 4, "dy": -3, "color": INK}
    encoding = {
        "x": {
            "field": "window",
            "type": "ordinal",
            "sort": None,
            "axis": axis("window", labelAngle=0, labelOverlap=True),
        },
        "y": {
            "field": "value",
            "type": "quantitative",
            "axis": axis("longer than a plan from scratch, %", tickCount=5),
        },
        "tooltip": [
            {"field": "window", "title": "window"},
            {"field": "shown", "title": "longer by"},
            {"field": "now", "title": _NOW},
            {"field": "fresh", "title": _FRESH},
        ],
    }
    bars = {"mark": {"type": "bar", "tooltip": True, "color": ACCENT}, "encoding": encoding}
    line = {
        "data": tolerated,
        "mark": {"type": "rule", "color": INK, "strokeDash": [5, 4]},
        "encoding": {"y": height},
    }
    name = {
        "data": tolerated,
        "mark": text,
        "encoding": {"y": height, "x": {"value": 0}, "text": {"field": "name"}},
    }
    return spec(values, layer=[bars, line, name])
