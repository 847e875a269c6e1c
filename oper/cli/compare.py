"""`oper compare`: memory, traffic, time and gap of each method's placement, side by side."""

import typer

from oper.base.defaults import LIMIT_SECONDS
from oper.base.errors import OperError
from oper.base.units import parse_share
from oper.cli.compare_text import print_runs
from oper.cli.shared.command import ADVANCED, ConfigurableCommand
from oper.cli.shared.console import emit
from oper.cli.shared.output_options import JSON, VERBOSE
from oper.cli.shared.plan_options import (
    BALANCE,
    BATCH_SIZE,
    CAPACITY,
    DOB,
    FETCH,
    MODE,
    RESERVE,
    TOPOLOGY,
    Balance,
    Fetch,
    Mode,
    load_topology,
    parse_reserve,
)
from oper.cli.shared.progress import progress
from oper.planner.baselines.registry import BASELINES

_EXAMPLES = """
oper compare profile --topology dgx-a100 --methods oper,table_wise,torchrec
oper compare profile --topology 2x4-a100 --mode inference \\
  --extra-memory 0,1,5% --methods oper,paper,table_wise,row_wise
"""


def register(app: typer.Typer) -> None:
    """Add `oper compare`."""
    app.command("compare", cls=ConfigurableCommand, epilog=_EXAMPLES)(compare)


def compare(
    profile: str = typer.Argument(
        metavar="PROFILE", help="A profile folder, or one of its windows: PROFILE@3."
    ),
    topology: str = TOPOLOGY,
    mode: Mode = MODE,
    fetch: Fetch | None = FETCH,
    batch_size: int = BATCH_SIZE,
    extra_memory: str | None = typer.Option(
        None,
        "--extra-memory",
        help="One or several shares: 0,1,2,5% makes a run for each. [default: what the devices "
        "hold; 5% with --capacity, on cpu:N, or without device memory]",
        metavar="SHARES",
    ),
    reserve: str | None = RESERVE,
    threshold: str = typer.Option(
        "0.1%",
        "--threshold",
        help="One or several shares: 5,1,0.1% makes a run for each.",
        metavar="SHARES",
        rich_help_panel=ADVANCED,
    ),
    dob: str = DOB,
    balance: Balance = BALANCE,
    capacity: str | None = CAPACITY,
    methods: str | None = typer.Option(
        None,
        "--methods",
        help=f"Of {', '.join(('oper', *BASELINES))}; by commas. [default: all]",
        metavar="NAMES",
    ),
    time_limit: float = typer.Option(
        LIMIT_SECONDS,
        "--time-limit",
        min=0.001,
        help="Seconds for the solver, building its programme included, and for TorchRec's planner.",
        metavar="SECONDS",
        rich_help_panel=ADVANCED,
    ),
    verbose: bool = VERBOSE,
    as_json: bool = JSON,
) -> None:
    """Compare OPER with the paper, simple rules, TorchRec, a solver."""
    from oper.cost.workload import Workload
    from oper.plan.settings import PlanSettings
    from oper.planner.compare import compare as compare_methods
    from oper.planner.compare import installed_methods, runs_to_json
    from oper.profiling.profile import Profile

    names = installed_methods() if methods is None else methods.split(",")
    ranks = load_topology(topology, capacity)
    kept = parse_reserve(reserve, extra_memory, ranks)
    shares = [None] if extra_memory is None else parse_shares(extra_memory, "--extra-memory")
    swept = [
        PlanSettings(extra, limit, parse_share(dob, "--dob"), balance, kept)
        for limit in parse_shares(threshold, "--threshold")
        for extra in shares
    ]
    workload = Workload(mode, fetch, batch_size)
    opened = Profile.load(profile, check=True)
    with progress("comparing", len(swept) * len(names), "methods") as meter:
        runs = [
            compare_methods(
                opened, ranks, workload, settings, names, time_limit, lambda done: meter.advance(1)
            )
            for settings in swept
        ]
    emit(as_json, runs_to_json(runs), lambda: print_runs(runs, profile, verbose))


def parse_shares(text: str, option: str) -> list[float]:
    """Return shares, `0,1,2%` -> [0, 0.01, 0.02]: a closing % is for all of them."""
    parts = [part.strip() for part in text.split(",")]
    if parts[-1].endswith("%"):
        parts = [part.removesuffix("%") + "%" for part in parts]
    if "" in parts or "%" in parts:
        raise OperError(f"{option} {text!r}: expected shares, such as 5% or 0,1,2%")
    return [parse_share(part, option) for part in parts]
