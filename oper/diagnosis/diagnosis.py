"""What the doctor found: that something fits, or what to know, or what does not fit."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from oper.base.errors import OperError

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One finding. `about` is what was looked at; `do` is None where there is nothing to do, or
    where `says` is one of oper's errors, which say it themselves."""

    level: Level
    about: str
    says: str
    do: str | None = None

    @classmethod
    def of_error(cls, about: str, error: OperError) -> "Finding":
        """The problem that oper's own check found."""
        return cls("problem", about, str(error))


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a plan, a model and this machine, in the order of what was looked at."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings of what would not fit; none where all fits."""
        return tuple(finding for finding in self.findings if finding.level == "problem")

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as `oper doctor --json` prints it."""
        return {
            "ok": not self.problems,
            "findings": [asdict(finding) for finding in self.findings],
        }
