"""Fewest accesses by which a plan can be judged.

Counts of few accesses are mostly chance. In windows drawn at random from one log, in which nothing
drifts, plans of 8 and 32 ranks for inference took up to 6,400 % longer than one made from scratch
for 16 samples, up to 12 % at 1,400 accesses a rank, and at most 3 % at 5,500
(docs/design/small-windows.md).
"""

import warnings

from oper.base.errors import OperWarning
from oper.profiling.profile import Profile

ENOUGH_ACCESSES = 4096  # of a rank


def is_too_small(accesses: int, ranks: int) -> bool:
    """Return True if counts of so many accesses are too few to tell drift on so many ranks."""
    return accesses < ENOUGH_ACCESSES * ranks


def warn_if_too_small(profile: Profile, ranks: int, where: str) -> None:
    """Issue an OperWarning if the counts are too few; `where` names their data."""
    accesses = profile.total_accesses
    if is_too_small(accesses, ranks):
        warnings.warn(
            f"{where} have {accesses / ranks:,.0f} accesses per rank; with fewer than "
            f"{ENOUGH_ACCESSES:,}, chance looks like drift and moves times: use more data",
            OperWarning,
            stacklevel=3,
        )
