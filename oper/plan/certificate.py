"""Certificate: distance of a plan's objective from a lower bound on the objective of every plan.

The gap is (objective - bound) / bound. The bounds are made in oper/planner/bounds/.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar


class BoundNote(StrEnum):
    """Reason for which the bound may be looser than necessary, if single rows are hot."""

    HOT_ROWS_ALONE = "hot rows alone"  # the linear programme was too large: each row by itself
    HOT_ROWS_BY_NODES = (
        "hot rows by nodes"  # also too large: the time that they cost ranks and nodes
    )
    SEARCH_CUT = "search cut"  # branch and bound was stopped


def gap_above(seconds: float, bound_seconds: float) -> float | None:
    """Return (seconds - bound) / bound: 0 if nothing is ever read, None above a bound of 0, which
    proves nothing."""
    if bound_seconds > 0:
        return (seconds - bound_seconds) / bound_seconds
    return None if seconds > 0 else 0.0


@dataclass(frozen=True)
class Certificate:
    """A plan's objective and its lower bound, both in seconds."""

    DERIVED: ClassVar = ("certified_gap",)  # in JSON next to the fields

    objective_seconds: float
    lower_bound_seconds: float
    hot_row_share: float | None = (
        None  # of all accesses: of the single row that decides the bound, if one does
    )
    bound_note: BoundNote | None = None
    # The bound for plans with all of the devices' memory, if the plan had to use less of it.
    full_memory_bound_seconds: float | None = None

    @property
    def certified_gap(self) -> float | None:
        """Relative gap above the bound (`gap_above`)."""
        return gap_above(self.objective_seconds, self.lower_bound_seconds)

    def is_within(self, gap: float) -> bool:
        """Return whether the plan is proved to be at most a share `gap` above the bound."""
        certified = self.certified_gap
        return certified is not None and certified <= gap

    def of(self, objective_seconds: float) -> "Certificate":
        """Return the certificate of another plan for the same problem, with the same bound."""
        return replace(self, objective_seconds=objective_seconds)

    def at_least(self, bound_seconds: float) -> "Certificate":
        """Return the certificate with `bound_seconds` if that is higher, without the notes on the
        old bound."""
        if bound_seconds <= self.lower_bound_seconds:
            return self
        return replace(self, lower_bound_seconds=bound_seconds, hot_row_share=None, bound_note=None)
