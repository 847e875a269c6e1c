"""Which of a profile's tables the tier has: their numbers, from what was asked.

In: `Settings.tier`, tables. Out: numbers, ascending.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from oper.base.errors import OperError
from oper.planner.problem.problem import Settings
from oper.tables.table import Table


def tier_tables(settings: Settings, tables: Sequence[Table]) -> tuple[int, ...]:
    """The numbers of the tier's tables; OperError, with near names, where one is not there."""
    number = {table.name: n for n, table in enumerate(tables)}
    if settings.tier == "all":
        return tuple(range(len(tables)))
    for name in settings.tier:
        if name in number:
            continue
        known = {one.lower(): one for one in number}
        near = [known[one] for one in get_close_matches(name.lower(), known, n=3)]
        some = ", ".join(near or list(number)[:8])
        raise OperError(
            f"tier: table {name!r} is not in the profile; "
            + (f"near it: {some}" if near else f"it has {some}")
            + ("" if near or len(number) <= 8 else ", …")
        )
    return tuple(sorted(number[name] for name in settings.tier))
