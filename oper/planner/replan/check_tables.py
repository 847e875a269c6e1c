"""Whether a profile is of an older plan's tables."""

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.tables.table import fingerprint


def check_tables(plan: Plan, profile: Profile) -> None:
    """OperError where the plan and the profile are of different tables."""
    if fingerprint(plan.tables) == fingerprint(profile.tables):
        return
    known = {table.name: table for table in plan.tables}
    for table in profile.tables:
        mine = known.get(table.name)
        if mine is None or fingerprint([mine]) != fingerprint([table]):
            raise OperError(
                f"table {table.name!r} has {table.describe()} in the profile, and in the plan "
                f"{mine.describe() if mine else 'there is none of that name'}; profile the new "
                "log with the old profile as `--tables`"
            )
    raise OperError(
        f"the profile has {len(profile.tables)} tables, and the plan {len(plan.tables)}, or they "
        "come in another order; profile the new log with the old profile as `--tables`"
    )
