"""The summary of a profile as `oper profile` and `oper profiles` print it, in JSON or as text."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from oper.base.formatting import format_digits, format_number, format_percent, plural
from oper.base.spoken import typed_path
from oper.cli.shared.console import emit, new_console, new_table, tell

if TYPE_CHECKING:
    from oper.profiling.distinct_rows import Distinct
    from oper.profiling.profile import Profile
    from oper.profiling.profile_summary import AccessSummary, ProfileSummary
    from oper.profiling.sampling import Sampled

OUTPUT = typer.Option(..., "-o", "--output", help="The profile folder to write.", metavar="FOLDER")

_MOST_TABLES = 40
# In the short text, which has at most 15 lines unless samples were drawn or batches measured.
_FEW_TABLES = 4
_FEW_WINDOWS = 2


def report_written(output: Path, profiles: "list[Profile]", seconds: float, as_json: bool) -> None:
    """Print a short summary of the profile folder `output`, the speed, and the next commands."""
    from oper.profiling.profile_summary import summarise

    summary = summarise(profiles)
    accesses_per_second = summary.whole.accesses / seconds
    content = {
        "profile": str(output),
        **summary.to_dict(),
        "seconds": seconds,
        "accesses_per_second": accesses_per_second,
    }

    def text() -> None:
        print_profile(str(output), summary, brief=True)
        planned = typed_path(f"{output}{'@0' if len(profiles) > 1 else ''}")
        for name, said in (
            ("took", f"{seconds:.2f} s, {format_number(accesses_per_second)} accesses/s"),
            ("see each table", f"oper profiles show {typed_path(output)}"),
            ("plan from it", f"oper plan {planned} --topology NAME -o plan"),
        ):
            tell(f"{name:<20}{said}")

    emit(as_json, content, text, written=True)


def print_profile(name: str, summary: "ProfileSummary", brief: bool = False) -> None:
    """Print the summary as text, at most 100 columns wide; if `brief`, of a few tables."""
    from oper.profiling.unknown_values import UnknownValues

    out = new_console()
    out.print(f"{name}: {summary.samples:,} samples of {plural(len(summary.tables), 'table')}")
    out.print(_tables(summary, _FEW_TABLES if brief else _MOST_TABLES))
    if not brief and any(t.bag_lengths and t.bag_lengths.longest > 1 for t in summary.tables):
        out.print(_bags(summary))
    if summary.counter_bytes > 4:
        out.print(f"counters            {summary.counter_bytes} bytes each, as counts exceed 4")
    skipped = summary.skipped_ids
    if brief and skipped:
        skipped = {plural(len(skipped), "table"): sum(skipped.values())}
    for table, number in skipped.items():
        out.print(f"skipped ids         {number:,} of {'' if brief else 'table '}{table}")
    accesses = Counter({table.name: table.accesses for table in summary.tables})
    if sentence := UnknownValues(Counter(summary.unknown_accesses), accesses).sentence():
        out.print(sentence)
    if summary.distinct:
        out.print(_distinct_line(summary.distinct))
    if summary.sampled:
        for line in _sampling_lines(summary.sampled):
            out.print(line)
    if summary.windows is not None:
        out.print(_windows(summary, brief))


def _tables(summary: "ProfileSummary", most: int) -> Any:
    made = new_table("table", "rows", "accesses", "a sample", "never read", "in hottest 1%", "ids")
    shown = _most_accessed(summary.tables, most)
    samples = max(summary.samples, 1)

    def add(entry: "AccessSummary", ids: str) -> None:
        made.add_row(
            entry.name,
            f"{entry.rows:,}",
            f"{entry.accesses:,}",
            format_digits(entry.accesses / samples, 3),
            f"{entry.rows_never_accessed / max(entry.rows, 1):.1%}",
            f"{entry.hot_accesses_share:.1%}",
            ids,
        )

    for table in shown:
        add(table, table.ids + (", bags" if table.bagged else ""))
    if more := len(summary.tables) - len(shown):
        made.add_row(f"… {more:,} more")
    add(summary.whole, "")
    return made


def _bags(summary: "ProfileSummary") -> Any:
    """Return the lengths of bags, of tables of which some bag has several ids, and which of the ids
    after a bag's first name a row again."""
    made = new_table(
        "bags of table", "bags", "empty", "mean length", "99% up to", "longest", "repeats"
    )
    bagged = [t for t in summary.tables if t.bag_lengths and t.bag_lengths.longest > 1]
    shown = _most_accessed(bagged, _MOST_TABLES)
    for table in shown:
        bags = table.bag_lengths
        assert bags is not None, "it has bags"
        made.add_row(
            table.name,
            f"{bags.bags:,}",
            f"{bags.empty_share:.1%}",
            format_digits(bags.mean, 3),
            f"{bags.percentile_99:,}",
            f"{bags.longest:,}",
            f"{1 - bags.new_share:.1%}",
        )
    if more := len(bagged) - len(shown):
        made.add_row(f"… {more:,} more")
    return made


def _most_accessed(tables: "Sequence[AccessSummary]", most: int) -> "list[AccessSummary]":
    """Return the `most` tables with the most accesses, then rows, in their order."""
    by_accesses = sorted(tables, key=lambda table: (-table.accesses, -table.rows))
    names = {table.name for table in by_accesses[:most]}
    return [table for table in tables if table.name in names]


def _distinct_line(distinct: "Distinct") -> str:
    rank, union = distinct.rank_ratio, distinct.union_ratio
    return (
        f"distinct rows       of {distinct.batches:,} batches of {distinct.batch_size:,} on "
        f"{distinct.ranks} ranks, relative to independent samples:\n"
        f"                    a rank {min(rank):.3f} to {max(rank):.3f}, all ranks "
        f"{min(union):.3f} to {max(union):.3f} (by table)"
    )


def _sampling_lines(sampled: "Sampled") -> list[str]:
    share, error = format_percent(sampled.share), sampled.error
    if error is None:
        return [f"sample              {share} of the samples, summed over parts"]
    return [
        f"sample              {share} of the samples; expected errors:",
        f"  hot set           {error.hot_rows_missed:.2%} of the hottest "
        f"{error.hot_share:.0%} of rows are missed, with "
        f"{error.hot_accesses_missed:.2%} of their accesses",
        f"  balance           {error.rank_lookups_error:.3%} standard error of a rank's share "
        f"of the lookups, {error.ranks} ranks",
    ]


def _windows(summary: "ProfileSummary", brief: bool) -> Any:
    """Return bounds and sizes of the windows, and of the part held out; if `brief`, of the last
    ones."""
    made = new_table("window", "from", "to", "samples", "accesses", left=3)
    windows, held_out = summary.windows or (), summary.held_out
    names = [f"@{number}" for number in range(len(windows))]
    if len(names) == 1:
        names = ["" if held_out is None else "counted"]
    shown = [*zip(names, windows, strict=True)]
    shown += [] if held_out is None else [("held out", held_out)]
    if brief and len(shown) > _FEW_WINDOWS:
        made.add_row(f"… {len(shown) - _FEW_WINDOWS + 1:,} more")
        shown = shown[1 - _FEW_WINDOWS :]
    for name, window in shown:
        made.add_row(
            name,
            _border(window.first),
            _border(window.last),
            f"{window.samples:,}",
            f"{window.accesses:,}",
        )
    return made


def _border(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"
