"""Text of `oper replan`: the new plan, the advice, the moves, other limits."""

from typing import TYPE_CHECKING, Any

from oper.base.formatting import format_bytes, format_duration, format_share, plural
from oper.base.spoken import all_figures, option
from oper.cli.judgement_text import advice_sentence, basis_sentence, command_to_run
from oper.cli.shared.console import new_console, new_table, tell

if TYPE_CHECKING:
    from oper.planner.replan.replan_one_memory import CarriedOver, Replanned

_MOST_RANKS = 8
_MOST_NAMES = 4  # of tables


def print_replan(
    made: "Replanned", old: str, new: str, profile: str, curve: bool, verbose: bool = False
) -> None:
    """Print the gain and the moves of a new plan; with `curve` those within other limits too, with
    `verbose` the bytes that move between each two ranks."""
    out = new_console()
    _print_plans(out, made, old, new, profile)
    if verbose and made.moves.changed_rows:
        _print_links(out, made.migration.bytes_by_link.tolist())
    if curve:
        _print_curve(out, made)


def _print_plans(out: Any, made: "Replanned", old: str, new: str, profile: str) -> None:
    carried = made.carried_over
    if carried is not None:
        out.print(carried_sentence(carried, made.plan.ranks, old))
    out.print(replan_sentence(made, old, new, profile))
    assert made.judgement is not None
    out.print(advice_sentence(made.judgement, old, profile, new))
    out.print(basis_sentence(made.judgement))
    command = command_to_run(made.judgement, made.plan, old, profile, new)
    if command is not None:
        tell(command)
    out.print()
    out.print(_plans(made))
    changed = made.moves.changed_rows
    placed = placed_text(made)
    if placed:
        out.print(placed)
    if changed:
        out.print(
            f"{plural(changed, 'row')} in moves.npy have other holders or slots; "
            f"{format_bytes(made.migration.local_bytes)} of them only change slots on their rank"
        )


def _plans(made: "Replanned") -> Any:
    """Return a table of the plans that were judged, with the moves that lead to each."""
    from oper.analysis.wording import CHOICES
    from oper.planner.replan.judgement import Choice

    carried, judgement = made.carried_over, made.judgement
    assert judgement is not None
    moves = {
        Choice.REPLAN: (made.migration.rows, made.migration, made.migration_seconds),
        Choice.FROM_SCRATCH: (
            made.fresh_migration.rows,
            made.fresh_migration,
            made.fresh_migration_seconds,
        ),
    }
    if carried is not None:
        must_move = carried.migration
        moves[Choice.KEEP] = must_move.rows, must_move, must_move.seconds(made.plan.topology)
    links_first = made.plan.asked.balance == "link"
    links = ["slowest link"] if links_first else []
    aimed = dict(zip((Choice.KEEP, Choice.REPLAN, Choice.FROM_SCRATCH), made.aimed, strict=True))
    table = new_table(
        "plan", "step (predicted)", *links, "rows moved", "bytes moved", "time to move"
    )
    for each in judgement.candidates:
        name = CHOICES[each.choice]
        if carried is not None and each.choice == Choice.KEEP:
            name = "carried over"
        link = [format_duration(aimed[each.choice]) if each.choice in aimed else "-"]
        rows, moved_bytes, seconds = "-", each.moved_bytes, each.moving_seconds
        if each.choice in moves:
            number, migration, seconds = moves[each.choice]
            rows, moved_bytes = f"{number:,}", migration.link_bytes
        table.add_row(
            name,
            format_duration(each.step_seconds),
            *(link if links_first else []),
            rows,
            format_bytes(moved_bytes),
            format_duration(seconds),
        )
    return table


def carried_sentence(carried: "CarriedOver", ranks: int, old: str) -> str:
    """Return a line on the differences of the new plan from the plan `old`."""
    tables = carried.tables
    said = [
        f"{plural(len(names), 'table')} {what} ({_first_names(names)})"
        for what, names in (
            ("grew", tables.grown),
            ("new", tables.new),
            ("gone", tables.dropped),
        )
        if names
    ]
    if ranks != carried.old_ranks:
        said.append(f"{plural(ranks, 'rank')} instead of {carried.old_ranks}")
    return f"Since {old}: {'; '.join(said)}" if said else f"Since {old}: other links or limits"


def _first_names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")


def placed_text(made: "Replanned") -> str:
    """Return the line on new rows; "" without new rows."""
    rows, placed = made.migration.placed_rows, format_bytes(made.migration.placed_bytes)
    return (
        f"{plural(rows, 'new row')} ({placed} with all copies): placed, not moved" if rows else ""
    )


def replan_sentence(made: "Replanned", old: str, new: str, profile: str) -> str:
    """Return the lines on the predicted step of the plan `new` and on the bytes that move."""
    step = made.plan.step_time
    takes = "" if step is None else f"a step takes {format_duration(step.seconds)} (predicted)"
    within = f"pays off within {plural(made.horizon, 'step')} ({option('--horizon')})"
    most = made.max_move_bytes
    limited = (
        "" if most is None else f", and at most {format_bytes(most)} move ({option('--max-move')})"
    )
    fits = (
        "" if most is None else f" and takes at most {format_bytes(most)} ({option('--max-move')})"
    )
    if made.carried_over is not None:
        must = format_bytes(made.carried_over.migration.link_bytes)
        return (
            f"{new}, made for {profile}: {takes}; {must} of {old} must move, and each further move "
            f"{within}{limited}"
        )
    if not made.moves.changed_rows:
        return f"{new}, made for {profile}: {takes}; nothing moves, as no move {within}{fits}"
    return (
        f"{new}, made for {profile}: {takes}, for moving "
        f"{format_bytes(made.migration.link_bytes)} once; each move {within}{limited}"
    )


def _print_curve(out: Any, made: "Replanned") -> None:
    """Print the table of limits on the bytes, compared with the plan from scratch."""
    out.print()
    if not made.curve:
        out.print("No curve: nothing pays within the horizon")
        return
    links_first = made.plan.asked.balance == "link"
    table = new_table(
        option("--max-move"),
        "bytes moved",
        "slowest link" if links_first else "transfers",
        "of the gain",
        "new plan, cut",
        "of the gain",
    )
    before, after = made.aimed.old, made.aimed.fresh

    def of_gain(seconds: float) -> str:
        return format_share((before - seconds) / (before - after), 1) if before > after else "-"

    for point in made.curve:
        cut = point.cut_aimed_seconds
        table.add_row(
            format_bytes(point.most_bytes),
            format_bytes(point.moved_bytes),
            format_duration(point.aimed_seconds),
            of_gain(point.aimed_seconds),
            "-" if cut is None else format_duration(cut),
            "-" if cut is None else of_gain(cut),
        )
    out.print(table)
    out.print(
        "new plan, cut: as many bytes of the moves to the plan from scratch, of whose gain these "
        "are shares"
    )


def _print_links(out: Any, matrix: list[list[float]]) -> None:
    """Print bytes by link, from ranks that are gone too; with many ranks only the links with
    most."""
    ranks, sources = len(matrix), len(matrix[0])
    if sources <= _MOST_RANKS:
        out.print("bytes sent to a rank (line) by another (column):")
        table = new_table("to \\ from", *(str(rank) for rank in range(sources)))
        for reader, row in enumerate(matrix):
            cells = ["-" if r == reader else format_bytes(b) for r, b in enumerate(row)]
            table.add_row(str(reader), *cells)
        out.print(table)
        return
    links = [
        (matrix[to][source], source, to)
        for to in range(ranks)
        for source in range(sources)
        if to != source and matrix[to][source]
    ]
    table = new_table("from", "to", "bytes", left=2)
    for amount, source, to in sorted(links, reverse=True)[:_MOST_RANKS]:
        table.add_row(str(source), str(to), format_bytes(amount))
    out.print(table)
    if len(links) > _MOST_RANKS:
        out.print(f"and {len(links) - _MOST_RANKS:,} more pairs of ranks; {all_figures()} them all")
