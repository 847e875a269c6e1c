"""What `oper profile` and `oper profiles` print, as the JSON object and as text."""

from typing import TYPE_CHECKING, Any

from oper.base.formatting import format_digits, format_number, format_percent
from oper.cli.shared.console import new_console, new_table

if TYPE_CHECKING:
    from oper.profiling.profile import Profile


_MOST_TABLES = 40
_MOST_NAMES = 20


def content_of(name: str, profiles: "list[Profile]") -> dict[str, Any]:
    """The JSON object of one profile, or of the windows of one folder."""
    from oper.profiling.access_summary import summarise
    from oper.profiling.profile import merge

    profile = profiles[0] if len(profiles) == 1 else merge(profiles)
    whole, tables = summarise(profile)
    content = {
        "profile": name,
        "samples": profile.samples,
        "rows": whole.rows,
        "accesses": whole.accesses,
        "rows_never_accessed": whole.rows_never_accessed,
        "hot_accesses_share": whole.hot_accesses_share,
        "counter_bytes": profile.accesses.itemsize,
        "tables": [
            {**summary.to_dict(), "ids": table.ids.kind}
            for summary, table in zip(tables, profile.tables, strict=True)
        ],
        "left_out": profiles[0].source.get("left_out", {}),
        "skipped_ids": profile.source.get("skipped_ids", {}),
        "distinct": None if profile.distinct is None else profile.distinct.to_dict(),
        "sampled": profile.source.get("sampled"),
    }
    if "window" in profiles[0].source:
        content["windows"] = [
            {
                "samples": window.samples,
                "accesses": int(window.stored("accesses").sum(dtype="uint64")),
                **window.source["window"],
            }
            for window in profiles
        ]
    return content


def left_out_line(left_out: dict[str, str]) -> str:
    """The columns that are in no table, the first of them with each reason."""
    by_reason: dict[str, list[str]] = {}
    for column, reason in left_out.items():
        by_reason.setdefault(reason, []).append(column or "''")
    parts = [f"{_some(columns)} ({reason})" for reason, columns in by_reason.items()]
    return f"left out: {_some(parts)}; name the columns of ids with --columns"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f", … {more:,} more" if more > 0 else "")


def print_profile(content: dict[str, Any]) -> None:
    """Print the JSON object as text, at most 100 columns wide."""
    out = new_console()
    out.print(f"{content['profile']}: {content['samples']:,} samples")
    out.print(_tables(content))
    if content["counter_bytes"] > 4:
        out.print(f"counters            {content['counter_bytes']} bytes each, as counts exceed 4")
    for table, number in content["skipped_ids"].items():
        out.print(f"skipped ids         {number:,} of table {table}")
    if content["distinct"]:
        out.print(_distinct_line(content["distinct"]))
    if content["sampled"]:
        for line in _sampling_lines(content["sampled"]):
            out.print(line)
    if "windows" in content:
        out.print(_windows(content["windows"]))
    if "seconds" in content:
        out.print(
            f"took                {content['seconds']:.2f} s, "
            f"{format_number(content['accesses_per_second'])} accesses/s with reading"
        )


def _tables(content: dict[str, Any]) -> Any:
    made = new_table("table", "rows", "accesses", "a sample", "never read", "in hottest 1%", "ids")
    by_accesses = sorted(content["tables"], key=lambda t: -t["accesses"])
    shown = {t["name"] for t in by_accesses[:_MOST_TABLES]}
    samples = max(content["samples"], 1)

    def add(entry: dict[str, Any], name: str, ids: str) -> None:
        made.add_row(
            name,
            f"{entry['rows']:,}",
            f"{entry['accesses']:,}",
            format_digits(entry["accesses"] / samples, 3),
            f"{entry['rows_never_accessed'] / max(entry['rows'], 1):.1%}",
            f"{entry['hot_accesses_share']:.1%}",
            ids,
        )

    for entry in content["tables"]:
        if entry["name"] in shown:
            add(entry, entry["name"], entry["ids"] + (", bags" if entry["bagged"] else ""))
    left_out = len(content["tables"]) - len(shown)
    if left_out:
        made.add_row(f"… {left_out:,} more")
    add(content, "all", "")
    return made


def _distinct_line(distinct: dict[str, Any]) -> str:
    ratios = [distinct["rank_ratio"], distinct["union_ratio"]]
    low, high = ([min(r), max(r)] for r in ratios)
    return (
        f"distinct rows       of {distinct['batches']:,} batches of {distinct['batch_size']:,} on "
        f"{distinct['ranks']} ranks, relative to independent samples:\n"
        f"                    a rank {low[0]:.3f} to {low[1]:.3f}, all ranks {high[0]:.3f} to "
        f"{high[1]:.3f} (by table)"
    )


def _sampling_lines(sampled: dict[str, Any]) -> list[str]:
    share = format_percent(sampled["share"])
    if "hot_share" not in sampled:
        return [f"sample              {share} of the samples, summed over parts"]
    return [
        f"sample              {share} of the samples; expected errors:",
        f"  hot set           {sampled['hot_rows_missed']:.2%} of the hottest "
        f"{sampled['hot_share']:.0%} of rows are missed, with "
        f"{sampled['hot_accesses_missed']:.2%} of their accesses",
        f"  balance           {sampled['rank_lookups_error']:.3%} standard error of a rank's share "
        f"of the lookups, {sampled['ranks']} ranks",
    ]


def _windows(windows: list[dict[str, Any]]) -> Any:
    made = new_table("window", "from", "to", "samples", "accesses", left=3)
    for number, window in enumerate(windows):
        first = window.get("from", window.get("from_value", window.get("from_sample")))
        last = window.get("to", window.get("to_value", window.get("to_sample")))
        made.add_row(
            f"@{number}" if len(windows) > 1 else "",
            _border(first),
            _border(last),
            f"{window['samples']:,}",
            f"{window['accesses']:,}",
        )
    return made


def _border(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"
