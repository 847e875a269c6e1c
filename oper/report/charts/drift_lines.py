"""Chart of a plan under newer counts: predicted steps of the plan and of its possible
replacements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oper.analysis.wording import (
    CHOICES,
    OUTDATED_VOCABULARIES,
    advice_words,
    judging_data,
    step_columns,
    steps_of,
)
from oper.base.formatting import (
    format_bytes,
    format_digits,
    format_duration,
    format_share,
    plural,
)
from oper.planner.enough_accesses import ENOUGH_ACCESSES
from oper.planner.replan.drift import Drift, Window, WindowDrift
from oper.planner.replan.judgement import Candidate, Judgement
from oper.report.charts.chart import ACCENT, INK, MUTED, Chart, axis, duration_unit, spec

_NOW = "this plan"


@dataclass(frozen=True)
class NamedDrift:
    """Drift of a plan under newer data, or under each window of them, with the name of the data.
    `plan` is the plan's digest."""

    profile: str
    found: Drift | WindowDrift
    plan: str

    @property
    def first(self) -> Drift:
        """Drift, or that in the first window."""
        return self.found if isinstance(self.found, Drift) else self.found.windows[0].drift


def drift_chart(drift: NamedDrift, number: int) -> Chart:
    """Return the drift of a plan as the `number`th chart of its kind on a page."""
    judged = drift.found
    if isinstance(judged, Drift):
        judgement = judged.judgement
        bars = _bars(
            [
                (CHOICES[candidate.choice], candidate.step_seconds)
                for candidate in judgement.candidates
            ]
        )
        headers: tuple[str, ...] = ("plan", "step", "saves", "bytes moved", "time to move")
        rows = [_row(judgement, candidate) for candidate in judgement.candidates]
        now, best = (
            format_duration(candidate.step_seconds)
            for candidate in (judgement.keep, judgement.best)
        )
        made = judged.made_step_seconds
        then = "" if made is None else f" When the plan was made it took {format_duration(made)}."
        seen = "the other plans were" if judgement.source is None else "none of the plans was"
        caption = (
            f"On {judging_data(judgement.source, drift.profile)}, which {seen} made "
            f"from, a step takes {now} with this plan and {best} with the best other one "
            f"(predicted).{then} {_advice(judged)}"
        )
    else:
        bars = _losses(judged)
        columns = step_columns([each.drift.judgement.step_seconds for each in judged.windows])
        headers = ("data", _NOW, *columns, "longer by", "advice")
        rows = [_row_of_window(n, window, columns) for n, window in enumerate(judged.windows)]
        caption = _cost_of_windows(judged)
    return Chart(
        key=f"drift-{number}",
        title=f"The plan under newer data: {drift.profile}",
        caption=caption,
        spec=bars,
        headers=headers,
        rows=rows,
    )


def _row(judgement: Judgement, candidate: Candidate) -> tuple[str, ...]:
    return (
        CHOICES[candidate.choice],
        format_duration(candidate.step_seconds),
        format_duration(judgement.keep.step_seconds - candidate.step_seconds),
        format_bytes(candidate.moved_bytes),
        format_duration(candidate.moving_seconds),
    )


def _row_of_window(number: int, window: Window, columns: Sequence[str]) -> tuple[str, ...]:
    judgement = window.drift.judgement
    steps = steps_of(judgement.step_seconds, columns)
    advice = advice_words(window.drift.advice, window.too_small)
    return (f"@{number}", *steps, format_share(judgement.worse), advice)


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
    worst = max(windows, key=lambda n: windows[n].drift.judgement.worse)
    iterations = format_digits(sum(window.iterations for window in windows.values()), 4)
    return (
        f"Not re-planning costs {format_share(drift.cost_share)} of the time that the best other "
        f"plan takes in each of {plural(len(windows), 'window')}: "
        f"{format_duration(drift.cost_seconds)} over their {iterations} steps. It costs the most "
        f"in @{worst}, {format_share(windows[worst].drift.judgement.worse)}. {_advice(drift)}"
        f"{left_out}"
    )


def _advice(drift: Drift | WindowDrift) -> str:
    judged = [drift] if isinstance(drift, Drift) else [w.drift for w in drift.judged.values()]
    if any(each.outdated_vocabularies for each in judged):
        return f"{OUTDATED_VOCABULARIES}."
    limit = format_share(drift.threshold)
    if drift.verdict == "replan":
        return f"Another plan pays, and saves more than the {limit} that are tolerated: re-plan."
    return f"No other plan pays and saves more than the {limit} that are tolerated: keep the plan."


def _bars(steps: list[tuple[str, float]]) -> dict[str, Any]:
    """Return bars of the predicted step with each plan."""
    unit = duration_unit(max(seconds for _, seconds in steps))
    values = [
        {"plan": name, "value": unit.scaled(seconds), "shown": format_duration(seconds)}
        for name, seconds in steps
    ]
    names = [name for name, _ in steps]
    encoding = {
        "x": {"field": "plan", "type": "nominal", "sort": None, "axis": axis(None, labelAngle=0)},
        "y": {
            "field": "value",
            "type": "quantitative",
            "axis": axis(f"step (predicted), {unit.name}"),
        },
        "color": {
            "field": "plan",
            "type": "nominal",
            "scale": {"domain": names, "range": [ACCENT] + [MUTED] * (len(names) - 1)},
            "legend": None,
        },
        "tooltip": [
            {"field": "plan", "title": "plan"},
            {"field": "shown", "title": "step"},
        ],
    }
    return spec(values, mark={"type": "bar", "tooltip": True}, encoding=encoding)


def _losses(drift: WindowDrift) -> dict[str, Any]:
    """Return the loss of the plan against the best other one in each window that can tell, under
    the tolerance: without that line a hundredth of a percent would fill the chart."""
    values = [
        {
            "window": f"@{number}",
            "value": 100 * max(window.drift.judgement.worse, 0.0),
            "shown": format_share(window.drift.judgement.worse),
            "now": format_duration(window.drift.judgement.keep.step_seconds),
            "best": format_duration(window.drift.judgement.best.step_seconds),
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
            "axis": axis("longer than the best other plan, %", tickCount=5),
        },
        "tooltip": [
            {"field": "window", "title": "window"},
            {"field": "shown", "title": "longer by"},
            {"field": "now", "title": _NOW},
            {"field": "best", "title": "the best other plan"},
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
