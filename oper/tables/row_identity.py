"""Identity of rows: a row number must mean the same row in two plans, profiles or checkpoints.

Rows are numbers, so two tables of equal size look identical. Their rows are the same only if one
rule maps raw values to them: the same kind of ids, for hashed ids the same number of rows, and for
ids by a vocabulary the same values in the same order. A vocabulary may get values at its end: the
old rows stay. Dense ids are given rows; the values behind them are unknown.
"""

import warnings
from collections.abc import Callable, Sequence

from oper.base.errors import OperError, OperWarning
from oper.base.spoken import spoken
from oper.tables.table import Table, VocabularyDigest


def count_by_the_plan() -> str:
    """Return the remedy for a profile of other rows than a plan's."""
    command = spoken("oper profile LOG --tables PLAN", "oper.profile(log, plan.tables)")
    return f"count the log by the plan's tables: {command}"


def check_same_rows(
    old: Sequence[Table],
    new: Sequence[Table],
    names: tuple[str, str] = ("the plan", "the profile"),
    remedy: str | None = None,
    start: Callable[[str, int], VocabularyDigest | None] | None = None,
) -> None:
    """Raise OperError unless a row number of an old table is the same row in the new one; tables
    are matched by name.

    `names` are those of the old and of the new tables, `remedy` the remedy in the error. `start`
    returns the digest of the first values of a new table's vocabulary: with it, vocabularies may
    have got values at their end. An OperWarning names the first table without a recorded
    vocabulary.
    """
    unknown: list[tuple[str, str]] = []
    known = {table.name: table for table in old}
    for table in new:
        before = known.get(table.name)
        if before is None or "dense" in (before.ids.kind, table.ids.kind):
            continue
        mine, theirs = before.ids.vocabulary, table.ids.vocabulary
        if before.ids.kind != table.ids.kind:
            difference = (
                f"expected ids: {before.ids.kind}, as in {names[0]}, got ids: {table.ids.kind} "
            )
            difference += f"in {names[1]}"
        elif table.ids.kind == "hash":
            if before.rows == table.rows:
                continue
            difference = (
                f"expected ids that are hashed to {before.rows:,} rows, as in {names[0]}, got "
            )
            difference += f"{table.rows:,} rows in {names[1]}"
        elif mine is None or theirs is None:
            unknown.append((table.name, names[0] if mine is None else names[1]))
            continue
        else:
            grew = start is not None and theirs.values > mine.values
            if mine == (start(table.name, mine.values) if start and grew else theirs):
                continue
            difference = "a vocabulary that begins with" if start else "the vocabulary with"
            difference = (
                f"expected {difference} the {mine.values:,} values of {names[0]}, got another one "
            )
            difference += f"({theirs.values:,} values) in {names[1]}"
        raise OperError(
            f"table {table.name!r}: {difference}, so that equal numbers are different rows; "
            f"{remedy or count_by_the_plan()}"
        )
    if unknown:
        more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        warnings.warn(
            f"table {unknown[0][0]!r}{more}: {unknown[0][1]} does not record its vocabulary, as "
            "earlier versions of oper did not, so that nothing tells whether rows are the same",
            OperWarning,
            stacklevel=3,
        )
