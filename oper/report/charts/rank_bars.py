"""Ranks as columns: their memory and their time, stacked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oper.base.arrays import Floats
from oper.base.formatting import format_bytes, format_duration
from oper.report.charts.chart import (
    INK,
    WARNING,
    Chart,
    Unit,
    axis,
    bytes_unit,
    column_name,
    duration_unit,
    of_columns,
    rank_columns,
    spec,
)

# The parts of a stack with their CSS variables, from the ground up.
COLOURS = {
    "striped rows": "var(--striped)",
    "listed rows": "var(--listed)",
    "replicated rows": "var(--replicated)",
    "rows in the host's memory": "var(--tier)",
    "looking rows up": "var(--looking-up)",
    "fetching rows": "var(--fetching)",
    "updating rows": "var(--updating)",
}
# A line further above the columns than this would flatten them: the caption has it instead.
_MOST_ABOVE = 3.0
_MOST_COLUMNS = 64
_EVEN = 1e-3  # ranks that differ by less are called equal


@dataclass(frozen=True)
class Line:
    """A horizontal line over the columns."""

    name: str
    value: float
    dashed: bool = False


@dataclass(frozen=True)
class RankBars:
    """Stacked columns of the ranks, without the end of their axis."""

    key: str
    title: str
    caption: str
    parts: Mapping[str, Floats]  # [M] each, from the ground up
    unit_of: Callable[[float], Unit]
    shown: Callable[[float], str]
    lines: Sequence[Line] = ()  # over all columns

    @property
    def total(self) -> Floats:
        """Height of each rank's column, [M]."""
        total: Floats = np.sum(list(self.parts.values()), axis=0)
        return total

    @property
    def top(self) -> float:
        """End of an axis that holds all columns and lines."""
        return max([float(self.total.max()), *(line.value for line in self.lines)])

    def chart(self, top: float | None = None) -> Chart:
        """Return the chart; its axis reaches to `top` (its own one without), so that charts drawn
        with the same one can be compared by eye."""
        return _bars(self, self.top if top is None else top)


def memory_bars(parts: Mapping[str, Floats], capacity: Floats, why: str) -> RankBars:
    """Return bytes of rows on each rank by kind of row, [M] each, with the ranks' capacity, [M];
    `why` is its origin, in words."""
    total = np.sum(list(parts.values()), axis=0)
    room = float(capacity[int((total / np.maximum(capacity, 1)).argmax())])
    held, allowed = _spread("holds", total, format_bytes), _span(capacity, format_bytes)
    caption = f"{held} A rank may hold {allowed}{why}"
    lines = [Line("capacity", room)] if room <= _MOST_ABOVE * total.max() else []
    caption += "." if lines else ", which is off the scale."
    title = "Memory of each rank"
    return RankBars("memory", title, caption, parts, bytes_unit, format_bytes, lines)


def kinds_of_row_bars(parts: Mapping[str, Floats], bound: float | None) -> RankBars:
    """Return seconds of each rank by kind of row, [M] each, under the bound that was proved, if
    any."""
    total = np.sum(list(parts.values()), axis=0)
    caption = _spread("takes", total, format_duration)
    if total.any():
        largest = max(parts, key=lambda name: float(parts[name].sum()))
        share = parts[largest].sum() / total.sum()
        caption += f" On average {share:.0%} of it goes to {largest}."
    lines = [] if bound is None else [Line("proved bound", bound, dashed=True)]
    title = "Time of each rank by kind of row"
    return RankBars("time", title, caption, parts, duration_unit, format_duration, lines)


def kinds_of_work_bars(parts: Mapping[str, Floats]) -> RankBars:
    """Return seconds of each rank by kind of work, [M] each."""
    total = np.sum(list(parts.values()), axis=0)
    shares = (f"{name} {values.sum() / total.sum():.0%}" for name, values in parts.items())
    caption = "No rank reads a row."
    if total.any():
        caption = f"Of a rank's time, on average: {', '.join(shares)}."
    title = "Time of each rank by work"
    return RankBars("work", title, caption, parts, duration_unit, format_duration)


def _bars(bars: RankBars, top: float) -> Chart:
    """Return the columns and lines of `bars` as a chart, on an axis from 0 to `top`."""
    parts, shown, total = bars.parts, bars.shown, bars.total
    shares = {name: values for name, values in parts.items() if values.any()} or dict(parts)
    unit = bars.unit_of(top)
    reach = {"scale": {"domain": [0, unit.scaled(top)], "nice": True}} if top else {}
    columns = rank_columns(len(total), _MOST_COLUMNS)
    values = [
        {
            "rank": column_name(ranks),
            "order": number,
            "part": name,
            "stacked": position,
            "value": unit.scaled(float(of_part[ranks[0] : ranks[-1] + 1].mean())),
            "shown": shown(float(of_part[ranks[0] : ranks[-1] + 1].mean())),
        }
        for number, ranks in enumerate(columns)
        for position, (name, of_part) in enumerate(shares.items())
    ]
    several = len(columns[0]) > 1
    drawn = {
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "x": {
                "field": "rank",
                "type": "ordinal",
                "sort": {"field": "order"},
                "axis": axis("ranks" if several else "rank", labelAngle=0, labelOverlap=True),
            },
            "y": {"field": "value", "type": "quantitative", "axis": axis(unit.name), **reach},
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {
                    "domain": [*reversed(shares)],
                    "range": [COLOURS[name] for name in reversed(shares)],
                },
                "legend": {"title": None, "orient": "top"},
            },
            "order": {"field": "stacked"},
            "tooltip": [
                {"field": "rank", "title": "ranks" if several else "rank"},
                {"field": "part", "title": "part"},
                {"field": "shown", "title": "mean" if several else "value"},
            ],
        },
    }
    lines = [layer for line in bars.lines for layer in _line(line, unit)]
    return Chart(
        key=bars.key,
        title=bars.title,
        caption=bars.caption + of_columns(columns),
        spec=spec(values, layer=[drawn, *lines]),
        headers=("rank", *reversed(shares), "total"),
        rows=[
            (
                str(rank),
                *(shown(float(shares[name][rank])) for name in reversed(shares)),
                shown(whole),
            )
            for rank, whole in enumerate(total.tolist())
        ],
    )


def _line(line: Line, unit: Unit) -> list[dict[str, Any]]:
    """Return a horizontal rule over all columns, and its name at the left."""
    value = {"values": [{"y": unit.scaled(line.value), "name": line.name}]}
    height = {"field": "y", "type": "quantitative"}
    dash = {"strokeDash": [5, 4]} if line.dashed else {}
    colour = INK if line.dashed else WARNING
    text = {"type": "text", "align": "left", "baseline": "bottom", "dx": 4, "dy": -3, "color": INK}
    return [
        {
            "data": value,
            "mark": {"type": "rule", "color": colour, "strokeWidth": 1.5, **dash},
            "encoding": {"y": height},
        },
        {
            "data": value,
            "mark": text,
            "encoding": {"y": height, "x": {"value": 0}, "text": {"field": "name"}},
        },
    ]


def _spread(verb: str, values: Floats, shown: Callable[[float], str]) -> str:
    """Return `Every rank holds 6.5 MB.`, or a sentence with the most and the least."""
    least, most = float(values.min()), float(values.max())
    if least >= (1 - _EVEN) * most or shown(least) == shown(most):
        return f"Every rank {verb} {shown(most)}."
    return (
        f"Rank {int(values.argmax())} {verb} the most, {shown(most)}, rank "
        f"{int(values.argmin())} the least, {shown(least)}."
    )


def _span(values: Floats, shown: Callable[[float], str]) -> str:
    """Return `32 GB`, or `16 GB to 32 GB` if they differ."""
    least, most = shown(float(values.min())), shown(float(values.max()))
    return least if least == most else f"{least} to {most}"
