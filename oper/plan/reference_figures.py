"""References for a plan's prediction: its cost on data that it was not made from, and the costs of
simple plans made without counts.

They are made in oper/planner/reference_figures.py.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from oper.plan.certificate import gap_above


class HeldOutSource(StrEnum):
    """Data that judge a plan and that the plan was not made from."""

    LAST_PART = "last part of the log"  # `oper profile --hold-out`
    NEXT_WINDOW = "next window"
    LATER_PART = "later part of the newest data"  # the last third of a window, or the last window
    THIS_WINDOW = "this window"  # for plans made from the window before


@dataclass(frozen=True)
class HeldOut:
    """Predicted step and objective of a plan, in seconds, under the counts of data later than those
    that it was made from, and a lower bound on the objective of every plan for these later data."""

    DERIVED: ClassVar = ("certified_gap",)  # in JSON next to the fields

    source: HeldOutSource
    samples: int
    step_seconds: float
    objective_seconds: float
    lower_bound_seconds: float

    @property
    def certified_gap(self) -> float | None:
        """Gap above the bound (`gap_above`)."""
        return gap_above(self.objective_seconds, self.lower_bound_seconds)


class SimpleMethod(StrEnum):
    """Method of placing tables without counts."""

    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"


@dataclass(frozen=True)
class SimplePlan:
    """Predicted step and objective, in seconds, of a plan made without counts: whole tables to the
    ranks in turn, or equal slices of each table.

    memory_factor: the fullest rank's bytes over its capacity, in the memory that is exceeded most.
    held_out_seconds, held_out_step_seconds: objective and step under the later counts of `HeldOut`;
    None without later counts.
    """

    method: SimpleMethod
    step_seconds: float
    objective_seconds: float
    memory_factor: float
    fits: bool
    held_out_step_seconds: float | None = None
    held_out_seconds: float | None = None
