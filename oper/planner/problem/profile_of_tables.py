"""A profile's counts of some of its tables, to plan for these alone.

In: `Profile`, numbers of tables. Out: a `Profile` whose counters are copies, or the profile itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oper.profiling.profile import Profile


def profile_of_tables(profile: Profile, chosen: Sequence[int]) -> Profile:
    """The counts of the tables with these numbers, ascending."""
    if len(chosen) == len(profile.tables):
        return profile
    samples_with_row = [profile.table_samples_with_row(n) for n in chosen if profile.bagged[n]]
    measured = profile.distinct
    per_table: dict[str, Any] = {
        name: tuple(values[n] for n in chosen)
        for name, values in (vars(measured) if measured else {}).items()
        if isinstance(values, tuple)
    }
    return replace(
        profile,
        tables=tuple(profile.tables[n] for n in chosen),
        accesses=np.concatenate([profile.table_accesses(n) for n in chosen]),
        samples_with_row=np.concatenate([profile.samples_with_row[:0], *samples_with_row]),
        bagged=tuple(profile.bagged[n] for n in chosen),
        distinct=measured and replace(measured, **per_table),
    )
