"""`oper profile`: count how often each row is accessed in a log."""

import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from oper.base.errors import OperError
from oper.base.units import parse_bytes, parse_seconds, parse_share
from oper.cli.profile_commands.report import OUTPUT, report
from oper.cli.profile_commands.table_options import (
    DIM,
    DTYPE,
    IDS,
    MIN_COUNT,
    OPTIMIZER,
    TABLES,
    Dtype,
    Optimizer,
    TableOptions,
)
from oper.cli.shared.command import ADVANCED, WINDOWS, ConfigurableCommand
from oper.cli.shared.console import say, warn_of_unused
from oper.cli.shared.log_options import takes_log
from oper.cli.shared.output_options import FORCE, JSON
from oper.cli.shared.progress import progress

if TYPE_CHECKING:
    from oper.logs import Log, LogOptions
    from oper.profiling.profile import Profile
    from oper.profiling.windows import Windows


_OF_PROFILES = ("show", "merge")  # which were `oper profile show` and `oper profile merge`


_EXAMPLES = """
oper profile clicks.parquet -o profile --columns 'C*'
oper profile clicks.parquet -o windows --columns 'C*' --windows 4
"""


class _Profile(ConfigurableCommand):
    """The command, which knows the sub-commands that it once had."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] in _OF_PROFILES and not Path(args[0]).exists():
            raise OperError(
                f"oper profile {args[0]}: no such file; to {args[0]} profiles, type "
                f"`{shlex.join(['oper', 'profiles', *args])}`"
            )
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Add `oper profile`."""
    app.command("profile", cls=_Profile, epilog=_EXAMPLES)(takes_log(profile))


def profile(
    context: typer.Context,
    log: list[Path] = typer.Argument(
        metavar="LOG", help="Files of the log, or folders of them, in order."
    ),
    output: Path = OUTPUT,
    tables: str | None = TABLES,
    dim: int = DIM,
    dtype: Dtype = DTYPE,
    optimizer: Optimizer = OPTIMIZER,
    ids: str | None = IDS,
    min_count: int = MIN_COUNT,
    batch_size: int | None = typer.Option(
        None,
        "--batch-size",
        min=1,
        help="Measure the distinct rows of batches of this many samples.",
        metavar="N",
        rich_help_panel=ADVANCED,
    ),
    ranks: int = typer.Option(
        8,
        "--ranks",
        min=1,
        help="Ranks that share such a batch.",
        metavar="N",
        rich_help_panel=ADVANCED,
    ),
    windows: int | None = typer.Option(
        None,
        "--windows",
        min=1,
        help="One profile for each of N equal parts of the log.",
        metavar="N",
        rich_help_panel=WINDOWS,
    ),
    by_column: str | None = typer.Option(
        None,
        "--by-column",
        help="One profile for each --every of this column of times.",
        metavar="NAME",
        rich_help_panel=WINDOWS,
    ),
    every: str = typer.Option(
        "1d",
        "--every",
        help="The span of a window: 12h, 1d, 1w, or 3600.",
        metavar="SPAN",
        rich_help_panel=WINDOWS,
    ),
    time_unit: Literal["s", "ms", "us", "ns"] | None = typer.Option(
        None,
        "--time-unit",
        metavar="s|ms|us|ns",
        help="Unit of numbers in that column since 1970. [default: guessed and reported]",
        rich_help_panel=WINDOWS,
    ),
    max_windows: int = typer.Option(
        1000,
        "--max-windows",
        min=1,
        help="Stop before counting if there would be more windows.",
        metavar="N",
        rich_help_panel=WINDOWS,
    ),
    sample: str | None = typer.Option(
        None,
        "--sample",
        help="Count only this share of the samples: 1%.",
        metavar="SHARE",
        rich_help_panel=ADVANCED,
    ),
    seed: int = typer.Option(
        0,
        "--seed",
        min=0,
        help="Seed of the choice of samples.",
        metavar="N",
        rich_help_panel=ADVANCED,
    ),
    memory_limit: str | None = typer.Option(
        None,
        "--memory-limit",
        help="Bytes of counters in memory; the rest are in mapped files. [default: half of the "
        "free memory]",
        metavar="BYTES",
        rich_help_panel=ADVANCED,
    ),
    deadline: str = typer.Option(
        "1h",
        "--deadline",
        help="Under torchrun: how long a rank waits for the others.",
        metavar="SPAN",
        rich_help_panel=ADVANCED,
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
    *,
    log_options: "LogOptions",
) -> None:
    """Count exactly how often each row is accessed.

    Under torchrun each rank counts some of the files, and rank 0 sums the counts.
    """
    from oper.base import native
    from oper.profiling.counting import CountOptions
    from oper.profiling.sampling import Sampling

    deadline_seconds = parse_seconds(deadline, "--deadline")
    native.ops()  # loads torch, which takes a second that is not part of the measured time
    started = time.perf_counter()
    needs = {"every": "by_column", "ranks": "batch_size", "seed": "sample"}
    needs |= {"time_unit": "by_column", "max_windows": "by_column" if by_column else "windows"}
    warn_of_unused(context, needs)
    if by_column is not None:
        log_options = replace(log_options, time=by_column, time_unit=time_unit)
    stated = TableOptions(tables, dim, dtype, optimizer, ids, min_count)
    options = CountOptions(
        sampling=None if sample is None else Sampling(parse_share(sample, "--sample"), seed),
        batch_size=batch_size,
        ranks=ranks,
        limit_bytes=_limit_bytes(memory_limit),
        max_windows=max_windows,
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if windows is not None or by_column is not None:
            raise OperError(
                "--windows and --by-column: work in one process only, not under torchrun"
            )
        from oper.logs import open_log
        from oper.profiling.distributed_counting import count_under_torchrun

        if os.environ.get("RANK") == "0":  # which reports for all
            source = _left_out(open_log(log, log_options), stated)
            options = replace(options, source=source)
        summed = count_under_torchrun(
            log,
            log_options,
            stated.prepare,
            options,
            output,
            deadline_seconds,
            force,
        )
        if summed is None:
            return  # rank 0 reports for all
        counted = [summed]
    else:
        spans = (windows, by_column, every)
        counted = _count(log, log_options, stated, options, output, force, spans)
    report(output, counted, time.perf_counter() - started, as_json)


def _count(
    paths: list[Path],
    log_options: "LogOptions",
    stated: TableOptions,
    options: Any,
    output: Path,
    force: bool,
    window_options: tuple[int | None, str | None, str],
) -> "list[Profile]":
    """Count the log into the profile folder `output`, or its windows into folders below it."""
    from oper.files.storage import atomic_folder
    from oper.logs import RowReader, open_log
    from oper.profiling.counting import count, provenance
    from oper.profiling.profile import FORMAT, window_name, write_windows

    log = open_log(paths, log_options)
    with atomic_folder(output, FORMAT, force) as folder:
        log, found = _windows(log, options.max_windows, *window_options)
        with progress("finding the tables", log.estimated_samples(), "samples") as meter:
            prepared = stated.prepare(log, meter.advance)
        options = replace(options, windows=found, source=provenance(log) | _left_out(log, stated))
        with progress("counting", log.estimated_samples(), "samples") as meter:
            reader = RowReader(log, prepared)
            counted = count(
                reader, options, prepared=prepared, folder=folder, advance=meter.advance
            )
        prepared.save_vocabularies(folder)
        if options.windows is None:
            counted[0].write(folder)
        else:
            for number, profile in enumerate(counted):
                (folder / window_name(number)).mkdir(exist_ok=True)
                profile.write(folder / window_name(number), sparse=True)
            write_windows(folder, counted)
    return counted


def _windows(
    log: "Log", most: int, windows: int | None, by_column: str | None, every: str
) -> "tuple[Log, Windows | None]":
    """The log as its windows need it, and the windows that the options ask for."""
    from oper.profiling.windows import EqualWindows, find_time_windows, refuse_too_many

    if by_column is not None:
        if windows is not None:
            raise OperError("--windows and --by-column: give one of them")
        with progress("finding the windows", log.estimated_samples(), "samples") as meter:
            return find_time_windows(log, every, most, say=say, advance=meter.advance)
    if windows is None:
        return log, None
    refuse_too_many(windows, most, f"--windows {windows}")
    samples = log.samples
    if samples is None:
        total = log.count_samples()
        first, last = log.options.row_range(total)
        samples = min(total, total if last is None else last) - first
    return log, EqualWindows(windows, samples)


def _left_out(log: "Log", stated: TableOptions) -> dict[str, dict[str, str]]:
    """The columns that are in no table, where there are some, for the profile's source."""
    left_out = stated.left_out(log)
    return {"left_out": left_out} if left_out else {}


def _limit_bytes(given: str | None) -> int:
    from oper.profiling.count_batches import free_memory_bytes

    return free_memory_bytes() // 2 if given is None else parse_bytes(given, "--memory-limit")
