"""Compare two plans: settings, figures, and rows that are held elsewhere."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.plan.row_locator import RowLocator


def diff(old: Plan, new: Plan) -> dict[str, Any]:
    """The differences of `new`, as `oper plan diff --json` prints them.

    Where the numbers of ranks differ, figures are compared and rows are not: `rows_changed` and
    `bytes_changed` are None. OperError where the plans are for different tables.
    """
    if [(t.name, t.rows) for t in old.tables] != [(t.name, t.rows) for t in new.tables]:
        raise OperError("the plans are for different tables, so their rows cannot be compared")
    tables = _compare_rows(old, new) if old.ranks == new.ranks else None
    return {
        "settings": {"old": old.settings, "new": new.settings},
        "ranks": {"old": old.ranks, "new": new.ranks},
        "tier": {"old": old.tier_names, "new": new.tier_names},
        "figures": {
            name: {"old": value, "new": _compared(new)[name]}
            for name, value in _compared(old).items()
        },
        "dob": {"old": old.prediction.dob._asdict(), "new": new.prediction.dob._asdict()},
        "rows": sum(t.rows for t in old.tables),
        "rows_changed": None if tables is None else sum(t["rows_changed"] for t in tables),
        "bytes_changed": None if tables is None else sum(t["bytes_changed"] for t in tables),
        "tables": tables or [],
    }


def _compare_rows(old: Plan, new: Plan) -> list[dict[str, Any]]:
    """For each table, how many rows are held elsewhere."""
    before, after = RowLocator(old), RowLocator(new)
    holds_before, holds_after = _holders(before), _holders(after)
    tables = []
    for index, table in enumerate(old.tables):
        # All rows of a table that is in the tier of one of them alone are elsewhere.
        moved = (index in old.tier) != (index in new.tier)
        changed = gained = lost = 0
        for one, two in zip(before.chunks(index), after.chunks(index), strict=True):
            # There are few pairs of extents: count their rows, then compare holders once a pair.
            pair = one.extent * len(holds_after) + two.extent
            numbers, rows = np.unique(pair, return_counts=True)
            held, holding = np.divmod(numbers, len(holds_after))
            different = (holds_before[held] != holds_after[holding]).any(axis=1) | moved
            more = holds_after[holding].sum(axis=1) - holds_before[held].sum(axis=1)
            changed += int(rows[different].sum())
            gained += int(rows[more > 0].sum())
            lost += int(rows[more < 0].sum())
        tables.append(
            {
                "table": table.name,
                "rows": table.rows,
                "rows_changed": changed,
                "rows_more_copies": gained,
                "rows_fewer_copies": lost,
                "bytes_changed": changed * table.row_bytes,
            }
        )
    return tables


def _compared(plan: Plan) -> dict[str, float]:
    """The figures that are compared."""
    return {
        "objective_seconds": plan.prediction.objective_seconds,
        "extra_memory_ratio": plan.prediction.extra_memory_ratio,
        "threshold": plan.record.threshold,
        "memory_bytes": float(plan.prediction.memory_bytes.max()),
        "communication_bytes": plan.prediction.communication_bytes.total,
    }


def _holders(locator: RowLocator) -> NDArray[np.int64]:
    """Who holds the rows of each extent, 0 or 1, [P, M]: groups, then each rank's stripes."""
    stripes = np.eye(locator.ranks, dtype=np.int64)
    return np.concatenate([locator.layout.holds.astype(np.int64), stripes])
