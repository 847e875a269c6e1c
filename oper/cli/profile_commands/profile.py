"""`oper profile`: count how often each row is accessed in a log."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from oper.base.defaults import DEADLINE, EVERY, MAX_WINDOWS, RANKS
from oper.base.errors import OperError
from oper.cli.profile_commands.profile_text import OUTPUT, report_written
from oper.cli.profile_commands.table_arguments import (
    DIM,
    DTYPE,
    IDS,
    MIN_COUNT,
    OPTIMIZER,
    TABLES,
    Dtype,
    Optimizer,
)
from oper.cli.shared.command import ADVANCED, WINDOWS, ConfigurableCommand
from oper.cli.shared.console import warn_of_unused
from oper.cli.shared.log_arguments import takes_log
from oper.cli.shared.output_options import FORCE, JSON
from oper.cli.shared.progress import progress

if TYPE_CHECKING:
    from oper.logs import LogKeywords

# These sub-commands of `oper profiles` were once `oper profile show` and `oper profile merge`.
_OF_PROFILES = ("show", "merge")


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
        RANKS,
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
    ),
    by_column: str | None = typer.Option(
        None,
        "--by-column",
        help="One profile for each day, or other --every, of this column of times.",
        metavar="NAME",
    ),
    every: str = typer.Option(
        EVERY,
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
        MAX_WINDOWS,
        "--max-windows",
        min=1,
        help="Stop before counting if there would be more windows.",
        metavar="N",
        rich_help_panel=WINDOWS,
    ),
    hold_out: str | None = typer.Option(
        None,
        "--hold-out",
        help="Hold out the last SHARE of the log to judge plans on, e.g. 20%.",
        metavar="SHARE",
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
        DEADLINE,
        "--deadline",
        help="Under torchrun: how long a rank waits for the others.",
        metavar="SPAN",
        rich_help_panel=ADVANCED,
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
    *,
    reading: "LogKeywords",
) -> None:
    """Count exactly how often each row is accessed.

    Under torchrun each rank counts some of the files, and rank 0 sums the counts.
    """
    from oper.base import native
    from oper.profiling.make_profile import profile as count

    native.ops()  # It loads torch, which takes a second that is not part of the measured time.
    started = time.perf_counter()
    needs = {"every": "by_column", "ranks": "batch_size", "seed": "sample"}
    needs |= {"time_unit": "by_column", "max_windows": "by_column" if by_column else "windows"}
    warn_of_unused(context, needs)
    counted = count(
        log,
        tables,
        output,
        dim=dim,
        dtype=dtype,
        optimizer=optimizer,
        ids=ids,
        min_count=min_count,
        batch_size=batch_size,
        ranks=ranks,
        windows=windows,
        by_column=by_column,
        every=every,
        time_unit=time_unit,
        max_windows=max_windows,
        hold_out=hold_out,
        sample=sample,
        seed=seed,
        memory_limit=memory_limit,
        overwrite=force,
        under_torchrun=int(os.environ.get("WORLD_SIZE", "1")) > 1,
        deadline=deadline,
        progress=_bar,
        **reading,
    )
    if counted is not None:  # Rank 0 reports for all ranks.
        profiles = counted if isinstance(counted, list) else [counted]
        report_written(output, profiles, time.perf_counter() - started, as_json)


@contextlib.contextmanager
def _bar(stage: str, samples: int | None) -> Iterator[Callable[[int], None]]:
    with progress(stage, samples, "samples") as meter:
        yield meter.advance
