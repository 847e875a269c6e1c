"""The differences of two plans: settings, figures, and rows that are held elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.display import Summarised
from oper.base.errors import OperError
from oper.cost.objective import Balance
from oper.cost.workload import Workload
from oper.plan.plan import Plan, plan_given
from oper.plan.plan_file import to_json
from oper.plan.row_locator import RowLocator
from oper.plan.settings import Limits, PlanSettings
from oper.tables.row_identity import check_same_rows, count_by_the_plan


@dataclass(frozen=True)
class ComparedPlan:
    """One of two plans: its purpose and its figures. `profile` is the digest of the profile that it
    was made from; `memory_bytes` are the fullest rank's, `communication_bytes` those of all ranks
    in an iteration; `tier` are the tables in the hosts' memory."""

    profile: str
    ranks: int
    workload: Workload
    asked: PlanSettings
    limits: Limits | None
    tier: list[str]
    objective_seconds: float
    extra_memory_ratio: float
    memory_bytes: int
    communication_bytes: float
    threshold: float | None
    dob: Balance


@dataclass(frozen=True)
class TableDifference:
    """Rows of a table that other ranks hold, or more or fewer of them. `bytes_changed` are those of
    the stored rows, with their optimizer state in training, which moving the rows would send."""

    table: str
    rows: int
    rows_changed: int
    rows_more_copies: int
    rows_fewer_copies: int
    bytes_changed: int


@dataclass(frozen=True)
class PlanDifferences(Summarised):
    """Two plans for the same tables; `tables` is None if their numbers of ranks differ, so that
    rows cannot be compared."""

    old: ComparedPlan
    new: ComparedPlan
    rows: int
    tables: list[TableDifference] | None

    @property
    def same_work(self) -> bool:
        """True if both plans are for the same mode, fetches and batch; otherwise their times do not
        compare."""
        return self.old.workload == self.new.workload

    @property
    def same_data(self) -> bool:
        """True if both plans were made from one profile; otherwise their times differ by the data
        too."""
        return self.old.profile == self.new.profile

    @property
    def rows_changed(self) -> int | None:
        return None if self.tables is None else sum(t.rows_changed for t in self.tables)

    @property
    def bytes_changed(self) -> int | None:
        return None if self.tables is None else sum(t.bytes_changed for t in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return the output of `oper plan diff --json`."""
        content: dict[str, Any] = to_json(self)
        return content | {
            "rows_changed": self.rows_changed,
            "bytes_changed": self.bytes_changed,
            "tables": content["tables"] or [],
        }


def diff(old: Plan | Path | str, new: Plan | Path | str) -> PlanDifferences:
    """Return the differences of the plan `new` from `old`; plans may be given by their folders.

    If the numbers of ranks differ, figures are compared and rows are not. Raise OperError if the
    plans are for different tables.
    """
    old, new = plan_given("diff", "old", old), plan_given("diff", "new", new)
    if [(t.name, t.rows) for t in old.tables] != [(t.name, t.rows) for t in new.tables]:
        raise OperError("the plans are for different tables, so their rows cannot be compared")
    check_same_rows(
        old.numbered_tables(),
        new.numbered_tables(),
        ("the first plan", "the second"),
        f"compare plans of one vocabulary: {count_by_the_plan()}",
        new.vocabulary_start,
    )
    tables = _compare_rows(old, new) if old.ranks == new.ranks else None
    return PlanDifferences(
        old=_compared(old),
        new=_compared(new),
        rows=sum(t.rows for t in old.tables),
        tables=tables,
    )


def _compare_rows(old: Plan, new: Plan) -> list[TableDifference]:
    """Count for each table the rows that other ranks hold, or more or fewer ranks than before."""
    before, after = RowLocator(old), RowLocator(new)
    holds_before, holds_after = _holders(before), _holders(after)
    tables = []
    for index, table in enumerate(old.tables):
        # All rows of a table that is in another memory are elsewhere.
        moved = old.memory_of(index).name != new.memory_of(index).name
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
            TableDifference(
                table=table.name,
                rows=table.rows,
                rows_changed=changed,
                rows_more_copies=gained,
                rows_fewer_copies=lost,
                bytes_changed=changed * table.memory_bytes(new.workload.mode),
            )
        )
    return tables


def _compared(plan: Plan) -> ComparedPlan:
    """Return the figures that are compared."""
    return ComparedPlan(
        profile=plan.profile,
        ranks=plan.ranks,
        workload=plan.workload,
        asked=plan.asked,
        limits=plan.limits,
        tier=plan.tier_names,
        objective_seconds=plan.cost.objective_seconds,
        extra_memory_ratio=plan.cost.extra_memory_ratio,
        memory_bytes=int(plan.cost.memory_bytes.max()),
        communication_bytes=plan.cost.communication_bytes.total,
        threshold=None if plan.record is None else plan.record.threshold,
        dob=plan.cost.dob,
    )


def _holders(locator: RowLocator) -> NDArray[np.int64]:
    """Return the holders of each extent's rows, 0 or 1, [P, M]: groups, then stripes."""
    stripes = np.eye(locator.ranks, dtype=np.int64)
    return np.concatenate([locator.layout.holds.astype(np.int64), stripes])
