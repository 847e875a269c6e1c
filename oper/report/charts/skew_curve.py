"""The skew of a log: the share of all accesses that its hottest rows take."""

from typing import Any

import numpy as np

from oper.base.arrays import Ints
from oper.base.formatting import plural
from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile
from oper.report.charts.chart import ACCENT, INK, Chart, axis, spec

_POINTS = 200
_QUOTED = (0.001, 0.01, 0.1)  # shares of rows in the table


def skew_chart(profile: Profile, replicated_rows: int, listed_rows: int) -> Chart | None:
    """Return the curve of all rows, with as many of the hottest marked as the plan replicates, and
    as it replicates or lists; None if nothing was accessed."""
    none = np.zeros(0, profile.accesses.dtype)
    starts = np.array([0, len(profile.accesses)], dtype=np.int64)
    _, accesses, _, rows = histogram(profile.accesses, none, starts, np.zeros(2, dtype=np.int64))
    # The histogram is of one piece, all rows: descending by accesses.
    total_rows, total = int(rows.sum()), int(accesses @ rows)
    if not total or total_rows < 2:
        return None

    def share(number: float) -> float:
        """Return the share of all accesses to the `number` hottest rows."""
        return _hottest(accesses, rows, number) / total

    numbers = np.unique(np.geomspace(1, total_rows, _POINTS).round())
    values = [
        {"rows": n / total_rows, "accesses": float(f"{share(n):.5g}"), "number": f"{int(n):,}"}
        for n in numbers.tolist()
    ]
    horizontal = {
        "field": "rows",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [1 / total_rows, 1], "nice": False},
        "axis": axis("share of all rows, hottest first", format="~%", tickCount=6, grid=False),
    }
    vertical = {
        "field": "accesses",
        "type": "quantitative",
        "scale": {"domain": [0, 1]},
        "axis": axis("share of accesses", format="~%"),
    }
    curve = {
        "mark": {"type": "line", "color": ACCENT, "tooltip": True, "interpolate": "monotone"},
        "encoding": {
            "x": horizontal,
            "y": vertical,
            "tooltip": [
                {"field": "number", "title": "hottest rows"},
                {"field": "rows", "title": "of all rows", "format": ".3%"},
                {"field": "accesses", "title": "of all accesses", "format": ".1%"},
            ],
        },
    }
    layers: list[dict[str, Any]] = [curve]
    unread = int(rows[accesses == 0].sum())
    caption = f"The hottest 1% of the rows take {share(0.01 * total_rows):.1%} of the accesses."
    if unread:
        caption += f" {unread / total_rows:.1%} of the rows were not read at all in the profile."
    for name, number, colour in (
        ("replicated", replicated_rows, "var(--replicated)"),
        (
            "replicated or listed" if replicated_rows else "listed",
            replicated_rows + listed_rows,
            "var(--listed)",
        ),
    ):
        if number and (name == "replicated" or listed_rows):
            layers += _cut(f"{number:,} {name}", number / total_rows, colour, horizontal)
            caption += (
                f" The plan has {plural(number, 'row')} {name}, {number / total_rows:.2%} of all; "
                f"as many of the hottest take {share(number):.1%} of the accesses."
            )
    return Chart(
        key="skew",
        title="How skewed the accesses are",
        caption=caption,
        spec=spec(values, layer=layers),
        headers=("hottest rows", "of all rows", "of all accesses"),
        rows=[
            (f"{n:,.0f}", f"{n / total_rows:.3%}", f"{share(n):.2%}")
            for n in sorted(
                {q * total_rows for q in _QUOTED}
                | {float(replicated_rows), float(replicated_rows + listed_rows)} - {0.0}
            )
        ],
    )


def _hottest(accesses: Ints, rows: Ints, number: float) -> float:
    """Return the accesses of the `number` hottest of `rows` rows with `accesses` each,
    descending."""
    before = np.cumsum(rows) - rows
    return float(np.clip(number - before, 0, rows) @ accesses)


def _cut(name: str, share: float, colour: str, horizontal: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a vertical line at a share of the rows, and its name."""
    cut = {"values": [{"rows": share, "name": name}]}
    text = {"type": "text", "angle": 270, "baseline": "bottom", "align": "right", "dy": -4}
    named = {"x": horizontal, "y": {"value": 0}, "text": {"field": "name"}}
    rule = {"type": "rule", "color": colour, "strokeDash": [5, 4]}
    return [
        {"data": cut, "mark": rule, "encoding": {"x": horizontal}},
        {"data": cut, "mark": {**text, "color": INK}, "encoding": named},
    ]
