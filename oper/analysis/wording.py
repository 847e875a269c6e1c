"""Sentences about facts of a plan that several places show, such as the terminal and the report."""

from oper.analysis.plan_facts import Threshold
from oper.base.formatting import format_percent
from oper.plan.certificate import BoundNote, Certificate
from oper.plan.memories import ThresholdReason

_NOTES = {
    BoundNote.HOT_ROWS_ALONE: (
        "the programme with whole hot rows was not solved, as it is too large for so many ranks: "
        "hot rows count as whole only in what each of them alone makes a rank take"
    ),
    BoundNote.HOT_ROWS_BY_NODES: (
        "the programme with whole hot rows was not solved, as it is too large for so many ranks: "
        "hot rows count as whole only in what they make their ranks and nodes take"
    ),
    BoundNote.SEARCH_CUT: (
        "the programme with whole hot rows was stopped before branch and bound was done"
    ),
}


def hot_row(certificate: Certificate) -> str | None:
    """What a single row does to the bound, where it is what binds."""
    if certificate.hot_row_share is None:
        return None
    return (
        f"a single row with {certificate.hot_row_share:.2%} of all accesses cannot be split: some "
        "rank takes this long for it whatever the plan"
    )


def bound_note(certificate: Certificate) -> str | None:
    """Why the bound may be lower than it had to be."""
    return None if certificate.bound_note is None else _NOTES[certificate.bound_note]


def threshold_sentence(found: Threshold) -> str:
    """The threshold as asked and as it ended, and why."""
    said = f"{format_percent(found.asked)}, as asked"
    if found.halved:
        said = f"{format_percent(found.asked)} asked; halved to {format_percent(found.used)}"
    if found.reason == ThresholdReason.NOT_PLACED_BY_PARTITIONS:
        return f"{said}, but this plan's rows were not placed in partitions"
    why = {
        ThresholdReason.BALANCED: f"where the ranks were even to {format_percent(found.balance)}",
        ThresholdReason.NO_GAIN: (
            "where halving again no longer helped" if found.halved else "as halving it did not help"
        ),
        ThresholdReason.MOST_HALVINGS: "the least that is tried",
    }[found.reason]
    return (
        f"{said}, {why}. Rows are placed in partitions of at most this share of all bytes and of "
        "all accesses"
    )
