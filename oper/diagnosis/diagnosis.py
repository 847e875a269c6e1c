"""Findings of the doctor: fits, notes and problems."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from oper.base.errors import OperError

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One finding. `about` is its subject; `do` is None if there is nothing to do, or if `says` is
    one of oper's errors, which contain the remedy."""

    level: Level
    about: str
    says: str
    do: str | None = None

    @classmethod
    def of_error(cls, about: str, error: OperError) -> "Finding":
        """Return the problem that oper's own check found."""
        return cls("problem", about, str(error))


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a plan, a model and this machine, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings of level "problem"."""
        return tuple(finding for finding in self.findings if finding.level == "problem")

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis in the format of `oper doctor --json`."""
        return {
            "ok": not self.problems,
            "findings": [asdict(finding) for finding in self.findings],
        }
