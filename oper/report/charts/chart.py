"""Chart: a Vega-Lite specification, its message in words, and its figures as a table.

The specifications are data; Vega draws them in the browser. Colours are CSS variables of the page,
so that one drawing serves light and dark. The table has the same figures for those who cannot see
the drawing, and for tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# CSS variables of the page (page.css).
INK, GRID, ACCENT, MUTED, WARNING = (
    f"var(--{name})" for name in ("ink", "grid", "accent", "muted", "warning")
)

_TEXT = {
    "labelColor": INK,
    "titleColor": "var(--soft)",
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
}
# Vega-Lite's configuration for all charts.
CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif",
    "view": {"stroke": None},
    # Every other label is left out if labels would be closer than this many pixels.
    "axis": {
        **_TEXT,
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
        "labelSeparation": 10,
    },
    "legend": {**_TEXT, "labelLimit": 240},
    # A drawing has words for screen readers, its thousands of marks do not: the table has them.
    **{mark: {"aria": False} for mark in ("bar", "line", "point", "rect", "rule", "text")},
}

_DURATIONS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    key: str  # its id in the page
    title: str
    caption: str  # its message to the reader, with figures
    spec: dict[str, Any]  # Vega-Lite
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @property
    def drawn(self) -> dict[str, Any]:
        """The specification, with the words for screen readers."""
        return {"description": f"{self.title}. {self.caption}", **self.spec}


@dataclass(frozen=True)
class Unit:
    """A unit for the values of an axis."""

    name: str
    size: float

    def scaled(self, value: float) -> float:
        """Return the value in this unit, with as many digits as are drawn."""
        return float(f"{value / self.size:.5g}")


def duration_unit(seconds: float) -> Unit:
    """Return the largest unit that is at most the largest value of an axis."""
    return _unit(_DURATIONS, seconds)


def bytes_unit(largest: float) -> Unit:
    """Return the largest unit of bytes that is at most the largest value of an axis."""
    return _unit(_BYTES, largest)


def _unit(units: tuple[tuple[str, float], ...], largest: float) -> Unit:
    return next((Unit(*unit) for unit in units if largest >= unit[1]), Unit(*units[-1]))


def rank_columns(ranks: int, most: int) -> list[range]:
    """Return the ranks of each of at most `most` columns of a chart: one each, or as few as fit."""
    ranks_per_column = -(-ranks // most)
    return [
        range(first, min(first + ranks_per_column, ranks))
        for first in range(0, ranks, ranks_per_column)
    ]


def column_name(ranks: range) -> str:
    """Return `3`, or `16-31` for several ranks."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def of_columns(columns: list[range]) -> str:
    """Return a sentence that explains columns of several ranks."""
    if len(columns[0]) == 1:
        return ""
    return f" A column is the mean of {len(columns[0])} ranks."


def spec(values: Sequence[dict[str, Any]], height: int = 260, **rest: Any) -> dict[str, Any]:
    """Return a specification as wide as its place in the page, of `values`."""
    return {"data": {"values": list(values)}, "width": "container", "height": height, **rest}


def axis(title: str | None, **rest: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": title, **rest}
