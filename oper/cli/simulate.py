"""`oper simulate`: what caches of a host tier transmit, by dispatch, synchronisation, eviction."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oper.base.errors import OperError
from oper.base.formatting import format_duration, format_share, plural
from oper.base.units import parse_share
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
from oper.cli.shared.command import ADVANCED, TABLES_GROUP, ConfigurableCommand
from oper.cli.shared.console import emit, new_console, new_table
from oper.cli.shared.log_arguments import takes_log
from oper.cli.shared.output_options import JSON
from oper.cli.shared.progress import progress

if TYPE_CHECKING:
    from rich.table import Table

    from oper.logs import LogKeywords
    from oper.scheduler.simulator import SimulatedRun, Simulation


_EXAMPLES = """
oper simulate clicks.parquet --columns 'C*' --workers 4 --batch-size 256
oper simulate clicks.parquet --columns 'C*' --policy random,grouped \\
  --sync bsp,het --links 5,5,5,5,1,1,1,1
"""


def register(app: typer.Typer) -> None:
    """Add `oper simulate`."""
    app.command("simulate", cls=ConfigurableCommand, epilog=_EXAMPLES)(takes_log(simulate))


def simulate(
    log: list[Path] = typer.Argument(
        metavar="LOG", help="Files of the log, or folders of them, in order."
    ),
    workers: int = typer.Option(
        8, "--workers", min=1, max=64, help="Workers, each with a cache.", metavar="N"
    ),
    batch_size: int = typer.Option(
        1024,
        "--batch-size",
        min=1,
        help="Samples of a batch, over all workers; a multiple of --workers.",
        metavar="N",
    ),
    cache: str = typer.Option(
        "10%",
        "--cache",
        help="Share of all rows' bytes in each cache.",
        metavar="SHARE",
    ),
    policy: str = typer.Option(
        "random,laia,esd,grouped",
        "--policy",
        help="Dispatch: random, in-order, laia[:TABLES], esd[:ALPHA], grouped[:ROUNDS]; with "
        "@SHARE for a share of the samples; by commas.",
        metavar="NAMES",
    ),
    sync: str = typer.Option(
        "bsp,on-demand",
        "--sync",
        help="bsp, on-demand, peer, fae:SHARE, het[:S], het-exact:S (S updates or inf); by commas.",
        metavar="NAMES",
    ),
    evict: str = typer.Option(
        "lru", "--evict", help="lru, lfu, light-lfu, emark; by commas.", metavar="NAMES"
    ),
    links: str = typer.Option(
        "100",
        "--links",
        help="Gbit/s to the tier, or by worker: 5,1.",
        metavar="RATES",
    ),
    warm_up: int = typer.Option(
        10,
        "--warm-up",
        min=0,
        help="Iterations at the start that are not counted.",
        metavar="N",
        rich_help_panel=ADVANCED,
    ),
    seed: int = typer.Option(
        0, "--seed", min=0, help="Seed of random choices.", metavar="N", rich_help_panel=ADVANCED
    ),
    tables: str | None = TABLES,
    dim: int = DIM,
    dtype: Dtype = DTYPE,
    optimizer: Optimizer = typer.Option(
        "sgd",
        *OPTIMIZER.param_decls,
        help=OPTIMIZER.help,
        metavar=OPTIMIZER.metavar,
        rich_help_panel=TABLES_GROUP,
    ),
    ids: str | None = IDS,
    min_count: int = MIN_COUNT,
    as_json: bool = JSON,
    *,
    reading: "LogKeywords",
) -> None:
    """Simulate caches on a log; count the rows that they move."""
    from oper.logs import LogOptions, RowReader, open_log
    from oper.logs.table_discovery import tell_left_out
    from oper.profiling.table_options import TableOptions
    from oper.scheduler.simulator import Methods, SimulationSettings, replay
    from oper.scheduler.trace import Trace

    settings = SimulationSettings(
        workers, batch_size, parse_share(cache, "--cache"), _bandwidths(links), warm_up, seed
    )
    methods = Methods.parse(policy, sync, evict)
    stated = TableOptions(tables, dim, dtype, optimizer, ids, min_count)
    opened = open_log(log, LogOptions.of(reading))
    with progress("reading", opened.estimated_samples(), "samples") as meter:
        prepared = stated.prepare(opened, meter.advance)
    tell_left_out(prepared.left_out)
    trace = Trace(RowReader(opened, prepared), settings.batch_size)
    with progress("replaying", opened.estimated_samples(), "samples") as meter:
        found = replay(trace, settings, methods, meter.advance)
    content = {"log": [str(path) for path in log], **found.to_json()}
    emit(as_json, content, lambda: _print(found))


def _bandwidths(links: str) -> tuple[float, ...]:
    """Return bytes per second of links in Gbit/s."""
    try:
        given = [float(text) for text in links.split(",")]
    except ValueError:
        given = [math.nan]
    if not all(map(math.isfinite, given)):
        raise OperError(
            f"--links {links[:60]!r}: expected Gbit/s separated by commas, such as 5,5,0.5"
        )
    return tuple(number * 1e9 / 8 for number in given)


def _print(found: "Simulation") -> None:
    out, settings, runs = new_console(), found.settings, found.runs
    out.print(
        f"{settings.workers} workers, batches of {settings.batch_size:,} samples "
        f"({settings.samples_per_worker:,} a worker), caches of {sum(found.cache_rows):,} of "
        f"{found.rows:,} rows"
    )
    out.print(f"{plural(found.iterations, 'iteration')} after {settings.warm_up} of warm-up")
    if len(runs) > 1:
        out.print(least_sent(found))
    exact = {name: run for name, run in runs.items() if run.exact}
    others = {name: run for name, run in runs.items() if not run.exact}
    if exact:
        out.print()
        out.print(_table(found, exact, "wrong\nreads", _wrong_reads))
    if others:
        out.print()
        out.print("Not exact: reads may lack updates of earlier iterations")
        out.print(_table(found, others, "reads that\nlack updates", _risk))
    tier = " and the tier" if not _to_peers(found) else ", the tier and workers among themselves"
    out.print(
        f"sent: rows and gradients that caches{tier} send and get, the sum of pulls and pushes; "
        f"saved: against {_shown(_reference(found))}; hits: reads that a cache served; ms a batch: "
        "to dispatch and replay it here"
    )


def _table(
    found: "Simulation",
    runs: "dict[str, SimulatedRun]",
    last: str,
    risk: "Callable[[SimulatedRun], str]",
) -> "Table":
    """Return a line for each of some runs, which ends with what its reads lack and with the
    time."""
    peers = _to_peers(found)
    pushes = ["update\npush", "evict\npush", *(["peer\npush"] if peers else [])]
    columns = ("sent", "saved", "miss\npull", *pushes, "hits", "link\ntime")
    table = new_table("dispatch, sync", *columns, last, "ms a\nbatch")
    first = found.runs[_reference(found)].total
    for name, run in runs.items():
        table.add_row(
            _shown(name),
            f"{run.total:,}",
            format_share(1 - run.total / first, 1) if first else "-",
            f"{run.miss_pull:,}",
            f"{run.update_push:,}",
            f"{run.evict_push:,}",
            *([f"{run.peer_push:,}"] if peers else []),
            format_share(run.hit_ratio or 0.0, 1),
            format_duration(run.cost_seconds),
            risk(run),
            f"{run.dispatch.total:.2f}",
        )
    return table


def _to_peers(found: "Simulation") -> bool:
    """Return whether a run sends rows straight to other workers, by `peer` or FAE's AllReduce."""
    return any(run.peer_push for run in found.runs.values())


def _wrong_reads(run: "SimulatedRun") -> str:
    return f"{run.wrong_reads:,}"


def _risk(run: "SimulatedRun") -> str:
    share = format_share(run.wrong_read_ratio or 0.0, 1)
    return f"{share}, ≤ {run.most_lag:,}" if run.wrong_reads else share


def _shown(name: str) -> str:
    return name.replace("+", " ")


def _reference(found: "Simulation") -> str:
    """Return the run that others are compared with: the first exact run, or the first."""
    exact = [name for name, run in found.runs.items() if run.exact]
    return exact[0] if exact else next(iter(found.runs))


def least_sent(found: "Simulation") -> str:
    """Return the exact run that sends the least, its saving over the first exact run, and any run
    with staleness that sends less, with its risk."""
    reference, best = _reference(found), found.least_sent
    of_all = found.least_sent_of_all
    if best is None:
        return f"None is exact; least is sent by {_shown(of_all)}, {_risk_of(found, of_all)}"
    sentence = f"Least is sent by {_shown(best)}"
    total = found.runs[best].total
    if best == reference:
        sentence += ", the first"
    else:
        saved = format_share(1 - total / found.runs[reference].total, 1)
        sentence += f": {saved} less than by {_shown(reference)}"
    if of_all == best or found.runs[of_all].total == total:
        return sentence
    less = format_share(1 - found.runs[of_all].total / total, 1)
    sentence += "." if best != reference else ", of the exact ones."
    return f"{sentence} {_shown(of_all)} sends {less} less than that, {_risk_of(found, of_all)}"


def _risk_of(found: "Simulation", name: str) -> str:
    run = found.runs[name]
    if not run.wrong_reads:
        return "and no read lacked an update here, which nothing guarantees"
    return (
        f"and {format_share(run.wrong_read_ratio or 0.0, 1)} of its reads lack an update, up to "
        f"{run.most_lag:,} of them"
    )
