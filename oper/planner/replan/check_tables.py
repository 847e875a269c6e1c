"""Comparison of a profile's tables with those of an older plan."""

from dataclasses import dataclass, replace
from typing import NoReturn

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.tables.row_identity import check_same_rows, count_by_the_plan
from oper.tables.table import Table, fingerprint


def check_tables(plan: Plan, profile: Profile) -> None:
    """Raise OperError if the plan and the profile are of different tables, or number their rows
    differently."""
    if fingerprint(plan.tables) == fingerprint(profile.tables):
        _check_same_rows(plan, profile)
        return
    known = {table.name: table for table in plan.tables}
    for table in profile.tables:
        new_table = known.get(table.name)
        if new_table is None or fingerprint([new_table]) != fingerprint([table]):
            raise OperError(
                f"table {table.name!r} has {table.describe()} in the profile, and in the plan "
                f"{new_table.describe() if new_table else 'there is none of that name'}; "
                f"{count_by_the_plan()}"
            )
    raise OperError(
        f"the profile has {len(profile.tables)} tables, and the plan {len(plan.tables)}, or they "
        f"come in another order; {count_by_the_plan()}"
    )


def _check_same_rows(plan: Plan, profile: Profile) -> None:
    old, new = plan.numbered_tables(), profile.numbered_tables()
    check_same_rows(old, new, start=profile.vocabulary_start)


@dataclass(frozen=True)
class TableChanges:
    """The names of tables that have more rows in a profile than in a plan, that only the profile
    has, and that only the plan has."""

    grown: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    @staticmethod
    def between(plan: Plan, profile: Profile) -> "TableChanges":
        """Raise OperError if rows of the plan are other rows in the profile, or none of them is
        there."""
        known = {table.name: table for table in plan.numbered_tables()}
        numbered = profile.numbered_tables()
        names = {table.name for table in numbered}
        if not names & set(known):
            table = profile.tables[0]
            raise OperError(
                f"table {table.name!r} and all others of the profile are not in the plan, whose "
                f"first is {plan.tables[0].name!r}: there is no row to start from; make a plan "
                f"with `oper plan`, or {count_by_the_plan()}"
            )
        for table in numbered:
            if table.name in known:
                _check_rows_stay(known[table.name], table)
        _check_same_rows(plan, profile)
        return TableChanges(
            tuple(
                t.name for t in profile.tables if t.name in known and t.rows > known[t.name].rows
            ),
            tuple(t.name for t in profile.tables if t.name not in known),
            tuple(name for name in known if name not in names),
        )


def _check_rows_stay(old: Table, new: Table) -> None:
    """Raise OperError if row r of the old table is not row r of the new one."""

    def refuse(why: str, remedy: str) -> NoReturn:
        raise OperError(
            f"table {new.name!r} has {new.describe()} in the profile, and in the plan "
            f"{old.describe()}; {why}: {remedy}, or make a plan with `oper plan`"
        )

    as_before = count_by_the_plan()
    if fingerprint([replace(old, rows=new.rows)]) != fingerprint([new]):
        refuse("its rows may become more, and nothing else may change", as_before)
    if new.rows < old.rows:
        refuse("it may have more rows, and not fewer", as_before)
    recorded = old.ids.vocabulary is not None and new.ids.vocabulary is not None
    if new.rows > old.rows and new.ids.kind != "dense" and not recorded:
        refuse(f"with more rows {new.ids.kind} ids number the old ones anew", as_before)
