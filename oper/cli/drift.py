"""`oper drift`: the cost of a plan under newer counts, and whether to replan."""

from pathlib import Path
from typing import Any

import typer

from oper.base.formatting import format_duration, format_share
from oper.base.units import parse_share
from oper.cli.shared.command import Command
from oper.cli.shared.console import emit, new_console, new_table
from oper.cli.shared.output_options import JSON
from oper.cli.shared.progress import steps

_MOST_TABLES = 10


_EXAMPLES = """
oper drift plan windows@3
oper drift plan windows --all-windows --worse 10%
"""


def register(app: typer.Typer) -> None:
    """Add `oper drift`."""
    app.command("drift", cls=Command, epilog=_EXAMPLES)(drift)


def drift(
    plan: Path = typer.Argument(metavar="PLAN", help="A plan folder."),
    profile: str = typer.Argument(
        metavar="PROFILE", help="A newer profile of its tables, or a window: PROFILE@3."
    ),
    worse: str = typer.Option(
        "5%",
        "--worse",
        help="Advise to replan if one from scratch were better by more than this.",
        metavar="SHARE",
    ),
    all_windows: bool = typer.Option(
        False, "--all-windows", help="A line for each window of the profile, and what they cost."
    ),
    exit_code: bool = typer.Option(
        False, "--exit-code", help="Exit with status 1 where the verdict is to replan."
    ),
    as_json: bool = JSON,
) -> None:
    """Print the cost of a plan under newer counts; advise replanning."""
    from oper.plan.plan import load_plan
    from oper.planner.replan import drift as planner
    from oper.profiling.profile import Profile

    threshold = parse_share(worse, "--worse")
    loaded, content = load_plan(plan), {"plan": str(plan), "profile": profile}
    if all_windows:
        windows = Profile.open_parts(profile, check=True)
        with steps("drift", 2 * len(windows)) as step:
            content |= planner.drift_by_window(loaded, windows, threshold, step).to_json()
        emit(as_json, content, lambda: _print_windows(content))
    else:
        opened = Profile.open(profile, check=True)
        with steps("drift", 2) as step:
            content |= planner.drift(loaded, opened, threshold, step).to_json()
        emit(as_json, content, lambda: _print(content))
    if exit_code and content["verdict"] == "replan":
        raise typer.Exit(1)


def _print_windows(content: dict[str, Any]) -> None:
    out = new_console()
    table = new_table(
        "window", "samples", "iterations", "iteration", "from scratch", "worse", "costs", "verdict"
    )
    for number, window in enumerate(content["windows"]):
        seconds = window["objective_seconds"]
        table.add_row(
            f"@{number}",
            f"{window['samples']:,}",
            f"{window['iterations']:,.4g}",
            format_duration(seconds["now"]),
            format_duration(seconds["fresh"]),
            format_share(window["worse"]),
            format_duration(window["cost_seconds"]),
            window["verdict"],
        )
    out.print(f"{content['plan']} under {content['profile']}")
    out.print(table)
    out.print(
        f"verdict: {content['verdict']}. Not re-planning costs "
        f"{format_duration(content['cost_seconds'])} in all, "
        f"{format_share(content['cost_share'])} of what a plan from scratch for each window takes"
    )


def _print(content: dict[str, Any]) -> None:
    out = new_console()
    seconds, ranks = content["objective_seconds"], content["rank_seconds"]
    out.print(f"{content['plan']} under {content['profile']}")
    for label, key in (
        ("when it was made", "then"),
        ("under these counts", "now"),
        ("from scratch", "fresh"),
    ):
        out.print(f"{label:<20} {format_duration(seconds[key])} an iteration")
    hot_set = new_table("share of accesses of", "rows", "then", "now", "hottest rows now")
    for name, hot in content["hot_set"].items():
        shares = [f"{hot[key]:.1%}" for key in ("then", "now", "hottest_now")]
        hot_set.add_row(f"{name} rows", f"{hot['rows']:,}", *shares)
    out.print(hot_set)
    table = new_table("rank", "T then", "now", "from scratch", "ratio")
    shown = list(range(len(ranks["now"])))
    if len(shown) > 16:
        shown = sorted(shown, key=lambda r: -ranks["now"][r])[:16]
        out.print("the 16 slowest ranks:")
    for rank in shown:
        then, now, fresh = (ranks[key][rank] for key in ("then", "now", "fresh"))
        ratio = f"{now / fresh:.3f}" if fresh > 0 else "-"
        times = [format_duration(value) for value in (then, now, fresh)]
        table.add_row(str(rank), *times, ratio)
    out.print(table)
    _print_tables(out, content["tables"])
    remedy = "; run `oper replan`" if content["verdict"] == "replan" else ""
    out.print(
        f"verdict: {content['verdict']}. An iteration takes {format_share(content['worse'])} "
        f"longer than with a plan from scratch; the threshold is {content['threshold']:.2%}{remedy}"
    )


def _print_tables(out: Any, tables: list[dict[str, Any]]) -> None:
    worst = sorted(tables, key=lambda t: -float(t["worse_seconds"]))[:_MOST_TABLES]
    made = new_table(
        "table", "in slowest T", "in mean T", "from scratch", "worse", "lookups min/max"
    )
    for entry in worst:
        made.add_row(
            entry["table"],
            format_duration(entry["slowest_rank_seconds"]),
            format_duration(entry["mean_seconds"]),
            format_duration(entry["fresh_mean_seconds"]),
            format_duration(entry["worse_seconds"]),
            f"{entry['lookups_dob']:.1%}",
        )
    out.print(made)
    if len(tables) > len(worst):
        out.print(
            f"and {len(tables) - len(worst)} more tables, with smaller losses; --json has them all"
        )
