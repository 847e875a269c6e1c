"""`oper synth`: generate a log of a published workload, or only its profile."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from oper.base.errors import OperError
from oper.base.formatting import format_share, plural
from oper.base.spoken import typed_path
from oper.base.units import parse_share
from oper.cli.shared.command import ADVANCED, Command
from oper.cli.shared.console import emit, tell
from oper.cli.shared.output_options import FORCE, JSON
from oper.cli.shared.progress import progress

if TYPE_CHECKING:
    from oper.synth.synthesizer import Synthesizer

_EXAMPLES = """
oper synth criteo-kaggle --scale 0.001 --samples 10000 -o log.parquet
oper synth criteo-kaggle --scale 0.001 --counts --windows 4 --drift 0.3 \\
  -o counted
"""


def register(app: typer.Typer) -> None:
    """Add `oper synth`."""
    app.command("synth", cls=Command, epilog=_EXAMPLES)(synth)


def synth(
    workload: str = typer.Argument(
        metavar="WORKLOAD",
        help="criteo-kaggle, criteo-terabyte, criteo-terabyte-40m, avazu, meta-2021, syn-small or "
        "syn-large.",
    ),
    output: Path = typer.Option(
        ...,
        "-o",
        "--output",
        help="The Parquet file, or with --counts the profile, to write.",
        metavar="PATH",
    ),
    scale: float = typer.Option(
        1.0,
        "--scale",
        help="Factor on rows (tables of up to 256 keep theirs) and samples.",
        metavar="FACTOR",
    ),
    samples: int | None = typer.Option(
        None,
        "--samples",
        help="Samples of the log. [default: the published number times the scale]",
        metavar="N",
    ),
    zipf: float | None = typer.Option(
        None,
        "--zipf",
        help="Exponent of every table's Zipf law, instead of the workload's own.",
        metavar="EXPONENT",
        rich_help_panel=ADVANCED,
    ),
    drift: str = typer.Option(
        "0",
        "--drift",
        help="Share of the accesses that has moved to other rows by the end of the log.",
        metavar="SHARE",
    ),
    churn: str = typer.Option(
        "0",
        "--churn",
        help="Share of the rows in use that new rows have replaced by the end of the log.",
        metavar="SHARE",
    ),
    seed: int = typer.Option(
        0,
        "--seed",
        min=0,
        help="Seed of the random numbers.",
        metavar="N",
        rich_help_panel=ADVANCED,
    ),
    order: Literal["scattered", "frequency", "age"] = typer.Option(
        "scattered",
        "--order",
        help="Order of row ids; age is a rough one.",
        metavar="scattered|frequency|age",
        rich_help_panel=ADVANCED,
    ),
    dim: int | None = typer.Option(
        None, "--dim", min=1, help="Values per row.", metavar="N", rich_help_panel=ADVANCED
    ),
    counts: bool = typer.Option(False, "--counts", help="Write only the profile, without a log."),
    windows: int = typer.Option(
        1,
        "--windows",
        min=1,
        help="With --counts: one profile for each of N equal parts.",
        metavar="N",
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Generate a log of a published workload."""
    from oper.synth.recipes import load_recipe
    from oper.synth.synthesizer import Synthesizer

    recipe = load_recipe(
        workload, scale=scale, zipf=zipf, dim=dim, churn=parse_share(churn, "--churn")
    )
    synthesizer = Synthesizer(
        recipe,
        recipe.samples if samples is None else samples,
        parse_share(drift, "--drift"),
        seed,
        order,
    )
    if counts:
        if recipe.source["churn"]:
            raise OperError(
                f"--churn {churn}: expected no --counts, which draws counts without an order; "
                "write the log and count it with `oper profile`"
            )
        _write_profile(synthesizer, output, windows, force, as_json)
    elif windows > 1:
        raise OperError(
            f"--windows {windows}: needs --counts; cut a log with `oper profile --windows`"
        )
    else:
        _write_log(synthesizer, output, force, as_json)


def _write_log(synthesizer: "Synthesizer", output: Path, force: bool, as_json: bool) -> None:
    from oper.synth.log_writer import write_log

    with progress("writing", synthesizer.samples, "samples") as meter:
        written = write_log(synthesizer, output, meter.advance, force)

    def text() -> None:
        tell(f"{output}: {_described(synthesizer)}")
        tell(
            f"clicks: {format_share(written.click_rate)} of the samples; a model that knew each "
            f"one's probability would have an AUC of {written.bayes_auc:.4f}"
        )
        tell(
            f"profile it: oper profile {typed_path(output)} --tables {typed_path(written.tables)} "
            "-o PROFILE"
        )

    content = {
        "log": str(output),
        "tables": str(written.tables),
        **_content(synthesizer),
        "click_rate": written.click_rate,
        "bayes_auc": written.bayes_auc,
    }
    emit(as_json, content, text, written=True)


def _write_profile(
    synthesizer: "Synthesizer", output: Path, windows: int, force: bool, as_json: bool
) -> None:
    from oper.synth.profile_writer import write_profile

    with progress("drawing counts", windows * synthesizer.recipe.rows, "rows") as meter:
        write_profile(synthesizer, output, windows, meter.advance, force)
    content = {"profile": str(output), "windows": windows, **_content(synthesizer)}
    emit(as_json, content, lambda: tell(f"{output}: {_described(synthesizer)}"), written=True)


def _content(synthesizer: "Synthesizer") -> dict[str, Any]:
    recipe = synthesizer.recipe
    return {**synthesizer.source, "tables_count": len(recipe.tables), "rows": recipe.rows}


def _described(synthesizer: "Synthesizer") -> str:
    recipe, samples = synthesizer.recipe, plural(synthesizer.samples, "sample")
    return f"{samples} of {plural(len(recipe.tables), 'table')} with {plural(recipe.rows, 'row')}"
