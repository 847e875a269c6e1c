"""Drift as `oper drift` prints it: the verdict and its reason, the tables to blame, the rest."""

from typing import TYPE_CHECKING, Any

from oper.base.formatting import (
    format_digits,
    format_duration,
    format_percent,
    format_share,
    plural,
)
from oper.base.spoken import all_figures, option, spoken, typed_path
from oper.cli.shared.console import new_console, new_table, tell

if TYPE_CHECKING:
    from oper.planner.replan.drift import Drift, HotSets, RankSeconds, TableDrift, WindowDrift

_MOST_TABLES = 10
_NAMED_TABLES = 3
_MOST_RANKS = 16
_SHOWN_RANKS = 8  # of more, the slowest
# Relative to a transfer time: a smaller loss is due to rounding.
_NO_LOSS = 5e-5


def print_drift(drift: "Drift", plan: str, profile: str) -> None:
    """Print the drift of a plan under one profile, which have these names."""
    out = new_console()
    for sentence in verdict_sentences(drift, plan, profile):
        out.print(sentence)
    if drift.verdict == "replan":
        typed = f"oper replan {typed_path(plan)} {typed_path(profile)} -o NEW"
        tell(f"Run: {spoken(typed, 'oper.replan(plan, profile)')}")
    out.print()
    tables = _losing(drift)
    if tables:
        out.print(_tables(tables))
        left_out = len(drift.tables) - min(len(tables), _MOST_TABLES)
        if left_out:
            out.print(f"and {plural(left_out, 'table')} that lost less; {all_figures()} them all")
        out.print("times are the table's part of a rank's transfer time, the mean over ranks")
        out.print()
    _print_ranks(out, drift.rank_seconds)
    out.print()
    out.print(_hot_set(drift.hot_set))


def verdict_sentences(drift: "Drift", plan: str, profile: str) -> list[str]:
    """Return the advice on replanning, its reason, and the tables that lost the most."""
    seconds = drift.objective_seconds
    longer = format_share(drift.judged_worse)
    tolerated = format_percent(drift.threshold)
    what = "the transfer time of a step is"
    if abs((1 + drift.worse) * seconds.fresh - seconds.now) > _NO_LOSS * seconds.now:
        what = "the busiest link is in use"  # by --balance link the plan keeps that short
    data, fresh = _judged_on(drift, profile)
    under = f"{data} {what}"
    if drift.verdict == "replan":
        first = (
            f"Replan: {under} {longer} longer than with {fresh}, more than the "
            f"{tolerated} that {option('--worse')} tolerates"
        )
    elif drift.judged_worse < _NO_LOSS:
        first = f"Keep {plan}: {under} no longer than with {fresh}"
    else:
        first = (
            f"Keep {plan}: {under} {longer} longer than with {fresh}, "
            f"and {option('--worse')} tolerates {tolerated}"
        )
    sentences = [first]
    losing = _losing(drift)
    lost = sum(table.worse_seconds for table in losing)
    if losing:
        named = ", ".join(
            f"{table.table} ({format_share(table.worse_seconds / lost, 0)})"
            for table in losing[:_NAMED_TABLES]
        )
        sentences.append(f"Most of the time is lost in {named}")
    uneven = _unevenness(drift, lost)
    if uneven:
        sentences.append(uneven)
    sentences.append(
        f"Transfer time of a step: {format_duration(seconds.then)} when the plan was made, "
        f"{format_duration(seconds.now)} now, {format_duration(seconds.fresh)} from scratch for "
        "these very data, within the plan's memory"
    )
    if drift.unseen is not None:
        now, anew = map(format_duration, drift.judged_seconds)
        sentences.append(f"The verdict is of {now} with {plan} {data}, and {anew} with {fresh}")
    else:
        sentences.append(
            "That plan from scratch is judged on the data it was made from, on which it is at its "
            "best: what replanning gains is not measured on data the plan has not seen"
        )
    return sentences


def _judged_on(drift: "Drift", profile: str) -> tuple[str, str]:
    """Return the data that the verdict is of, and the plan from scratch that it compares with."""
    from oper.analysis.wording import HELD_OUT_DATA
    from oper.plan.reference_figures import HeldOutSource

    unseen = drift.unseen
    if unseen is None:
        return f"under {profile}", "a plan made from scratch"
    if unseen.source == HeldOutSource.THIS_WINDOW:
        return f"under {profile}", "a plan made from scratch for the window before"
    return f"on {HELD_OUT_DATA[unseen.source]}", f"a plan made from scratch for {profile}"


def _unevenness(drift: "Drift", lost: float) -> str | None:
    """Says that the ranks are uneven, where this costs more than rows in wrong places do."""
    seconds, now = drift.objective_seconds, drift.rank_seconds.now.tolist()
    if drift.worse < _NO_LOSS or lost >= (seconds.now - seconds.fresh) / 2:
        return None
    return (
        f"The ranks have become uneven: transfers take {format_duration(min(now))} on the "
        f"fastest and {format_duration(max(now))} on the slowest"
    )


def _losing(drift: "Drift") -> "list[TableDrift]":
    """Return the tables whose rows are where they cost time, by what they lose; none where nothing
    is."""
    if drift.worse < _NO_LOSS:
        return []
    least = _NO_LOSS * drift.objective_seconds.now
    losing = [table for table in drift.tables if table.worse_seconds > least]
    return sorted(losing, key=lambda table: -table.worse_seconds)


def _tables(tables: "list[TableDrift]") -> Any:
    made = new_table(
        "table", "time lost", "now", "from scratch", "in the slowest rank", "lookups min/max"
    )
    for table in tables[:_MOST_TABLES]:
        made.add_row(
            table.table,
            format_duration(table.worse_seconds),
            format_duration(table.mean_seconds),
            format_duration(table.fresh_mean_seconds),
            format_duration(table.slowest_rank_seconds),
            format_share(table.lookups_dob, 1),
        )
    return made


def _print_ranks(out: Any, ranks: "RankSeconds") -> None:
    """Print the transfer times of the ranks, or of the slowest of many."""
    table = new_table("rank", "when made", "now", "from scratch", "longer")
    of_ranks = [*zip(ranks.then.tolist(), ranks.now.tolist(), ranks.fresh.tolist(), strict=True)]
    shown = list(range(len(of_ranks)))
    if len(shown) > _MOST_RANKS:
        shown = sorted(shown, key=lambda rank: -float(ranks.now[rank]))[:_SHOWN_RANKS]
    for rank in shown:
        _, now, fresh = of_ranks[rank]
        longer = format_share(now / fresh - 1) if fresh > 0 else "-"
        table.add_row(f"{rank:,}", *map(format_duration, of_ranks[rank]), longer)
    out.print(table)
    if len(shown) < len(of_ranks):
        out.print(
            f"the {len(shown)} slowest; the fastest of {len(of_ranks):,} takes "
            f"{format_duration(float(ranks.now.min()))}. {all_figures()} them all"
        )


def _hot_set(hot: "HotSets") -> Any:
    """Return a table of the share of reads of rows that the plan places one by one."""
    made = new_table(
        "share of all accesses", "rows", "when made", "now", "of as many\nhottest rows now"
    )
    for name, rows in (
        ("listed rows", hot.listed),
        ("of these, with copies", hot.replicated),
    ):
        shares = [format_share(share, 1) for share in (rows.then, rows.now, rows.hottest_now)]
        made.add_row(name, f"{rows.rows:,}", *shares)
    return made


def print_windows(drift: "WindowDrift", plan: str, profile: str) -> None:
    """Print the drift of a plan under each window of a log, which have these names."""
    out = new_console()
    out.print(windows_verdict(drift, plan, profile))
    out.print()
    table = new_table(
        "window",
        "samples",
        "steps",
        "transfers",
        "from scratch",
        "longer",
        "lost",
        "verdict",
    )
    for number, window in enumerate(drift.windows):
        now, fresh = map(format_duration, window.drift.judged_seconds)
        table.add_row(
            f"@{number}",
            f"{window.samples:,}",
            format_digits(window.iterations, 4),
            now,
            fresh if window.drift.unseen else f"{fresh} *",
            format_share(window.drift.judged_worse),
            format_duration(window.cost_seconds),
            "too small" if window.too_small else window.drift.verdict,
        )
    out.print(table)
    out.print(
        "lost: by all steps of a window, against a plan made from scratch for the window before it"
    )
    if any(window.drift.unseen is None for window in drift.windows):
        out.print(
            "*: for the window itself, as none is before it, or the plan was made from it; such a "
            "plan is at its best there"
        )


def windows_verdict(drift: "WindowDrift", plan: str, profile: str) -> str:
    """Return the advice on replanning by the windows, and the cost of keeping the plan."""
    judged = {number: window.drift for number, window in drift.judged.items()}
    left_out = _left_out(drift)
    if not judged:
        return f"Keep {plan}: no window of {profile} is large enough to tell. {left_out}"
    tolerated = format_percent(drift.threshold)
    over = [f"@{number}" for number, window in judged.items() if window.verdict == "replan"]
    cost = (
        f"Not re-planning costs {format_duration(drift.cost_seconds)} in all, "
        f"{format_share(drift.cost_share)} of the time with a plan made after each window"
    )
    if left_out:
        cost += f". {left_out}"
    worst = format_share(max(window.judged_worse for window in judged.values()))
    if over:
        some = ", ".join(over[:_MOST_TABLES]) + (" and others" if len(over) > _MOST_TABLES else "")
        return (
            f"Replan: with {plan} transfers take up to {worst} longer than with a plan made "
            f"from scratch, and more than the {tolerated} that {option('--worse')} tolerates in "
            f"{len(over):,} of {plural(len(judged), 'window')} ({some}). {cost}"
        )
    return (
        f"Keep {plan}: in no window of {profile} do transfers take more than "
        f"{worst} longer than with a plan made from scratch, and {option('--worse')} tolerates "
        f"{tolerated}. {cost}"
    )


def _left_out(drift: "WindowDrift") -> str:
    """Names the windows that are too small to tell drift from chance; "" where there are none."""
    from oper.planner.enough_accesses import ENOUGH_ACCESSES

    small = [f"@{number}" for number, window in enumerate(drift.windows) if window.too_small]
    if not small:
        return ""
    some = ", ".join(small[:_MOST_TABLES]) + (" and others" if len(small) > _MOST_TABLES else "")
    return (
        f"Left out as too small: {plural(len(small), 'window')} ({some}) of fewer than "
        f"{ENOUGH_ACCESSES:,} accesses a rank, where chance looks like drift"
    )
