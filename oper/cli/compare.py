"""`oper compare`: memory, traffic, time and gap of each method's placement, side by side."""

from collections.abc import Iterable
from typing import Any

import typer

from oper.base.errors import OperError
from oper.base.units import parse_share
from oper.cli.shared.command import ADVANCED, ConfigurableCommand
from oper.cli.shared.console import emit, new_console, new_table
from oper.cli.shared.formatting import format_bytes, format_duration
from oper.cli.shared.output_options import JSON
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

_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


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
        60.0,
        "--time-limit",
        min=0.001,
        help="Seconds for the solver, and for TorchRec's planner.",
        metavar="SECONDS",
        rich_help_panel=ADVANCED,
    ),
    as_json: bool = JSON,
) -> None:
    """Compare OPER with the paper, simple rules, TorchRec, a solver."""
    from oper.cost.workload import Workload
    from oper.planner import compare as comparison
    from oper.planner.problem.problem import Settings
    from oper.profiling.profile import Profile

    names = methods.split(",") if methods else comparison.installed_methods()
    ranks = load_topology(topology, capacity)
    kept = parse_reserve(reserve, extra_memory, ranks)
    shares = [None] if extra_memory is None else parse_shares(extra_memory, "--extra-memory")
    swept = [
        Settings(extra, limit, parse_share(dob, "--dob"), balance, kept)
        for limit in parse_shares(threshold, "--threshold")
        for extra in shares
    ]
    workload = Workload(mode, fetch, batch_size)
    opened = Profile.open(profile, check=True)
    with progress("comparing", len(swept) * len(names), "methods") as meter:
        runs = [
            comparison.compare(
                opened, ranks, workload, settings, names, time_limit, lambda done: meter.advance(1)
            )
            for settings in swept
        ]
    emit(as_json, {"runs": runs}, lambda: print_runs(runs))


def parse_shares(text: str, option: str) -> list[float]:
    """`0,1,2%` -> [0, 0.01, 0.02]: a closing % is for all of them."""
    parts = [part.strip() for part in text.split(",")]
    if parts[-1].endswith("%"):
        parts = [part.removesuffix("%") + "%" for part in parts]
    if "" in parts or "%" in parts:
        raise OperError(f"{option} {text!r}: shares were needed, such as 5% or 0,1,2%")
    return [parse_share(part, option) for part in parts]


def print_runs(runs: list[dict[str, Any]]) -> None:
    """Print a table for each run, and remarks below it."""
    out = new_console()
    for run in runs:
        settings, entries = run["settings"], run["methods"]
        out.print(
            f"{settings['topology']}, {settings['mode']}, {settings['fetch']} fetches, batch "
            f"{settings['batch_size']:,}, {memory_text(settings)}, "
            f"threshold {100 * settings['threshold']:g}%"
        )
        out.print(run_table(entries))
        if settings["mode"] == "training":
            out.print(traffic_table(entries))
        for line in remarks(entries):
            out.print(line)
        out.print()


def memory_text(settings: dict[str, Any]) -> str:
    """What plans may use."""
    asked = f"extra memory {100 * settings['extra_memory']:g}%"
    if "reserve" not in settings:
        return asked
    held = dict.fromkeys(format_bytes(c) for c in sorted(settings["capacity_bytes"]))
    return f"{' to '.join([*held][:: max(len(held) - 1, 1)])} a rank (at most {asked})"


def run_table(entries: dict[str, dict[str, Any]]) -> Any:
    """The figures of each method, at most 100 columns wide."""
    done = [entry for entry in entries.values() if entry["objective_seconds"] is not None]
    memory = unit(v for entry in done for v in entry["memory_bytes"])
    lookups = unit(v for entry in done for v in entry["lookups"])
    links = unit(v for entry in done for v in pairs(entry["link_bytes"]))
    total = unit(entry["communication_bytes"]["total"] for entry in done)
    slowest = max((entry["objective_seconds"] for entry in done), default=1.0)
    second = next((u for u in _TIME_UNITS if slowest >= u[1]), _TIME_UNITS[-1])
    table = new_table(
        "\nmethod",
        f"memory {memory[0]}B\nmax/mean/min",
        f"lookups {lookups[0]}\nmax/mean/min",
        f"pairs {links[0]}B\nmax/mean/min",
        "DoB mem/\nlookups/pairs",
        f"total\n{total[0]}B",
        f"time\n{second[0]}",
        "plan\ns",
        "gap\n%",
    )
    table.collapse_padding = True
    for name, entry in entries.items():
        if entry["objective_seconds"] is None:
            table.add_row(name, "> limit" if entry["status"] == "time_limit" else "no placement")
            continue
        dob = entry["dob"]
        table.add_row(
            name,
            triple(entry["memory_bytes"], memory[1]),
            triple(entry["lookups"], lookups[1]),
            triple(pairs(entry["link_bytes"]), links[1]),
            "/".join(digits(dob[key], 4) for key in ("memory", "lookups", "link_cost")),
            digits(entry["communication_bytes"]["total"] / total[1]),
            digits(entry["objective_seconds"] / second[1]),
            ">limit" if entry["status"] == "time_limit" else digits(entry["seconds"]["total"]),
            gap_cell(entry),
        )
    return table


def traffic_table(entries: dict[str, dict[str, Any]]) -> Any:
    """The parts of the communication in training, summed over ranks."""
    table = new_table("traffic", "fetch", "gradients", "AllReduce", "method", "total")
    for name, entry in entries.items():
        if entry["objective_seconds"] is None:
            continue
        moved = entry["communication_bytes"]
        table.add_row(
            name,
            format_bytes(moved["fetch"]),
            format_bytes(moved["gradient"]),
            format_bytes(moved["allreduce"]),
            entry["allreduce_method"],
            format_bytes(moved["total"]),
        )
    return table


def remarks(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Remarks below the tables: broken limits, TorchRec's choices, the solver's bound."""
    lines = []
    for name, entry in entries.items():
        notes, factor = entry["notes"], entry.get("capacity_factor")
        if entry["objective_seconds"] is None:
            lines.append(f"{name}: {notes['reason']}")
            continue
        if name == "torchrec":
            lines += torchrec_remarks(entry)
        elif entry["status"] == "infeasible":
            lines.append(f"{name}: infeasible, a rank holds {factor:.6g} times its capacity")
        elif entry["certified_gap"] is None:
            lines.append(
                f"{name}: its copies take {entry['extra_memory_ratio']:.3g} of extra memory, more "
                "than was asked for: no gap"
            )
        if name == "milp":
            lines.append(
                f"milp: {notes['solver']} on {notes['partitions']} whole partitions, "
                f"{notes['solver_gap']:.3%} from its own bound"
            )
    return lines


def torchrec_remarks(entry: dict[str, Any]) -> list[str]:
    """How TorchRec's planner came to its plan: it counts memory itself, and was given more of it
    until it found one."""
    notes, given = entry["notes"], entry["notes"]["capacity_factor"]
    found = "shards" if given <= 1 else f"given {given:.3g} times the capacity, shards"
    tables = ", ".join(f"{n} {kind}" for kind, n in notes["tables"].items())
    fits = "within the capacity"
    if entry["status"] == "infeasible":
        fits = f"infeasible, a rank holds {entry['capacity_factor']:.6g} times its capacity"
    return [
        f"torchrec: {found} tables {tables}; {fits}",
        f"torchrec: estimates {format_duration(notes['estimate_seconds'])} itself, and would move "
        f"{format_bytes(notes['pooled_bytes']['total'])} of pooled vectors",
    ]


def gap_cell(entry: dict[str, Any]) -> str:
    """The certified gap in percent, or by how much the capacity is exceeded."""
    if entry["status"] == "infeasible":
        return f"×{digits(entry['capacity_factor'], 5)}"
    if entry["certified_gap"] is None:
        return "-"
    percent = 100 * entry["certified_gap"]
    return (
        digits(percent)
        if percent >= 0.01 or percent == 0
        else f"{percent:.0e}".replace("e-0", "e-")
    )


def pairs(matrix: list[list[float]]) -> list[float]:
    """The values of ordered pairs of different ranks; a single 0 where there is one rank."""
    found = [v for i, row in enumerate(matrix) for j, v in enumerate(row) if i != j]
    return found or [0.0]


def unit(values: Iterable[float]) -> tuple[str, float]:
    """The unit for a column: the largest one that its largest value reaches."""
    largest = max(values, default=0.0)
    return next((u for u in _UNITS if largest >= u[1]), _UNITS[-1])


def triple(values: list[float], scale: float) -> str:
    """max/mean/min in units of `scale`."""
    shown = (max(values), sum(values) / len(values), min(values))
    return "/".join(digits(value / scale) for value in shown)


def digits(value: float | None, count: int = 3) -> str:
    """`count` digits without an exponent or a leading 0, to fit in a table."""
    if value is None:
        return "-"
    rounded = float(f"{value:.{count}g}")
    whole = len(str(int(rounded))) if rounded >= 1 else 0
    text = f"{value:.{max(count - whole, 0)}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".") if float(text) in (0.0, 1.0) else text.lstrip("0")
    return text
