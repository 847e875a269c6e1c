"""What a check found: an invariant, and what is wrong with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One invariant: what was checked, and what is wrong with it; None where nothing is."""

    invariant: str
    wrong: str | None = None

    @property
    def ok(self) -> bool:
        return self.wrong is None
