"""A plan under newer counts: what it costs, and what a plan from scratch would."""

from typing import Any

from oper.base.formatting import format_duration, format_share
from oper.report.charts.chart import ACCENT, MUTED, Chart, axis, duration_unit, spec

_NOW, _FRESH = "this plan", "a plan from scratch"


def drift_chart(drift: dict[str, Any], number: int) -> Chart:
    """What `oper drift --json` printed, with or without --all-windows; the `number`th of a page."""
    windows = drift.get("windows")
    if windows is None:
        seconds = drift["objective_seconds"]
        points = [
            ("when it was made", seconds["then"], None),
            (drift["profile"], seconds["now"], seconds["fresh"]),
        ]
        rows = [
            ("when it was made", format_duration(seconds["then"]), "", "", ""),
            (
                drift["profile"],
                format_duration(seconds["now"]),
                format_duration(seconds["fresh"]),
                format_share(drift["worse"]),
                drift["verdict"],
            ),
        ]
        caption = (
            f"Under {drift['profile']} the plan takes {format_duration(seconds['now'])} an "
            f"iteration, and a plan from scratch {format_duration(seconds['fresh'])}. "
            f"{_advice(drift['verdict'])}"
        )
    else:
        points = [
            (f"@{n}", window["objective_seconds"]["now"], window["objective_seconds"]["fresh"])
            for n, window in enumerate(windows)
        ]
        rows = [
            (
                f"@{n}",
                format_duration(window["objective_seconds"]["now"]),
                format_duration(window["objective_seconds"]["fresh"]),
                format_share(window["worse"]),
                window["verdict"],
            )
            for n, window in enumerate(windows)
        ]
        caption = (
            f"Over the {len(windows)} windows of {drift['profile']}, not re-planning costs "
            f"{format_duration(drift['cost_seconds'])} in all, "
            f"{format_share(drift['cost_share'])} of what a plan from scratch for each window "
            f"takes. {_advice(drift['verdict'])}"
        )
    return Chart(
        key=f"drift-{number}",
        title=f"The plan under newer data: {drift['profile']}",
        caption=caption,
        spec=_lines(points, as_bars=windows is None),
        headers=("data", _NOW, _FRESH, "longer by", "verdict"),
        rows=rows,
    )


def _advice(verdict: str) -> str:
    return "Re-plan." if verdict == "replan" else "Keep the plan."


def _lines(points: list[tuple[str, float, float | None]], as_bars: bool) -> dict[str, Any]:
    unit = duration_unit(max(max(now, fresh or 0.0) for _, now, fresh in points))
    values = [
        {
            "window": name,
            "value": unit.scaled(seconds),
            "plan": plan,
            "shown": format_duration(seconds),
        }
        for name, now, fresh in points
        for plan, seconds in ((_NOW, now), (_FRESH, fresh))
        if seconds is not None
    ]
    encoding = {
        "x": {
            "field": "window",
            "type": "ordinal",
            "sort": None,
            "axis": axis(None if as_bars else "window", labelAngle=0, labelOverlap=True),
        },
        "y": {
            "field": "value",
            "type": "quantitative",
            "axis": axis(f"predicted iteration, {unit.name}"),
        },
        "color": {
            "field": "plan",
            "type": "nominal",
            "scale": {"domain": [_NOW, _FRESH], "range": [ACCENT, MUTED]},
            "legend": {"title": None, "orient": "top"},
        },
        "tooltip": [
            {"field": "window", "title": "data"},
            {"field": "plan", "title": "plan"},
            {"field": "shown", "title": "predicted iteration"},
        ],
    }
    mark: dict[str, Any] = {"type": "line", "point": True, "tooltip": True}
    if as_bars:
        mark = {"type": "bar", "tooltip": True}
        encoding["xOffset"] = {"field": "plan", "sort": [_NOW, _FRESH]}
    return spec(values, mark=mark, encoding=encoding)
