"""Predicted step over memory, as `oper plan --curve` prints it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oper.base.formatting import format_bytes, format_digits, format_duration, format_gap
from oper.cli.shared.console import new_table

if TYPE_CHECKING:
    from oper.planner.memory_curve import CurvePoint


def curve_table(curve: Sequence["CurvePoint"]) -> Any:
    """Return a table of memory and predicted step of plans, in which the plan itself is marked."""
    table = new_table(
        "extra memory",
        "used by copies",
        "fullest rank",
        "predicted step",
        "times the least",
        "transfer time\nabove the bound",
        "",
    )
    least = min(point.step_seconds for point in curve)
    for point in curve:
        seconds = point.step_seconds
        table.add_row(
            f"{format_digits(100 * point.extra_memory, 4)}%",
            f"{format_digits(100 * point.extra_memory_ratio, 4)}%",
            format_bytes(point.memory_bytes),
            format_duration(seconds),
            f"{seconds / least:.4f}" if least else "-",
            format_gap(point.certified_gap),
            "the plan" if point.plan else "",
        )
    return table
