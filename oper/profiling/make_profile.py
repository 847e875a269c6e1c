"""`oper.profile`: from a log to its profile or those of its windows, in memory or in a folder."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from oper.base.defaults import DEADLINE, DIM, DTYPE, EVERY, MAX_WINDOWS, OPTIMIZER, RANKS
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.base.units import parse_bytes, parse_seconds, parse_share
from oper.files.storage import atomic_folder
from oper.logs.batches.log_options import LogKeywords, LogOptions, TimeUnit
from oper.logs.log import Log, open_log
from oper.logs.row_reader import RowReader
from oper.logs.table_discovery import tell_left_out
from oper.profiling.counting import Advance, CountOptions, count, provenance
from oper.profiling.profile import (
    FORMAT,
    Profile,
    in_order,
    window_name,
    with_held_out,
    write_windows,
)
from oper.profiling.row_counters import free_memory_bytes
from oper.profiling.sampling import Sampling
from oper.profiling.table_options import TableOptions
from oper.profiling.windows import (
    EqualWindows,
    HeldOutWindows,
    Windows,
    find_time_windows,
    refuse_too_many,
)

# Called with the name of a stage and the samples that it reads (None: unknown), and entered while
# the stage runs; it yields a function to call with the number of samples read since.
Progress = Callable[[str, int | None], AbstractContextManager[Advance]]


@contextmanager
def _no_progress(stage: str, samples: int | None) -> Iterator[Advance]:
    yield lambda read: None


class _Options(LogKeywords, total=False):
    """Keywords of `profile` that do not decide its return type, for type checkers."""

    dim: int
    dtype: str
    optimizer: str
    ids: str | None
    min_count: int
    batch_size: int | None
    ranks: int
    every: str | float
    time_unit: TimeUnit | None
    max_windows: int
    hold_out: str | float | None
    sample: str | float | None
    seed: int
    memory_limit: str | int | None
    overwrite: bool
    deadline: str | float
    progress: Progress


@overload
def profile(
    log: Any,
    tables: Any = ...,
    output: Path | str | None = ...,
    *,
    windows: None = ...,
    by_column: None = ...,
    under_torchrun: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Profile: ...


@overload
def profile(
    log: Any,
    tables: Any = ...,
    output: Path | str | None = ...,
    *,
    windows: int | None = ...,
    by_column: str | None = ...,
    under_torchrun: Literal[False] = ...,
    **options: Unpack[_Options],
) -> list[Profile]: ...


@overload
def profile(
    log: Any,
    tables: Any = ...,
    output: Path | str | None = ...,
    *,
    windows: int | None = ...,
    by_column: str | None = ...,
    under_torchrun: bool,
    **options: Unpack[_Options],
) -> Profile | list[Profile] | None: ...


def profile(
    log: Any,
    tables: Any = None,
    output: Path | str | None = None,
    *,
    dim: int = DIM,
    dtype: str = DTYPE,
    optimizer: str = OPTIMIZER,
    ids: str | None = None,
    min_count: int = 1,
    batch_size: int | None = None,
    ranks: int = RANKS,
    windows: int | None = None,
    by_column: str | None = None,
    every: str | float = EVERY,
    time_unit: TimeUnit | None = None,
    max_windows: int = MAX_WINDOWS,
    hold_out: str | float | None = None,
    sample: str | float | None = None,
    seed: int = 0,
    memory_limit: str | int | None = None,
    overwrite: bool = False,
    under_torchrun: bool = False,
    deadline: str | float = DEADLINE,
    progress: Progress = _no_progress,
    **reading: Unpack[LogKeywords],
) -> Profile | list[Profile] | None:
    """Count exactly how often each row is accessed in a log, as `oper profile` does.

    Args:
        log: files of the log or folders of them, in order; or any iterable of batches that hold
            TorchRec's `KeyedJaggedTensor`s.
        tables: a list of `oper.Table`s or of TorchRec's configs, a module with TorchRec embedding
            collections, a file of tables, the name of a published data set, or a profile, a plan
            or the folder of either, whose tables, id rules and vocabularies are used. None: one
            table for each column of ids, which reads the log twice.
        output: the profile's folder, to be written; None: the profile is in memory alone.
        dim, dtype, optimizer, ids, min_count: of tables that do not state them, of a file or
            inferred. `ids` says how values become rows: "dense", "vocab" or "hash:ROWS";
            `min_count` leaves rarer values out of vocabularies.
        batch_size, ranks: measure how many distinct rows one of `ranks` ranks, and all together,
            read for a batch of `batch_size` samples over all of them. With `sample`, `ranks` are
            those of the estimated error of a balance.
        windows: a profile for each of so many equal parts of the log.
        by_column, every, time_unit: a profile for each span `every` ("1d", "12h", or seconds) of a
            column of times, whose numbers are in `time_unit` since 1970 (None: guessed, and told by
            an `OperNotice`).
        max_windows: stop before counting if there would be more.
        hold_out: count the last part of the log, this share of its samples ("20%" or 0.2), in a
            profile of its own (`Profile.following`), on which plans are priced and not made.
        sample, seed: count only this share of the samples ("1%" or 0.01), chosen by the seed.
        memory_limit: bytes of counters in memory ("8GB"); with `output` the rest are in mapped
            files of it. None: half of the free memory.
        overwrite: replace a profile at `output`, if its folder holds nothing else.
        under_torchrun: count on all ranks that torchrun started, each some of the files; rank 0
            sums the counts, writes `output` and returns the profile, the others return None.
        deadline: how long such a rank waits for the others, as "1h" or in seconds.
        progress: shows how far each stage is.
        reading: how to read files, by the names of the command's options: columns, dense, label,
            missing, rows, values, lengths, no_header, delimiter, list_separator, on_bad_id.

    Returns:
        The profile; with `windows` or `by_column` a list of profiles, one for each window.

    Raises:
        OperError: the log is empty or damaged, an id is not a row of its table, an option is out of
            range, or `output` is taken or cannot be written.
    """
    seconds = parse_seconds(str(deadline), option("--deadline"))
    read = LogOptions.of(reading)
    if by_column is not None:
        read = replace(read, time=by_column, time_unit=time_unit)
    stated = TableOptions(tables, dim, dtype, optimizer, ids, min_count)
    asked = CountOptions(
        sampling=None
        if sample is None
        else Sampling(parse_share(str(sample), option("--sample")), seed),
        batch_size=batch_size,
        ranks=ranks,
        limit_bytes=_limit_bytes(memory_limit, output),
        max_windows=max_windows,
    )
    if under_torchrun:
        if windows is not None or by_column is not None or hold_out is not None:
            raise OperError(
                f"{option('--windows')}, {option('--by-column')} and {option('--hold-out')}: work "
                "in one process only, not under torchrun"
            )
        if output is None:
            raise OperError("output: expected the folder to write, under torchrun, got None")
        # It is imported here because it imports torch.distributed.
        from oper.profiling.distributed_counting import count_under_torchrun

        summed = count_under_torchrun(log, read, stated, asked, Path(output), seconds, overwrite)
        if summed is not None:
            tell_left_out(summed.left_out)
        return summed
    opened = open_log(log, read)
    with atomic_folder(output, FORMAT, overwrite) if output else nullcontext() as folder:
        if hold_out is None:
            opened, log_windows = _windows(
                opened, windows, by_column, str(every), max_windows, progress
            )
        else:
            if windows is not None or by_column is not None:
                raise OperError(
                    f"{option('--hold-out')}: plans for a window are priced on the next one; leave "
                    f"it out with {option('--windows')} and {option('--by-column')}"
                )
            held_out = parse_share(str(hold_out), option("--hold-out"))
            log_windows = HeldOutWindows(held_out, _samples(opened))
        with progress("finding the tables", opened.estimated_samples()) as advance:
            prepared = stated.prepare(opened, advance)
        asked = replace(asked, windows=log_windows, source=provenance(opened, prepared.left_out))
        with progress("counting", opened.estimated_samples()) as advance:
            counted = count(
                RowReader(opened, prepared),
                asked,
                prepared=prepared,
                folder=folder,
                advance=advance,
            )
        in_windows = log_windows is not None and hold_out is None
        if hold_out is not None:
            counted = [_with_held_out(counted, option("--hold-out", hold_out))]
        in_order(counted)
        if folder is not None:
            prepared.save_vocabularies(folder)
            _write(folder, counted, in_windows)
    tell_left_out(counted[0].left_out)
    return counted if in_windows else counted[0]


def _with_held_out(counted: list[Profile], asked: str) -> Profile:
    """Return the profile of a log's first part, which knows the last one."""
    if len(counted) != 2:
        raise OperError(
            f"{asked} with {option('--sample')}: no sample of one of the parts was chosen; use "
            "larger shares"
        )
    return with_held_out(*counted)


def _windows(
    log: Log,
    windows: int | None,
    by_column: str | None,
    every: str,
    most: int,
    progress: Progress,
) -> tuple[Log, Windows | None]:
    """Return the log as its windows need it, and the windows that are asked for."""
    if by_column is not None:
        if windows is not None:
            raise OperError(f"{option('--windows')} and {option('--by-column')}: give one of them")
        with progress("finding the windows", log.estimated_samples()) as advance:
            return find_time_windows(log, every, most, advance=advance)
    if windows is None:
        return log, None
    refuse_too_many(windows, most, option("--windows", windows))
    return log, EqualWindows(windows, _samples(log))


def _samples(log: Log) -> int:
    """Return the number of samples that are read of a log, counting them if the log does not
    say."""
    if log.samples is not None:
        return log.samples
    total = log.count_samples()
    first, last = log.options.row_range(total)
    return min(total, total if last is None else last) - first


def _limit_bytes(given: str | int | None, output: Path | str | None) -> int | None:
    """Return the limit on counters in memory, in bytes; None: no limit."""
    if output is None:
        if given is not None:
            raise OperError(
                f"{option('--memory-limit', given)}: without a folder to write (output), all "
                "counters are in memory; give one, or leave the limit out"
            )
        return None
    return (
        free_memory_bytes() // 2
        if given is None
        else parse_bytes(str(given), option("--memory-limit"))
    )


def _write(folder: Path, counted: list[Profile], in_windows: bool) -> None:
    """Write the profile, or the windows, into a folder that is being written."""
    if not in_windows:
        counted[0].write(folder)
        return
    for number, window in enumerate(counted):
        (folder / window_name(number)).mkdir(exist_ok=True)
        window.write(folder / window_name(number), sparse=True)
    write_windows(folder, counted)
