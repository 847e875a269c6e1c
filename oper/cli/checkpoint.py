"""`oper checkpoint`: look at checkpoints, verify them, cut them anew, take a table out."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oper.base.formatting import format_bytes, plural
from oper.cli.shared.command import Command, CommandGroup
from oper.cli.shared.console import emit, new_console, new_table, tell
from oper.cli.shared.output_options import FORCE, JSON, VERBOSE
from oper.cli.shared.progress import progress

if TYPE_CHECKING:
    from oper.checkpoint.link import Description
    from oper.checkpoint.verify import Verified

_MOST_NAMES = 5  # of tensors that are in no table
_DIGEST_DIGITS = 12  # of a plan's, as elsewhere

_INSPECT = """
oper checkpoint inspect checkpoint
"""
_VERIFY = """
oper checkpoint verify checkpoint
"""
_RESHARD = """
oper checkpoint reshard checkpoint -o checkpoint-of-8 --ranks 8
"""
_EXPORT = """
oper checkpoint export checkpoint --table C1 -o C1.safetensors
oper checkpoint export checkpoint --table C1 -o C1.parquet
"""
_CHECKPOINT = typer.Argument(
    metavar="CHECKPOINT",
    help="A folder of oper.save or torch.distributed.checkpoint, or one of several of these.",
)


def register(app: typer.Typer) -> None:
    """Add the commands of `oper checkpoint`."""
    verbs = typer.Typer(
        cls=CommandGroup,
        help="Look at checkpoints, verify, reshard and export them.",
        epilog=_INSPECT + _VERIFY + _RESHARD + _EXPORT,
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    verbs.command("inspect", cls=Command, epilog=_INSPECT)(inspect)
    verbs.command("verify", cls=Command, epilog=_VERIFY)(verify)
    verbs.command("reshard", cls=Command, epilog=_RESHARD)(reshard)
    verbs.command("export", cls=Command, epilog=_EXPORT)(export)
    app.add_typer(verbs, name="checkpoint")


def inspect(checkpoint: Path = _CHECKPOINT, verbose: bool = VERBOSE, as_json: bool = JSON) -> None:
    """Print the tables, the states and the rest of a checkpoint."""
    from oper.checkpoint.describe import describe

    found = describe(checkpoint)
    emit(as_json, found.to_json(), lambda: _print(found, verbose))


def verify(checkpoint: Path = _CHECKPOINT, as_json: bool = JSON) -> None:
    """Read a checkpoint to its end and compare it with its checksums.

    Of a delta, what it is upon is read too. The exit status is 1 if a file is missing, truncated or
    changed.
    """
    from oper.checkpoint import verify as verifying
    from oper.checkpoint.chain import read_chain

    opened = read_chain(checkpoint)
    with progress("verifying", verifying.bytes_to_verify(opened), "B") as meter:
        found = verifying.verify(opened, meter.advance)
    emit(as_json, found.to_json(), lambda: _print_verified(found))
    if not found.ok:
        raise typer.Exit(1)


def reshard(
    checkpoint: Path = _CHECKPOINT,
    output: Path = typer.Option(
        ..., "-o", "--output", help="The folder to write.", metavar="FOLDER"
    ),
    ranks: int = typer.Option(
        ..., "--ranks", min=1, help="How many ranks' files to write.", metavar="N"
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Write a checkpoint as another number of ranks would have.

    A delta and what it is upon become a whole checkpoint. Loading needs none of this: any number of
    ranks, under any plan, reads any checkpoint.
    """
    from oper.checkpoint import reshard as resharding
    from oper.checkpoint.marker import FORMAT
    from oper.checkpoint.soundness import open_chain
    from oper.files.storage import check_output

    check_output(output, FORMAT, force)
    opened = open_chain(checkpoint)
    size = sum(tensor.bytes for tensor in opened.index.tensors.values())
    with progress("resharding", size, "B") as meter:
        resharding.reshard(opened, output, ranks, force, meter.advance)
    content = {"checkpoint": str(opened.folder), "output": str(output), "ranks": ranks}
    text = f"{output}: {format_bytes(size)} of {opened.folder} for {plural(ranks, 'rank')}"
    emit(as_json, {**content, "bytes": size}, lambda: tell(text), written=True)


def export(
    checkpoint: Path = _CHECKPOINT,
    table: str = typer.Option(..., "--table", help="The table's name.", metavar="NAME"),
    output: Path = typer.Option(
        ...,
        "-o",
        "--output",
        help="The file to write, which ends in .safetensors or .parquet.",
        metavar="FILE",
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Write one table with its optimizer's states to a file."""
    from oper.checkpoint import export as exporting
    from oper.checkpoint.saved_tables import table_of
    from oper.checkpoint.soundness import open_chain
    from oper.files.storage import check_output

    check_output(output, overwrite=force)
    opened = open_chain(checkpoint)
    with progress("exporting", table_of(opened.index, table).bytes, "B") as meter:
        found = exporting.export(opened, table, output, force, meter.advance)
    rows, dim = found.weight.shape
    content = {
        "checkpoint": str(opened.folder),
        "output": str(output),
        "table": table,
        "rows": rows,
        "dim": dim,
        "states": list(found.states),
    }
    states = f", with {', '.join(found.states)}" if found.states else ""
    text = f"{output}: {plural(rows, 'row')} of {table}, dim {dim}{states}"
    emit(as_json, content, lambda: tell(text), written=True)


def _print(found: "Description", verbose: bool) -> None:
    from oper.checkpoint.link import dtype_name

    out = new_console()
    tell(f"{found.folder}: {_origin(found)}")
    tell(f"{format_bytes(found.bytes)} in {plural(found.files, 'file')}")
    if found.tables:
        out.print()
        table = new_table("table", "optimizer's states", "rows", "dim", "dtype", "size", left=2)
        for each in found.tables:
            rows, dim = each.weight.shape
            of = "" if found.delta is None else f" of {found.rows_of(each):,}"
            states = ", ".join(each.states) or "none"
            size = format_bytes(each.bytes)
            dtype = dtype_name(each.weight)
            table.add_row(each.name, states, f"{rows:,}{of}", str(dim), dtype, size)
        out.print(table)
    others = found.others
    if others:
        total = format_bytes(sum(tensor.bytes for tensor in others))
        names = [f"{t.name} {list(t.shape)} {dtype_name(t)}" for t in others]
        _print_names(f"{plural(len(others), 'other tensor')}, {total}", names, verbose)
    if objects := found.objects:
        _print_names(plural(len(objects), "object"), objects, verbose)


def _print_names(heading: str, names: list[str], verbose: bool) -> None:
    shown = names if verbose else names[:_MOST_NAMES]
    tell(f"\n{heading}")
    for name in shown:
        tell(f"  {name}")
    if len(names) > len(shown):
        tell(f"  and {len(names) - len(shown)} more (-v)")


def _origin(found: "Description") -> str:
    marker = found.marker
    if marker is None:
        return "written by torch.distributed.checkpoint, without a step or checksums"
    step = "no step" if marker.step is None else f"step {marker.step:,}"
    plan = "" if marker.plan is None else f", plan {marker.plan[:_DIGEST_DIGITS]}…"
    delta = "" if marker.delta is None else f"delta upon {marker.delta.upon}, "
    return f"{delta}{step}, written for {plural(marker.ranks, 'rank')}{plan}"


def _print_verified(found: "Verified") -> None:
    if found.ok:
        tell(f"{found.folder}: whole ({found.checked}, {format_bytes(found.bytes)})")
        return
    tell(f"{found.folder}: damaged ({found.checked}); copy it again, or go on from an older one")
    for problem in found.problems:
        tell(f"  {problem}")
