"""`oper drift`: the cost of a plan under newer counts, and whether to replan."""

from pathlib import Path

import typer

from oper.base.defaults import WORSE
from oper.base.units import parse_share
from oper.cli.drift_text import print_drift, print_windows
from oper.cli.shared.command import ConfigurableCommand
from oper.cli.shared.console import emit
from oper.cli.shared.output_options import JSON
from oper.cli.shared.progress import steps

_EXAMPLES = """
oper drift plan windows@3
oper drift plan windows --all-windows --worse 10%
"""


def register(app: typer.Typer) -> None:
    """Add `oper drift`."""
    app.command("drift", cls=ConfigurableCommand, epilog=_EXAMPLES)(drift)


def drift(
    plan: Path = typer.Argument(metavar="PLAN", help="A plan folder."),
    profile: str = typer.Argument(
        metavar="PROFILE", help="A newer profile of its tables, or a window: PROFILE@3."
    ),
    worse: str = typer.Option(
        f"{100 * WORSE:g}%",
        "--worse",
        help="Advise another plan if it saves more than this share of a step.",
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
    """Print a plan's cost under newer counts; advise replanning."""
    from oper.plan.plan import Plan
    from oper.planner.replan import drift as planner
    from oper.profiling.profile import Profile

    threshold = parse_share(worse, "--worse")
    loaded = Plan.load(plan)
    names = {"plan": str(plan), "plan_digest": loaded.digest, "profile": profile}
    if all_windows:
        windows = Profile.load_windows(profile, check=True)
        with steps("drift", 2 * len(windows)) as step:
            of_windows = planner.drift_by_window(loaded, windows, threshold, step)
        verdict = of_windows.verdict
        content = names | of_windows.to_json()
        emit(as_json, content, lambda: print_windows(of_windows, str(plan), profile))
    else:
        opened = Profile.load(profile, check=True)
        with steps("drift", 2) as step:
            found = planner.drift(loaded, opened, threshold, step)
        verdict = found.verdict
        content = names | found.to_json()
        emit(as_json, content, lambda: print_drift(found, str(plan), profile, loaded))
    if exit_code and verdict == "replan":
        raise typer.Exit(1)
