"""Summary of a profile in a few numbers: rows never read, and the skew of the accesses.

A profile's summary has one of each table, and of each window if it has windows.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.portable_math import dot, whole_dot
from oper.profiling.distinct_rows import Distinct
from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile, merge
from oper.profiling.sampling import HOT_SHARE, Sampled
from oper.tables.bag_lengths import BagSummary


@dataclass(frozen=True)
class AccessSummary:
    """The accesses of one table, or of all of them under the name "all", without kind of ids and
    without bags; `bag_lengths` is None if those were not counted either."""

    name: str
    rows: int
    accesses: int
    rows_never_accessed: int
    hot_accesses_share: float  # of the hottest 1 % of its rows
    bagged: bool
    ids: str = ""
    bag_lengths: BagSummary | None = None


@dataclass(frozen=True)
class WindowSummary:
    """One window; `bounds` are its profile's, in one of several forms."""

    samples: int
    accesses: int
    bounds: dict[str, Any]

    @property
    def first(self) -> str | float:
        """Start of the window: a date, a value of its column, or a sample."""
        return self._bound("from")

    @property
    def last(self) -> str | float:
        """Exclusive end of the window: a date, a value, or a sample."""
        return self._bound("to")

    def to_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "accesses": self.accesses, **self.bounds}

    def _bound(self, name: str) -> Any:
        forms = (name, f"{name}_value", f"{name}_sample")
        return next(self.bounds[form] for form in forms if form in self.bounds)


@dataclass(frozen=True)
class ProfileSummary:
    """A profile, or the windows of one folder and their sum."""

    samples: int
    whole: AccessSummary
    tables: tuple[AccessSummary, ...]
    counter_bytes: int
    left_out: dict[str, str]
    skipped_ids: dict[str, int]
    unknown_accesses: dict[str, int]
    distinct: Distinct | None = None
    sampled: Sampled | None = None
    windows: tuple[WindowSummary, ...] | None = None
    held_out: WindowSummary | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as `oper profile --json` prints it."""
        content = {
            "samples": self.samples,
            "rows": self.whole.rows,
            "accesses": self.whole.accesses,
            "rows_never_accessed": self.whole.rows_never_accessed,
            "hot_accesses_share": self.whole.hot_accesses_share,
            "counter_bytes": self.counter_bytes,
            "tables": [asdict(table) for table in self.tables],
            "left_out": self.left_out,
            "skipped_ids": self.skipped_ids,
            "unknown_accesses": self.unknown_accesses,
            "distinct": None if self.distinct is None else self.distinct.to_dict(),
            "sampled": None if self.sampled is None else self.sampled.to_dict(),
        }
        if self.windows is not None:
            content["windows"] = [w.to_dict() for w in self.windows]
        if self.held_out is not None:
            content["held_out"] = self.held_out.to_dict()
        return content


def summarise(profiles: Sequence[Profile]) -> ProfileSummary:
    """Return the summary of a profile, or of the windows of one folder; one pass over the
    counters."""
    profile = profiles[0] if len(profiles) == 1 else merge(profiles)
    held_out = profile.following if profile.holds_out else None
    whole, tables = _accesses(profile)
    return ProfileSummary(
        samples=profile.samples,
        whole=whole,
        tables=tables,
        counter_bytes=profile.accesses.itemsize,
        left_out=profiles[0].left_out,
        skipped_ids=profiles[0].skipped_ids,  # each window has the number of the whole log
        unknown_accesses=profile.unknown_accesses,
        distinct=profile.distinct,
        sampled=profile.sampled,
        windows=tuple(_window(p) for p in profiles) if "window" in profiles[0].source else None,
        held_out=None if held_out is None else _window(held_out),
    )


def _window(profile: Profile) -> WindowSummary:
    accesses = int(profile.stored("accesses").sum(dtype="uint64"))
    return WindowSummary(profile.samples, accesses, profile.source["window"])


def _accesses(profile: Profile) -> tuple[AccessSummary, tuple[AccessSummary, ...]]:
    """Summarise the accesses of all tables together, and of each table."""
    of_table, accesses, _, rows = histogram(
        profile.accesses,
        np.zeros(0, profile.accesses.dtype),
        profile.offsets,
        np.zeros(len(profile.offsets), dtype=np.int64),
    )
    order = np.argsort(-accesses, kind="stable")
    whole = _summary("all", accesses[order], rows[order], any(profile.bagged))
    border = np.searchsorted(of_table, np.arange(len(profile.tables) + 1))
    lengths = profile.bag_lengths
    summaries = []
    for number, (table, bagged) in enumerate(zip(profile.tables, profile.bagged, strict=True)):
        table_rows = slice(*border[number : number + 2].tolist())
        counted = _summary(table.name, accesses[table_rows], rows[table_rows], bagged)
        bags = None if lengths is None else lengths.summary(number)
        summaries.append(replace(counted, ids=table.ids.kind, bag_lengths=bags))
    return whole, tuple(summaries)


def _summary(
    name: str,
    accesses: NDArray[np.int64],
    rows: NDArray[np.int64],
    bagged: bool,
) -> AccessSummary:
    """Summarise `rows[n]` rows with `accesses[n]` each, accesses descending."""
    total, number = int(whole_dot(accesses, rows)), int(rows.sum())
    before = np.cumsum(rows) - rows
    hot = np.clip(HOT_SHARE * number - before, 0, rows)
    return AccessSummary(
        name,
        number,
        total,
        int(rows[accesses == 0].sum()),
        float(dot(hot, accesses) / total) if total else 0.0,
        bagged,
    )
