"""What a check found: invariants, and what is wrong with them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oper.base.display import Summarised
from oper.checker.bag_vectors import TableVectors


@dataclass(frozen=True)
class Finding:
    """One invariant: what was checked, and what is wrong with it; None where nothing is."""

    invariant: str
    wrong: str | None = None

    @property
    def ok(self) -> bool:
        return self.wrong is None


@dataclass(frozen=True)
class Findings(Summarised):
    """What was found of each invariant of a plan, in the order in which they were checked; and of a
    log that was replayed, the vectors that pooled tables need."""

    invariants: tuple[Finding, ...]
    vectors: tuple[TableVectors, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.invariants)

    def __len__(self) -> int:
        return len(self.invariants)

    @property
    def wrong(self) -> list[Finding]:
        """The invariants that do not hold."""
        return [finding for finding in self.invariants if not finding.ok]

    @property
    def ok(self) -> bool:
        """Whether all invariants hold."""
        return not self.wrong

    def to_json(self) -> dict[str, Any]:
        """The fields of `oper plan check --json`, but `plan`."""
        return {
            "ok": self.ok,
            "findings": [
                {"invariant": finding.invariant, "ok": finding.ok, "wrong": finding.wrong}
                for finding in self.invariants
            ],
            "vectors": [asdict(of_table) for of_table in self.vectors],
        }
