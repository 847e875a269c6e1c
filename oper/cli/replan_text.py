"""A new plan from an older one, as `oper replan` prints it: the gain, the moves, other limits."""

from typing import TYPE_CHECKING, Any

from oper.base.formatting import format_bytes, format_duration, format_share, plural
from oper.base.spoken import all_figures, option
from oper.cli.shared.console import new_console, new_table

if TYPE_CHECKING:
    from oper.planner.replan.replan_one_memory import CarriedOver, Replanned

_MOST_RANKS = 8
_MOST_NAMES = 4  # of tables
_SHOWN = 5e-5  # shares below this are 0.00 %


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
    out.print()
    unseen = made.held_out
    later = [] if unseen is None else ["held out"]
    links_first = made.plan.asked.balance == "link"
    aimed = [[format_duration(seconds)] if links_first else [] for seconds in made.aimed]
    links = ["slowest link"] if links_first else []
    table = new_table(
        "plan", "transfers", *links, *later, "rows moved", "bytes moved", "time to move"
    )
    of_later = (
        [[]] * 3
        if unseen is None
        else [[s] for s in (unseen.old_seconds, unseen.new_seconds, unseen.fresh_seconds)]
    )
    held_out = [[format_duration(seconds) for seconds in each] for each in of_later]
    if carried is None:
        table.add_row(
            "as it was", format_duration(made.old_seconds), *aimed[0], *held_out[0], "0", "0 B", "-"
        )
    as_carried = (
        []
        if carried is None
        else [
            (
                "carried over",
                made.old_seconds,
                aimed[0] + held_out[0],
                carried.migration,
                carried.migration.seconds(made.plan.topology),
            )
        ]
    )
    for label, seconds, on_later, moved, moving_seconds in (
        *as_carried,
        (
            "replanned",
            made.new_seconds,
            aimed[1] + held_out[1],
            made.migration,
            made.migration_seconds,
        ),
        (
            "from scratch",
            made.fresh_seconds,
            aimed[2] + held_out[2],
            made.fresh_migration,
            made.fresh_migration_seconds,
        ),
    ):
        table.add_row(
            label,
            format_duration(seconds),
            *on_later,
            f"{moved.rows:,}",
            format_bytes(moved.link_bytes),
            format_duration(moving_seconds),
        )
    out.print(table)
    changed = made.moves.changed_rows
    if carried is not None:
        out.print(placed_text(made))
    elif changed and made.gain_share is not None and made.bytes_share is not None:
        out.print(
            f"{format_share(made.gain_share, 1)} of the gain of a plan made from scratch"
            f"{' on the slowest link' if links_first else ''}, for "
            f"{format_share(made.bytes_share)} of its bytes, on the data that both were made from"
        )
    out.print(held_out_text(made))
    if not changed:
        return
    out.print(
        f"{plural(changed, 'row')} in moves.npy have other holders or slots; "
        f"{format_bytes(made.migration.local_bytes)} of them only change slots on their rank"
    )


def carried_sentence(carried: "CarriedOver", ranks: int, old: str) -> str:
    """Return the lines that say how the new plan differs from the plan `old`."""
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
    """Return the lines on new rows and on the distance from a plan made from scratch."""
    rows, placed = made.migration.placed_rows, format_bytes(made.migration.placed_bytes)
    longer = made.new_seconds / made.fresh_seconds - 1
    gap = (
        f"take {format_share(longer, 2)} longer than with a plan made from scratch"
        if longer > _SHOWN
        else "take no longer than with a plan made from scratch"
    )
    if rows:
        return (
            f"{plural(rows, 'new row')} ({placed} with all copies): placed, not moved; "
            f"transfers {gap}"
        )
    return f"Transfers {gap}"


def held_out_text(made: "Replanned") -> str:
    """Return the lines on the gain that is left on held-out data."""
    from oper.analysis.wording import HELD_OUT_DATA, NOT_MEASURED

    found = made.held_out
    if found is None:
        return f"{NOT_MEASURED}, where a plan gains less"
    said = f"On {HELD_OUT_DATA[found.source]} ({plural(found.samples, 'sample')})"
    gain, promised = found.old_seconds - found.new_seconds, made.old_seconds - made.new_seconds
    if gain < 0:
        lost = format_share(-gain / found.old_seconds)
        return f"{said} transfers take {lost} longer with the new plan than with the old one"
    if not gain:
        return f"{said} the new plan gains nothing over the old one"
    if promised <= 0:
        return f"{said} it saves {format_duration(gain)} a step"
    return (
        f"{said} the new plan saves {format_duration(gain)} a step, "
        f"{format_share(gain / promised, 0)} of its saving on the data it was made from"
    )


def replan_sentence(made: "Replanned", old: str, new: str, profile: str) -> str:
    """Return the lines on the gain of the plan `new` and on the bytes that move."""
    before, after = format_duration(made.old_seconds), format_duration(made.new_seconds)
    within = f"pays off within {made.horizon:,} steps ({option('--horizon')})"
    most = made.max_move_bytes
    limited = (
        "" if most is None else f", and at most {format_bytes(most)} move ({option('--max-move')})"
    )
    fits = (
        "" if most is None else f" and takes at most {format_bytes(most)} ({option('--max-move')})"
    )
    if made.carried_over is not None:
        return (
            f"{new}: under {profile} the transfers of a step take {after}, and {before} if rows of "
            f"{old} moved only where they must; each further move {within}{limited}"
        )
    if not made.moves.changed_rows:
        return (
            f"{new}: nothing moves, as no move {within}{fits}; under {profile} the "
            f"transfers of a step take {before} with {old}"
        )
    return (
        f"{new}: under {profile} the transfers of a step take {after} instead of "
        f"{before} with {old}, for moving {format_bytes(made.migration.link_bytes)} once; "
        f"each move {within}{limited}"
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
    """Bytes by link, from ranks that are gone too; with many ranks only the links with most."""
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
