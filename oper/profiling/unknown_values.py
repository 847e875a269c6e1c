"""Accesses of values that a vocabulary does not know: they count as row 0."""

import warnings
from collections import Counter
from dataclasses import dataclass, field

from oper.base.errors import OperNotice
from oper.base.formatting import format_percent
from oper.profiling.profile import Profile


@dataclass
class UnknownValues:
    """Accesses of unknown values and all accesses, by table, of the profiles added so far."""

    unknown: Counter[str] = field(default_factory=Counter)
    accesses: Counter[str] = field(default_factory=Counter)

    def add(self, profile: Profile) -> None:
        """Add the accesses of a profile."""
        if any(table.ids.kind == "vocab" for table in profile.tables):
            self.unknown.update(profile.unknown_accesses)
            names = [table.name for table in profile.tables]
            accesses = zip(names, profile.accesses_of_tables.tolist(), strict=True)
            self.accesses.update(dict(accesses))

    def sentence(self) -> str:
        """Return the share of accesses that are of unknown values, and the table that has the most
        of them; "" if all values are known."""
        if not self.unknown:
            return ""
        [(table, most)] = self.unknown.most_common(1)
        share = format_percent(self.unknown.total() / self.accesses.total())
        of_table = format_percent(most / self.accesses[table])
        return (
            f"{share} of accesses are of values that the vocabulary does not know; they count as "
            f"row 0 (table {table}: {of_table} of its accesses)"
        )

    def tell(self) -> None:
        """Issue the sentence as an OperNotice, if there is one."""
        if sentence := self.sentence():
            warnings.warn(f"the profile: {sentence}", OperNotice, stacklevel=3)


def tell_unknown_values(profile: Profile) -> None:
    """Issue an OperNotice of a profile's accesses of unknown values, if there are any."""
    unknown = UnknownValues()
    unknown.add(profile)
    unknown.tell()
