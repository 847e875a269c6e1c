"""Count a log into profiles, in one pass, with the memory of the counters and one batch.

The pass may count a sample of the log, cut it into windows with a profile each, and measure the
distinct rows of batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.defaults import MAX_WINDOWS, RANKS
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.workload import Workload
from oper.logs.batches.batch import Batch, Jagged
from oper.logs.batches.log_options import LogOptions
from oper.logs.log import Log
from oper.logs.row_reader import RowReader
from oper.logs.table_discovery import Prepared
from oper.profiling.distinct_rows import DistinctSums
from oper.profiling.profile import Profile, itself
from oper.profiling.row_counters import Memory, RowCounters
from oper.profiling.sampling import RankShares, Sampling, sampling_error
from oper.profiling.windows import EqualWindows, Windows, refuse_too_many
from oper.topology.capacity import MAX_RANKS

Advance = Callable[[int], None]


@dataclass
class CountOptions:
    """Parts of a log to count, and measurements to make in the same pass.

    sampling: count a sample of the samples, and estimate the error of a balance over `ranks`.
    windows: a profile for each, at most `max_windows`. batch_size, ranks: measure the distinct rows
    of batches (distinct_rows.py). limit_bytes: counters beyond it are in files. source: the
    provenance to store in the profiles.
    """

    sampling: Sampling | None = None
    windows: Windows | None = None
    batch_size: int | None = None
    ranks: int = RANKS
    limit_bytes: int | None = None
    source: dict[str, Any] = field(default_factory=dict)
    max_windows: int = MAX_WINDOWS

    def __post_init__(self) -> None:
        if isinstance(self.windows, EqualWindows):
            windows = self.windows.count
            refuse_too_many(windows, self.max_windows, option("--windows", windows))
        if not 1 <= self.ranks <= MAX_RANKS:
            raise OperError(f"{option('--ranks', self.ranks)}: expected 1 to {MAX_RANKS:,} ranks")
        if self.batch_size is not None:
            Workload("inference", "distinct", self.batch_size)  # It refuses invalid batch sizes.
        if self.sampling and self.batch_size:
            raise OperError(
                f"{option('--sample')} with {option('--batch-size')}: batches of a sample are not "
                "batches of the log; measure distinct rows on the whole log, or on a part of it by "
                f"{option('--rows')}"
            )


def count(
    reader: RowReader,
    options: CountOptions | None = None,
    *,
    prepared: Prepared | None = None,
    folder: Path | None = None,
    advance: Advance = lambda samples: None,
) -> list[Profile]:
    """Count a log: its profile, or one for each window, in order.

    `folder`, which is being written, takes counters that do not fit in memory (those of windows in
    folders below it). `advance` is called with the number of samples read.
    """
    options = options or CountOptions()
    memory = Memory(options.limit_bytes)
    tallies: dict[int, _Tally] = {}
    for window, batch in _chosen(reader.batches(ids_only=True), options, advance):
        if window not in tallies:
            refuse_too_many(len(tallies) + 1, options.max_windows, "the log")
            inner = folder
            if folder is not None and options.windows:
                # It is named by order of appearance until the order of the windows is known.
                inner = folder / f"counted-{len(tallies)}"
            first = options.windows.first_part(window) if options.windows else None
            tallies[window] = _Tally(reader, options, memory, inner, first)
        tallies[window].add(batch)
    if not tallies:
        raise OperError(
            f"{option('--sample', options.sampling.share if options.sampling else 1)}: selected no "
            "sample of the log; use a larger share"
        )
    profiles = []
    for number, window in enumerate(sorted(tallies)):
        tally = tallies[window]
        source = dict(options.source)
        if reader.skipped:
            source["skipped_ids"] = reader.skipped
        if options.windows:
            source["window"] = options.windows.describe(window)
            if tally.folder is not None and folder is not None and tally.folder.exists():
                _move(tally.folder, folder / options.windows.folder(number))
        profiles.append(tally.profile(source, prepared))
    return profiles


def _move(counted: Path, into: Path) -> None:
    """Rename a folder of counters, or the files in it if the other folder exists."""
    if not into.exists():
        counted.replace(into)
        return
    for file in counted.iterdir():
        file.replace(into / file.name)
    counted.rmdir()


def provenance(log: Log, left_out: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the provenance of a profile: the files' names, options that are not the default, and,
    for columns in no table, the reason."""
    default = asdict(LogOptions())
    options = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(log.options).items()
        if value != default[name]
    }
    source: dict[str, Any] = {
        "files": [Path(name).name for name in log.names],
        "options": options,
    }
    return source | ({"left_out": dict(left_out)} if left_out else {})


class _Tally:
    """Counters of one window, and its distinct rows if they are measured."""

    def __init__(
        self,
        reader: RowReader,
        options: CountOptions,
        memory: Memory,
        folder: Path | None,
        first_samples: int | None,
    ) -> None:
        self.folder = folder
        self._table_of = reader.tables_of
        self._counters = RowCounters(reader.tables, memory, folder)
        self._distinct = (
            DistinctSums(options.batch_size, options.ranks, len(reader.tables))
            if options.batch_size
            else None
        )
        self._sampling = options.sampling
        self._shares = RankShares(options.ranks) if options.sampling else None
        # Samples after which the counts so far are the first part; 0: there are no parts.
        self._first_samples = first_samples or 0
        if options.sampling:
            self._first_samples = round(self._first_samples * options.sampling.share)
        self._first_part: Profile | None = None

    def add(self, batch: Batch) -> None:
        self._count(batch)
        if self._shares:
            self._shares.add(batch, self._table_of)
        if self._distinct:
            self._distinct.add(batch, self._table_of)

    def _count(self, batch: Batch) -> None:
        """Count a batch, and keep the counts of the window's first part."""
        left = self._first_samples - self._counters.samples
        if self._first_samples and self._first_part is None and left < batch.samples:
            if left:
                self._counters.add(batch.slice(0, left), self._table_of)
            self._first_part = self._counters.snapshot()
            batch = batch.slice(left, batch.samples)
        self._counters.add(batch, self._table_of)

    def profile(self, source: dict[str, Any], prepared: Prepared | None) -> Profile:
        profile = self._counters.profile(source, prepared)
        if self._first_part is not None:
            first = replace(self._first_part, vocabularies=prepared)
            profile.open_first_part = partial(itself, first)
        if self._distinct:
            profile.distinct = self._distinct.against(profile)
        if self._sampling and self._shares:
            error = sampling_error(profile, self._sampling, self._shares)
            profile.source["sampled"] = error.to_dict()
        return profile


def _chosen(
    batches: Iterable[Batch], options: CountOptions, advance: Advance
) -> Iterator[tuple[int, Batch]]:
    """Yield the batches, cut at the ends of windows, each with its window; sampled if asked."""
    # The place of the batch's first sample in the log decides its window and whether it is counted.
    position = 0
    for batch in batches:
        chosen = np.ones(batch.samples, dtype=bool)
        if options.sampling:
            chosen = options.sampling.chosen(position, batch.samples)
        windows = np.zeros(batch.samples, dtype=np.int64)
        if options.windows:
            windows = options.windows.of(batch, position)
        for window in np.unique(windows[chosen]).tolist():
            yield window, take(batch, chosen & (windows == window))
        position += batch.samples
        advance(batch.samples)


def take(batch: Batch, chosen: NDArray[np.bool_]) -> Batch:
    """Return the samples of a batch of row ids for which `chosen` is true."""
    if chosen.all():
        return batch
    features = {
        key: Jagged(ids.values[chosen])
        if ids.lengths is None
        else Jagged(ids.values[np.repeat(chosen, ids.lengths)], ids.lengths[chosen])
        for key, ids in batch.features.items()
    }
    kept: dict[str, Any] = {"samples": int(chosen.sum()), "features": features}
    for name in ("label", "dense", "time"):
        array = getattr(batch, name)
        kept[name] = None if array is None else array[chosen]
    return replace(batch, **kept)
