"""A summary of each table of a profile: rows never read, and how skewed the accesses are."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile

# The "hottest 1 %" of rows, as reports call them: a round number, no plan depends on it.
HOT_SHARE = 0.01


@dataclass(frozen=True)
class AccessSummary:
    """One table, or all of them under the name "all"."""

    name: str
    rows: int
    accesses: int
    rows_never_accessed: int
    hot_accesses_share: float  # of the hottest 1 % of its rows
    bagged: bool

    def to_dict(self) -> dict[str, Any]:
        """The summary as `oper profile --json` prints it."""
        return asdict(self)


def summarise(profile: Profile) -> tuple[AccessSummary, list[AccessSummary]]:
    """All tables together, and each. One pass over the counters."""
    table, accesses, _, rows = histogram(
        profile.accesses,
        np.zeros(0, profile.accesses.dtype),
        profile.offsets,
        np.zeros(len(profile.offsets), dtype=np.int64),
    )
    order = np.argsort(-accesses, kind="stable")
    whole = _summary("all", accesses[order], rows[order], any(profile.bagged))
    border = np.searchsorted(table, np.arange(len(profile.tables) + 1))
    return whole, [
        _summary(t.name, accesses[first:last], rows[first:last], bagged)
        for t, bagged, first, last in zip(
            profile.tables, profile.bagged, border[:-1], border[1:], strict=True
        )
    ]


def _summary(
    name: str, accesses: NDArray[np.int64], rows: NDArray[np.int64], bagged: bool
) -> AccessSummary:
    """Summarise `rows[n]` rows with `accesses[n]` each, accesses descending."""
    total, number = int(accesses @ rows), int(rows.sum())
    before = np.cumsum(rows) - rows
    hot = np.clip(HOT_SHARE * number - before, 0, rows)
    return AccessSummary(
        name,
        number,
        total,
        int(rows[accesses == 0].sum()),
        float(hot @ accesses / total) if total else 0.0,
        bagged,
    )
