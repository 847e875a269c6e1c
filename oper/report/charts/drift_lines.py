"""A plan under newer counts: what it costs, and what a plan from scratch would."""

from typing import Any

from oper.base.formatting import format_digits, format_duration, format_share, plural
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
            f"{_advice(drift)}"
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
        caption = _cost_of_windows(drift)
    return Chart(
        key=f"drift-{number}",
        title=f"The plan under newer data: {drift['profile']}",
        caption=caption,
        spec=_bars(points) if windows is None else _losses(windows),
        headers=("data", _NOW, _FRESH, "longer by", "verdict"),
        rows=rows,
    )


def _cost_of_windows(drift: dict[str, Any]) -> str:
    """What not re-planning costs, over all windows and in the worst one."""
    windows = drift["windows"]
    worst = max(range(len(windows)), key=lambda n: float(windows[n]["worse"]))
    iterations = format_digits(sum(float(window["iterations"]) for window in windows), 4)
    return (
        f"Not re-planning costs {format_share(drift['cost_share'])} of the time that a plan from "
        f"scratch for each of {plural(len(windows), 'window')} takes: "
        f"{format_duration(drift['cost_seconds'])} over their {iterations} iterations. It costs "
        f"the most in @{worst}, {format_share(windows[worst]['worse'])}. {_advice(drift)}"
    )


def _advice(drift: dict[str, Any]) -> str:
    limit = format_share((drift["windows"][0] if "windows" in drift else drift)["threshold"])
    if drift["verdict"] == "replan":
        return f"That is more than the {limit} that were allowed: re-plan."
    return f"That is within the {limit} that were allowed: keep the plan."


def _bars(points: list[tuple[str, float, float | None]]) -> dict[str, Any]:
    """The iteration when the plan was made and now, beside a plan from scratch."""
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
            "axis": axis(f"predicted iteration, {unit.name}"),
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
            {"field": "shown", "title": "predicted iteration"},
        ],
    }
    return spec(values, mark={"type": "bar", "tooltip": True}, encoding=encoding)


def _losses(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """How much longer the plan takes in each window than one from scratch."""
    values = [
        {
            "window": f"@{number}",
            "value": 100 * max(window["worse"], 0.0),
            "shown": format_share(window["worse"]),
            "now": format_duration(window["objective_seconds"]["now"]),
            "fresh": format_duration(window["objective_seconds"]["fresh"]),
        }
        for number, window in enumerate(windows)
    ]
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
    bars = {"type": "bar", "tooltip": True, "color": ACCENT}
    return spec(values, mark=bars, encoding=encoding)
