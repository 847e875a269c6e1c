"""Predicted step over the memory that a plan may use."""

import math
from collections.abc import Sequence

from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_factor,
    format_gap,
    format_share,
)
from oper.planner.memory_curve import CurvePoint
from oper.report.charts.chart import ACCENT, INK, Chart, axis, bytes_unit, duration_unit, spec

_TWICE_AT_LEAST = 1.9
_LEAST_SPAN = 2.0  # of the axis: on a narrower one a percent more memory would look like a lot
_NOTICED = 5e-5  # a share below it prints as 0.00%
_PROVED = "transfer time above the proved bound, at most"


def memory_curve_chart(points: Sequence[CurvePoint]) -> Chart | None:
    """Return the curve, with the plan's own point marked; None if all points have equal memory. The
    line leaves out a plan that is slower than one in less memory."""
    points = _distinct(points)
    if len(points) < 2:
        return None
    time = duration_unit(max(point.step_seconds for point in points))
    memory = bytes_unit(max(point.memory_bytes for point in points))
    own = next((point for point in points if point.plan), points[0])
    less = [point.step_seconds for point in points if point.memory_bytes < own.memory_bytes]
    least = min(less, default=own.step_seconds)
    values = [
        {
            "memory": memory.scaled(point.memory_bytes),
            "time": time.scaled(point.step_seconds),
            "shown": format_duration(point.step_seconds),
            "held": format_bytes(point.memory_bytes),
            "name": "this plan" if point.plan else "",
            "best": not point.plan or point.step_seconds <= least,
        }
        for point in points
    ]
    held = [memory.scaled(point.memory_bytes) for point in points]
    encoding = {
        "x": {
            "field": "memory",
            "type": "quantitative",
            "scale": {"type": "log", "nice": False, "domain": _axis(min(held), max(held))},
            "axis": axis(f"memory of the fullest rank, {memory.name}", labelOverlap=True),
        },
        "y": {
            "field": "time",
            "type": "quantitative",
            "scale": {"zero": True},
            "axis": axis(f"predicted step, {time.name}"),
        },
        "tooltip": [
            {"field": "held", "title": "fullest rank"},
            {"field": "shown", "title": "predicted step"},
        ],
    }
    line = {"mark": {"type": "line", "color": ACCENT, "point": {"color": ACCENT}, "tooltip": True}}
    plan = {"transform": [{"filter": "datum.name != ''"}]}
    best = {"transform": [{"filter": "datum.best"}]}
    layers = [
        best | line | {"encoding": encoding},
        plan | {"mark": {"type": "point", "size": 160, "color": INK}, "encoding": encoding},
        plan
        | {
            "mark": {"type": "text", "dy": -16, "color": INK},
            "encoding": encoding | {"text": {"field": "name"}},
        },
    ]
    return Chart(
        key="memory-curve",
        title="What more or less memory would do",
        caption=twice_the_memory(points),
        spec=spec(values, layer=layers),
        headers=("extra memory", "fullest rank", "predicted step", _PROVED, "which"),
        rows=[
            (
                format_share(point.extra_memory_ratio),
                format_bytes(point.memory_bytes),
                format_duration(point.step_seconds),
                format_gap(point.certified_gap),
                "this plan" if point.plan else "",
            )
            for point in points
        ],
    )


def _axis(least: float, most: float) -> list[float]:
    """Return the ends of a logarithmic axis."""
    if most >= _LEAST_SPAN * least:
        return [least, most]
    middle, half = math.sqrt(least * most), math.sqrt(_LEAST_SPAN)
    return [float(f"{end:.5g}") for end in (middle / half, middle * half)]


def _distinct(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return one point for each amount of memory; the plan's own stays."""
    kept: dict[int, CurvePoint] = {}
    for point in points:
        if point.plan or point.memory_bytes not in kept:
            kept[point.memory_bytes] = point
    return list(kept.values())


def _beside(factor: float) -> str:
    """Return an amount of memory, compared with this plan's, in words."""
    if factor - 1 < _NOTICED:
        return "as much as this one"
    if factor < 1.1:
        return f"{format_share(factor - 1)} more than this one"
    return f"{format_factor(factor)} times as much as this one"


def twice_the_memory(points: Sequence[CurvePoint]) -> str:
    """Return the gain of twice the plan's memory, as a sentence."""
    plan = next(point for point in points if point.plan)
    held, seconds = plan.memory_bytes, plan.step_seconds
    more = [point for point in points if point.memory_bytes > held]
    if not more or not seconds:
        return f"No plan was found that uses more than the {format_bytes(held)} of this one."

    def saving(point: CurvePoint) -> str:
        saved = 1 - point.step_seconds / seconds
        if saved < _NOTICED:
            return "no time"
        times = f"{format_duration(point.step_seconds)} instead of {format_duration(seconds)}"
        return f"{format_share(saved)} of the step, {times}"

    best = min(more, key=lambda point: (point.step_seconds, point.memory_bytes))
    largest = more[-1]
    if largest.memory_bytes < _TWICE_AT_LEAST * held:
        return (
            "Twice the memory would not be used: plans grow to "
            f"{format_bytes(largest.memory_bytes)} on the fullest rank, "
            f"{_beside(largest.memory_bytes / held)}, and save at best {saving(best)}."
        )
    twice = min(more, key=lambda point: abs(point.memory_bytes / held - 2))
    factor = twice.memory_bytes / held
    named = "Twice the memory" if abs(factor - 2) < 0.02 else f"{factor:.3g} times the memory"
    sentence = (
        f"{named} of this plan, {format_bytes(twice.memory_bytes)} on the fullest rank, would save "
        f"{saving(twice)}."
    )
    if best.step_seconds < twice.step_seconds:
        sentence += (
            f" The fastest plan of the curve has {format_bytes(best.memory_bytes)} there and "
            f"saves {saving(best)}."
        )
    return sentence
