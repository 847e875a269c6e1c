"""Replay of a log through a plan's address maps: each owner must serve the reads that the plan
states.

In: a plan's folder, its log. Out: findings. Only the part of the log that the profile counted is
read: a range of samples (`rows`), a window of them by number or by a column of times (`window`), a
random share (`sampled`), or several of these at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.checker.findings import Finding
from oper.checker.rank_address_maps import RankMaps
from oper.logs import Batch, Jagged, LogOptions, Prepared, RowReader, open_log
from oper.logs.batches.columns import NoSuchColumnError
from oper.logs.batches.timestamps import PER_SECOND
from oper.logs.row_ids import BadIdError
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.plan.plan import Plan
from oper.profiling.counting import take
from oper.profiling.profile import MARKER as PROFILE_MARKER
from oper.profiling.sampling import Sampling
from oper.profiling.windows import checked_times


@dataclass(frozen=True)
class LogPart:
    """Part of a log, in the format of a plan; {} is all of the log."""

    content: dict[str, Any]

    def options(self, given: LogOptions) -> LogOptions:
        """Return the options for reading this part of the log."""
        options = given
        if "rows" in self.content:
            options = replace(options, rows=self.content["rows"])
        if column := self._window.get("column"):
            options = replace(options, time=column, time_unit=self.content.get("time_unit"))
        return options

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the samples of the part."""
        position = 0
        for batch in batches:
            chosen = self._sampled(position, batch.samples) & self._within(batch, position)
            position += batch.samples
            if chosen.any():
                yield take(batch, chosen)

    def __str__(self) -> str:
        parts = []
        if "rows" in self.content:
            parts.append(f"samples {self.content['rows']}")
        if "from_sample" in self._window:
            first, last = self._window["from_sample"], self._window["to_sample"]
            parts.append(f"the window from sample {first:,} to {last:,}")
        elif self._window:
            first, last = (self._window.get(n, self._window[f"{n}_value"]) for n in ("from", "to"))
            parts.append(f"the window of {self._window['column']} from {first} to {last}")
        if "sampled" in self.content:
            parts.append(f"a sample of {100 * self.content['sampled']['share']:g}%")
        return ", ".join(parts)

    @property
    def _window(self) -> dict[str, Any]:
        window: dict[str, Any] = self.content.get("window", {})
        # The window of counts that `oper synth` drew does not refer to a log.
        return window if "column" in window or "from_sample" in window else {}

    def _sampled(self, position: int, samples: int) -> NDArray[np.bool_]:
        if "sampled" not in self.content:
            return np.ones(samples, dtype=bool)
        return Sampling(**self.content["sampled"]).chosen(position, samples)

    def _within(self, batch: Batch, position: int) -> NDArray[np.bool_]:
        window = self._window
        if not window:
            return np.ones(batch.samples, dtype=bool)
        if "column" not in window:
            sample = np.arange(position, position + batch.samples)
            return (sample >= window["from_sample"]) & (sample < window["to_sample"])
        if batch.plain_time and "from" in window:
            raise OperError(
                f"{batch.location.of(0)}: column {window['column']!r} has plain numbers, and the "
                "profile's window was of times: it is another log"
            )
        every, number = self._span(batch)
        windows = np.floor(checked_times(batch, window["column"]) / every)
        return np.asarray(windows == number)

    def _span(self, batch: Batch) -> tuple[float, float]:
        """Return the length of a window of times, in the unit of a batch's times, and its
        number."""
        window = self._window
        if "every" in window:
            return float(window["every"]), float(window["number"])
        # Older profiles have only the bounds, which may be rounded.
        scale = 1 if batch.plain_time else PER_SECOND[self.content.get("time_unit") or "s"]
        first, last = window["from_value"] / scale, window["to_value"] / scale
        if not 0 < last - first < np.inf:
            raise OperError(
                f"the window of {window['column']!r} from {first} to {last}: cannot be told from "
                "others by its rounded bounds; profile the log again, and make the plan again"
            )
        return last - first, float(np.round(first / (last - first)))


def replay(folder: Path | str, rows_read: Iterable[tuple[int, Ints]]) -> list[Finding]:
    """Replay the rows that a log reads, as (table number, rows int64 [N]) in any order.

    The reads that each owner serves must equal the plan's figures exactly, if the log is the one
    that the plan's profile counted.
    """
    plan = Plan.load(folder)
    maps = RankMaps(plan, folder)
    served = np.zeros(plan.ranks, dtype=np.int64)
    replicated = 0
    for table, rows in rows_read:
        for chunk in maps.chunks(table, rows):
            held = chunk.copies >> SLOT_BITS == LOCAL
            single = held.sum(axis=0) == 1
            served += np.bincount(held[:, single].argmax(axis=0), minlength=plan.ranks)
            replicated += int(len(single) - single.sum())
    wrong = None
    if replicated != plan.replica_accesses or (served != plan.owner_accesses).any():
        worst = int(np.abs(served - plan.owner_accesses).argmax())
        wrong = (
            f"rank {worst} serves {served[worst]:,} reads of rows it alone holds, and the plan "
            f"says {plan.owner_accesses[worst]:,}; {replicated:,} reads are of replicated rows, "
            f"and the plan says {plan.replica_accesses:,}; is it the log that was profiled?"
        )
    part = str(LogPart(plan.log_part))
    read = f"the log ({part})" if part else "the log"
    return [Finding(f"a replay of {read} serves what the plan says, to the row", wrong)]


def _reader(
    plan: Plan, folder: Path | str, log: Sequence[Path], given: LogOptions, part: LogPart
) -> RowReader:
    """Return a reader of the plan's features in a log, of which `part` was profiled."""
    for path in log:
        if (path / PROFILE_MARKER).is_file():
            raise OperError(f"{path}: expected the log that was profiled, got a profile")
    options = part.options(given)
    if not options.columns:
        features = [name for table in plan.tables for name in table.features or (table.name,)]
        options = replace(options, columns=tuple(features))
    try:
        return RowReader(open_log(log, options), Prepared.load(plan.tables, folder))
    except NoSuchColumnError as error:
        if given.columns:
            raise
        raise OperError(
            f"{', '.join(map(str, log))}: has no column {error.wanted!r}, which the plan's profile "
            f"read; {error.known}; give the log that was profiled"
        ) from error


def _of_its_ids(reader: RowReader) -> Iterator[Batch]:
    """Yield the batches of a log; raise OperError if an id is unknown to the plan."""
    try:
        yield from reader.batches(ids_only=True)
    except BadIdError as error:
        raise OperError(
            f"{error.found}; the log of the plan's profile has no such ids: give that one; if "
            f"such ids were skipped there, {option('--on-bad-id', 'skip')}"
        ) from error


def rows_of_log(
    folder: Path | str,
    log: Sequence[Path],
    options: LogOptions,
    watch: Callable[[int, Jagged], None] = lambda table, ids: None,
) -> Iterator[tuple[int, Ints]]:
    """Yield the input of `replay` from the files of a log, by the plan's id rules. `watch` is
    called with each table's number and the bags whose rows come next.

    Read the plan's features unless `options` names columns, and the part of the log that was
    profiled unless `options` names rows. Raise OperError if the part has another number of samples
    than were profiled.
    """
    plan = Plan.load(folder)
    part = LogPart(plan.log_part if options.rows is None else {})
    reader = _reader(plan, folder, log, options, part)
    samples = 0
    for batch in part.batches(_of_its_ids(reader)):
        samples += batch.samples
        for key, table in reader.tables_of.items():
            watch(table, batch.features[key])
            yield table, batch.features[key].values
    if samples != plan.samples:
        counted = "" if options.rows is None else f" of {option('--rows')}"
        where = f" ({part})" if str(part) else counted
        unknown = "" if plan.log_part else "; if its profile is a sum, the parts are not known"
        raise OperError(
            f"{', '.join(map(str, log))}: has {samples:,} samples{where}, and the plan's profile "
            f"counted {plan.samples:,}: it is another log, or another part of it; give the log "
            f"that was profiled, or the part with {option('--rows')}{unknown}"
        )
