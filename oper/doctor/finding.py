"""What the doctor found: that something fits, or what to know, or what does not fit."""

from dataclasses import dataclass
from typing import Literal

from oper.base.errors import OperError


@dataclass(frozen=True)
class Finding:
    """One finding. `about` is what was looked at; `do` is None where there is nothing to do."""

    level: Literal["ok", "note", "problem"]
    about: str
    says: str
    do: str | None = None

    @classmethod
    def of_error(cls, about: str, error: OperError) -> "Finding":
        """A problem, as oper's own check says it: what is wrong; what to do."""
        says, _, do = str(error).rpartition("; ")
        return cls("problem", about, says or do, do if says else None)

    def to_json(self) -> dict[str, str | None]:
        """The finding as `oper doctor --json` prints it."""
        return {"level": self.level, "about": self.about, "says": self.says, "do": self.do}
