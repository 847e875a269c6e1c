"""Findings of a check: invariants and their violations."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oper.base.display import Summarised
from oper.checker.bag_vectors import TableVectors


@dataclass(frozen=True)
class Finding:
    """Checked invariant; `wrong` is its violation, None if it holds."""

    invariant: str
    wrong: str | None = None

    @property
    def ok(self) -> bool:
        return self.wrong is None


@dataclass(frozen=True)
class Findings(Summarised):
    """Findings for each invariant of a plan, in the order of the checks; and the vectors of pooled
    tables, if a log was replayed."""

    invariants: tuple[Finding, ...]
    vectors: tuple[TableVectors, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.invariants)

    def __len__(self) -> int:
        return len(self.invariants)

    @property
    def wrong(self) -> list[Finding]:
        """Invariants that are violated."""
        return [finding for finding in self.invariants if not finding.ok]

    @property
    def ok(self) -> bool:
        """True if all invariants hold."""
        return not self.wrong

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `oper plan check --json`, except `plan`."""
        return {
            "ok": self.ok,
            "findings": [
                {"invariant": finding.invariant, "ok": finding.ok, "wrong": finding.wrong}
                for finding in self.invariants
            ],
            "vectors": [asdict(of_table) for of_table in self.vectors],
        }
