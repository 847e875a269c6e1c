"""Drift as `oper drift` prints it: the verdict and its reason, the tables to blame, the rest."""

from typing import Any

from oper.base.formatting import (
    format_digits,
    format_duration,
    format_percent,
    format_share,
    plural,
)
from oper.cli.shared.console import new_console, new_table

_MOST_TABLES = 10
_NAMED_TABLES = 3
_MOST_RANKS = 16
_SHOWN_RANKS = 8  # of more, the slowest
# Of an iteration: a loss below is what rounding leaves.
_NO_LOSS = 5e-5


def print_drift(content: dict[str, Any]) -> None:
    """Print the drift of a plan under one profile."""
    out = new_console()
    for sentence in verdict_sentences(content):
        out.print(sentence)
    out.print()
    tables = _losing(content)
    if tables:
        out.print(_tables(tables))
        left_out = len(content["tables"]) - min(len(tables), _MOST_TABLES)
        if left_out:
            out.print(f"and {plural(left_out, 'table')} that lost less; --json has them all")
        out.print("times are the table's part of a rank's iteration, the mean over ranks")
        out.print()
    _print_ranks(out, content["rank_seconds"])
    out.print()
    out.print(_hot_set(content["hot_set"]))


def verdict_sentences(content: dict[str, Any]) -> list[str]:
    """Whether to replan, why, and which tables are to blame."""
    seconds = content["objective_seconds"]
    longer = format_share(content["worse"])
    tolerated = format_percent(content["threshold"])
    what = "an iteration takes"
    if abs((1 + content["worse"]) * seconds["fresh"] - seconds["now"]) > _NO_LOSS * seconds["now"]:
        what = "the busiest link is in use"  # by --balance link the plan keeps that short
    under = f"under {content['profile']} {what}"
    if content["verdict"] == "replan":
        first = (
            f"Replan: {under} {longer} longer than with a plan made from scratch, more than the "
            f"{tolerated} that --worse tolerates. Run: oper replan {content['plan']} "
            f"{content['profile']} -o NEW"
        )
    elif content["worse"] < _NO_LOSS:
        first = f"Keep {content['plan']}: {under} no longer than with a plan made from scratch"
    else:
        first = (
            f"Keep {content['plan']}: {under} {longer} longer than with a plan made from scratch, "
            f"and --worse tolerates {tolerated}"
        )
    sentences = [first]
    losing = _losing(content)
    if losing:
        lost = sum(float(t["worse_seconds"]) for t in losing)
        named = ", ".join(
            f"{t['table']} ({format_share(t['worse_seconds'] / lost, 0)})"
            for t in losing[:_NAMED_TABLES]
        )
        sentences.append(f"Most of the time is lost in {named}")
    uneven = _unevenness(content, sum(float(t["worse_seconds"]) for t in losing))
    if uneven:
        sentences.append(uneven)
    times = {name: format_duration(seconds[name]) for name in ("then", "now", "fresh")}
    sentences.append(
        f"Predicted iteration: {times['then']} when the plan was made, {times['now']} now, "
        f"{times['fresh']} from scratch"
    )
    return sentences


def _unevenness(content: dict[str, Any], lost: float) -> str | None:
    """That the ranks are uneven, where this costs more than rows in the wrong places do."""
    seconds, now = content["objective_seconds"], content["rank_seconds"]["now"]
    if content["worse"] < _NO_LOSS or lost >= (seconds["now"] - seconds["fresh"]) / 2:
        return None
    return (
        f"The ranks have become uneven: an iteration takes {format_duration(min(now))} on the "
        f"fastest and {format_duration(max(now))} on the slowest"
    )


def _losing(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables whose rows are where they cost time, by what they lose; none where nothing is."""
    if content["worse"] < _NO_LOSS:
        return []
    least = _NO_LOSS * content["objective_seconds"]["now"]
    losing = [t for t in content["tables"] if t["worse_seconds"] > least]
    return sorted(losing, key=lambda t: -float(t["worse_seconds"]))


def _tables(tables: list[dict[str, Any]]) -> Any:
    made = new_table(
        "table", "time lost", "now", "from scratch", "in the slowest rank", "lookups min/max"
    )
    for entry in tables[:_MOST_TABLES]:
        made.add_row(
            entry["table"],
            format_duration(entry["worse_seconds"]),
            format_duration(entry["mean_seconds"]),
            format_duration(entry["fresh_mean_seconds"]),
            format_duration(entry["slowest_rank_seconds"]),
            format_share(entry["lookups_dob"], 1),
        )
    return made


def _print_ranks(out: Any, ranks: dict[str, list[float]]) -> None:
    """The iteration of each rank; of many, of the slowest."""
    table = new_table("rank", "when made", "now", "from scratch", "longer")
    shown = list(range(len(ranks["now"])))
    if len(shown) > _MOST_RANKS:
        shown = sorted(shown, key=lambda r: -ranks["now"][r])[:_SHOWN_RANKS]
    for rank in shown:
        then, now, fresh = (ranks[key][rank] for key in ("then", "now", "fresh"))
        longer = format_share(now / fresh - 1) if fresh > 0 else "-"
        times = [format_duration(value) for value in (then, now, fresh)]
        table.add_row(f"{rank:,}", *times, longer)
    out.print(table)
    if len(shown) < len(ranks["now"]):
        out.print(
            f"the {len(shown)} slowest; the fastest of {len(ranks['now']):,} takes "
            f"{format_duration(min(ranks['now']))}. --json has them all"
        )


def _hot_set(hot_set: dict[str, dict[str, Any]]) -> Any:
    """How much of all reads the rows take that the plan treats one by one."""
    made = new_table(
        "share of all accesses", "rows", "when made", "now", "of as many\nhottest rows now"
    )
    names = {"listed": "rows with an entry", "replicated": "of these, with copies"}
    for name, hot in hot_set.items():
        shares = [format_share(hot[key], 1) for key in ("then", "now", "hottest_now")]
        made.add_row(names[name], f"{hot['rows']:,}", *shares)
    return made


def print_windows(content: dict[str, Any]) -> None:
    """Print the drift of a plan under each window of a log."""
    out = new_console()
    out.print(windows_verdict(content))
    out.print()
    table = new_table(
        "window", "samples", "iterations", "iteration", "from scratch", "longer", "lost", "verdict"
    )
    for number, window in enumerate(content["windows"]):
        seconds = window["objective_seconds"]
        table.add_row(
            f"@{number}",
            f"{window['samples']:,}",
            format_digits(window["iterations"], 4),
            format_duration(seconds["now"]),
            format_duration(seconds["fresh"]),
            format_share(window["worse"]),
            format_duration(window["cost_seconds"]),
            window["verdict"],
        )
    out.print(table)
    out.print("lost: by all iterations of a window, against a plan made from scratch for it")


def windows_verdict(content: dict[str, Any]) -> str:
    """Whether to replan, by the windows, and what it costs not to."""
    windows = content["windows"]
    tolerated = format_percent(windows[0]["threshold"])
    over = [f"@{n}" for n, window in enumerate(windows) if window["verdict"] == "replan"]
    cost = (
        f"Not re-planning costs {format_duration(content['cost_seconds'])} in all, "
        f"{format_share(content['cost_share'])} of the time with a plan made for each window"
    )
    name, worst = content["plan"], format_share(max(window["worse"] for window in windows))
    if over:
        some = ", ".join(over[:_MOST_TABLES]) + (" and others" if len(over) > _MOST_TABLES else "")
        return (
            f"Replan: with {name} an iteration takes up to {worst} longer than with a plan made "
            f"from scratch, and more than the {tolerated} that --worse tolerates in "
            f"{len(over):,} of {plural(len(windows), 'window')} ({some}). {cost}"
        )
    return (
        f"Keep {name}: in no window of {content['profile']} does an iteration take more than "
        f"{worst} longer than with a plan made from scratch, and --worse tolerates {tolerated}. "
        f"{cost}"
    )
