"""The skew of a log: the share of all accesses that its hottest rows take."""

import numpy as np

from oper.base.arrays import Ints
from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile
from oper.report.charts.chart import ACCENT, INK, Chart, axis, spec

_POINTS = 200
_QUOTED = (0.001, 0.01, 0.1)  # shares of rows in the table


def skew_chart(profile: Profile, replicated_rows: int) -> Chart | None:
    """The curve of all rows, with the plan's replicas marked; None where nothing was accessed."""
    none = np.zeros(0, profile.accesses.dtype)
    starts = np.array([0, len(profile.accesses)], dtype=np.int64)
    _, accesses, _, rows = histogram(profile.accesses, none, starts, np.zeros(2, dtype=np.int64))
    # The histogram is of one piece, all rows: descending by accesses.
    total_rows, total = int(rows.sum()), int(accesses @ rows)
    if not total:
        return None

    def share(number: float) -> float:
        """Of all accesses, those of so many of the hottest rows."""
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
        "axis": axis("share of all rows, hottest first (logarithmic)", format="~%", tickCount=6),
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
    layers = [curve]
    unread = int(rows[accesses == 0].sum())
    caption = f"The hottest 1% of the rows take {share(0.01 * total_rows):.1%} of the accesses."
    if unread:
        caption += f" {unread / total_rows:.1%} of the rows were not read at all in the profile."
    if replicated_rows:
        cut = {"rows": replicated_rows / total_rows, "name": f"{replicated_rows:,} replicated"}
        text = {"type": "text", "angle": 270, "baseline": "bottom", "align": "right", "dy": -4}
        layers += [
            {
                "data": {"values": [cut]},
                "mark": {"type": "rule", "color": "var(--replicated)", "strokeDash": [5, 4]},
                "encoding": {"x": horizontal},
            },
            {
                "data": {"values": [cut]},
                "mark": {**text, "color": INK},
                "encoding": {"x": horizontal, "y": {"value": 0}, "text": {"field": "name"}},
            },
        ]
        caption += (
            f" The plan replicates {replicated_rows:,} rows, {replicated_rows / total_rows:.2%} of "
            f"all; as many of the hottest take {share(replicated_rows):.1%} of the accesses."
        )
    return Chart(
        key="skew",
        title="How skewed the accesses are",
        caption=caption,
        spec=spec(values, layer=layers),
        headers=("hottest rows", "of all rows", "of all accesses"),
        rows=[
            (f"{n:,.0f}", f"{n / total_rows:.3%}", f"{share(n):.2%}")
            for n in sorted({q * total_rows for q in _QUOTED} | {float(replicated_rows)} - {0.0})
        ],
    )


def _hottest(accesses: Ints, rows: Ints, number: float) -> float:
    """Accesses of `number` of the hottest rows, of rows with `accesses` each, descending."""
    before = np.cumsum(rows) - rows
    return float(np.clip(number - before, 0, rows) @ accesses)
