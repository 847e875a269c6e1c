"""`oper replan`: a new plan from an older one, moving only rows for which that pays."""

from pathlib import Path

import typer

from oper.base.defaults import HORIZON, MOST_STEPS
from oper.base.errors import OperError
from oper.base.units import parse_share
from oper.cli.replan_text import print_replan
from oper.cli.shared.command import ConfigurableCommand
from oper.cli.shared.console import emit
from oper.cli.shared.output_options import FORCE, JSON, VERBOSE
from oper.cli.shared.progress import steps

_EXAMPLES = """
oper replan plan windows@3 -o plan-new --horizon 100000
oper replan plan profile -o plan-for-8 --topology cpu:8
oper replan plan windows@3 -o plan-few --max-move 1% --curve
"""


def register(app: typer.Typer) -> None:
    """Add `oper replan`."""
    app.command("replan", cls=ConfigurableCommand, epilog=_EXAMPLES)(replan)


def replan(
    plan: Path = typer.Argument(metavar="PLAN", help="The plan folder to start from."),
    profile: str = typer.Argument(
        metavar="PROFILE",
        help="A newer profile, or a window: PROFILE@3. Its tables may have grown, be new or gone.",
    ),
    output: Path = typer.Option(
        ..., "-o", "--output", help="The plan folder to write.", metavar="FOLDER"
    ),
    horizon: int = typer.Option(
        HORIZON,
        "--horizon",
        min=1,
        max=MOST_STEPS,
        help="Steps within which a move must save the time of moving its bytes.",
        metavar="N",
    ),
    topology: str | None = typer.Option(
        None,
        "--topology",
        help="Other ranks, links or capacities; rank r is the plan's rank r. [default: the plan's]",
        metavar="NAME|FILE",
    ),
    extra_memory: str | None = typer.Option(
        None,
        "--extra-memory",
        help="Bytes of copies, as a share of the tables' bytes. [default: as the plan was asked]",
        metavar="SHARE",
    ),
    max_move: str | None = typer.Option(
        None,
        "--max-move",
        help="Most bytes to move over links: 64MB, or 1% of the tables' bytes. [default: all that "
        "pay]",
        metavar="BYTES|SHARE",
    ),
    curve: bool = typer.Option(
        False, "--curve", help="Print what other limits on the bytes would leave of the gain."
    ),
    force: bool = FORCE,
    verbose: bool = VERBOSE,
    as_json: bool = JSON,
) -> None:
    """Make a new plan from an older one, moving few rows."""
    from oper.files.storage import check_output
    from oper.plan.plan import FORMAT
    from oper.planner.replan.replan import replan as plan_again
    from oper.profiling.profile import Profile

    check_output(output, FORMAT, force)
    if output.resolve() == plan.resolve():
        raise OperError(
            f"-o {output}: expected another folder than that of the old plan, which the advice may "
            "be to keep; choose another path"
        )
    extra = None if extra_memory is None else parse_share(extra_memory, "--extra-memory")
    opened = Profile.load(profile, check=True)
    with steps("replan", 5) as step:
        made = plan_again(
            plan,
            opened,
            horizon,
            step,
            topology=topology,
            extra_memory=extra,
            max_move=max_move,
            curve=curve,
        )
        step("writing")
        made.plan.save(output, force)
    content = {"plan": str(output), "from": str(plan), "profile": profile, **made.to_json()}

    emit(
        as_json,
        content,
        lambda: print_replan(made, str(plan), str(output), profile, curve, verbose),
        written=True,
    )
