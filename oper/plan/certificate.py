"""Certificate: how far a plan's objective is from a lower bound on that of every plan.

The gap is (objective - bound) / bound. The bounds are made in oper/planner/bounds/.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar


class BoundNote(StrEnum):
    """Why the bound may be lower than it had to be, where single rows are hot."""

    HOT_ROWS_ALONE = "hot rows alone"  # the programme was too large: each row by itself
    HOT_ROWS_BY_NODES = "hot rows by nodes"  # the same: what they make ranks and nodes take
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

    DERIVED: ClassVar = ("certified_gap",)  # in JSON beside the fields

    objective_seconds: float
    lower_bound_seconds: float
    hot_row_share: float | None = None  # of all accesses: of the single row that binds, if one does
    bound_note: BoundNote | None = None
    # The bound for all that the devices' memory allows, where the plan was to use less of it.
    full_memory_bound_seconds: float | None = None

    @property
    def certified_gap(self) -> float | None:
        """Gap above the bound (`gap_above`)."""
        return gap_above(self.objective_seconds, self.lower_bound_seconds)

    def is_within(self, gap: float) -> bool:
        """Return whether the plan is proved to be at most a share `gap` above the bound."""
        found = self.certified_gap
        return found is not None and found <= gap

    def of(self, objective_seconds: float) -> "Certificate":
        """The certificate of another plan for the same problem, by the same bound."""
        return replace(self, objective_seconds=objective_seconds)

    def at_least(self, bound_seconds: float) -> "Certificate":
        """With this bound where it is the better one: what else is said is of its own."""
        if bound_seconds <= self.lower_bound_seconds:
            return self
        return replace(self, lower_bound_seconds=bound_seconds, hot_row_share=None, bound_note=None)
