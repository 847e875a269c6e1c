"""`oper plan`: make a plan from a profile; show, compare, explain and check plans."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from oper.base.errors import OperError
from oper.base.units import parse_share
from oper.cli.plan_commands import plan_check, plan_views
from oper.cli.plan_commands.curve_text import curve_table
from oper.cli.plan_commands.plan_summary import print_next, print_summary
from oper.cli.plan_commands.plan_text import print_plan
from oper.cli.shared.command import ConfigurableCommand
from oper.cli.shared.console import emit, new_console
from oper.cli.shared.default_subcommand import DEFAULT, verb
from oper.cli.shared.output_options import FORCE, JSON, VERBOSE
from oper.cli.shared.plan_options import (
    BALANCE,
    BATCH_SIZE,
    CAPACITY,
    DOB,
    EXTRA_MEMORY,
    FETCH,
    MODE,
    RESERVE,
    THRESHOLD,
    TIER,
    TOPOLOGY,
    Balance,
    Fetch,
    Mode,
    load_topology,
    parse_reserve,
    parse_tier,
)
from oper.cli.shared.progress import steps

_EXAMPLES = """
oper plan profile --topology dgx-a100 --batch-size 65536 -o plan
oper plan profile --topology dgx-a100 --extra-memory 5% -o other-plan
oper plan profile --topology dgx-h100 --mode inference --curve
"""

_STEPS = 8  # of one plan, about
_PLANS_OF = {"pooled": 2, "auto": 3}  # plans that are made to choose from, by fetch


def register(app: typer.Typer) -> None:
    """Add `oper plan` and its sub-commands."""
    verbs = verb("Plan the placement of all rows; show, explain and check plans.")
    verbs.command(DEFAULT, hidden=True, cls=ConfigurableCommand, epilog=_EXAMPLES)(make)
    plan_views.add_to(verbs)
    plan_check.add_to(verbs)
    app.add_typer(verbs, name="plan")


def make(
    profile: str = typer.Argument(
        metavar="PROFILE", help="A profile folder, or one of its windows: PROFILE@3."
    ),
    output: Path | None = typer.Option(
        None,
        "-o",
        "--output",
        help="The plan folder to write; needed without --curve.",
        metavar="FOLDER",
    ),
    topology: str = TOPOLOGY,
    mode: Mode = MODE,
    fetch: Fetch | None = FETCH,
    batch_size: int = BATCH_SIZE,
    extra_memory: str | None = EXTRA_MEMORY,
    reserve: str | None = RESERVE,
    threshold: str = THRESHOLD,
    dob: str = DOB,
    balance: Balance = BALANCE,
    capacity: str | None = CAPACITY,
    tier: str | None = TIER,
    curve: bool = typer.Option(False, "--curve", help="Print predicted steps over memory limits."),
    force: bool = FORCE,
    verbose: bool = VERBOSE,
    as_json: bool = JSON,
) -> None:
    """Plan the placement of every row and certify how far it is from optimal."""
    from oper.analysis.plan_facts import PlanFigures
    from oper.cost.workload import Workload
    from oper.files.storage import check_output
    from oper.plan.plan import FORMAT
    from oper.plan.settings import PlanSettings
    from oper.planner.make_placement import Planned
    from oper.planner.make_plan import plan_and_placement
    from oper.planner.memory_curve import CurvePoint, memory_curve
    from oper.planner.place_by_table import FetchChoice
    from oper.profiling.profile import Profile

    if output is not None:
        check_output(output, FORMAT, force)
    elif not curve:
        raise OperError(
            "oper plan: -o FOLDER is missing; name the folder to write, or give --curve, which "
            "prints what more or less memory would do"
        )
    ranks = load_topology(topology, capacity)
    settings = PlanSettings(
        None if extra_memory is None else parse_share(extra_memory, "--extra-memory"),
        parse_share(threshold, "--threshold"),
        parse_share(dob, "--dob"),
        balance,
        parse_reserve(reserve, extra_memory, ranks),
        parse_tier(tier),
    )
    if curve and tier is not None:
        raise OperError(
            "--curve: is of the devices' memory, and --tier takes tables out of it; leave one out"
        )
    workload = Workload(mode, fetch, batch_size)
    opened = Profile.load(profile, check=True)
    plans = _PLANS_OF.get(workload.on(ranks.nodes).fetch or "", 1)
    points: list[CurvePoint] = []
    with steps("planning", total=_STEPS * plans) as report:

        def settle(placed: Planned) -> Planned:
            if not curve:
                return placed
            report("curve")
            found = memory_curve(placed, ranks)
            points.extend(found.points)
            return found.placement

        made, placed = plan_and_placement(opened, ranks, workload, settings, report, settle)
        if output is not None:
            report("writing")
            since = time.perf_counter()
            made.save(output, force)
            made.seconds["writing"] = time.perf_counter() - since
            made.seconds["total"] += made.seconds["writing"]
    figures = PlanFigures.of(made, opened.accesses_of_tables)
    choice = None if made.tier else FetchChoice.of(placed)
    content: dict[str, Any] = {
        "plan": None if output is None else str(output),
        **figures.to_json(),
        "seconds": made.seconds,
        "fetch_auto": None if choice is None else asdict(choice),
    }
    if curve:
        content["curve"] = [point.to_json() for point in points]

    def text() -> None:
        if curve:
            out = new_console()
            out.print("Predicted step by extra memory, a share of the tables' bytes for copies:")
            out.print(curve_table(points))
        if output is None:
            return
        if verbose:
            print_plan(figures, str(output), verbose, choice)
        else:
            print_summary(figures, str(output), choice)
        print_next(made, str(output), profile)

    emit(as_json, content, text, written=not curve)
