"""Drift as `oper drift` prints it: the verdict and its reason, the tables to blame, the rest."""

from typing import TYPE_CHECKING, Any

from oper.base.formatting import (
    format_bytes,
    format_digits,
    format_duration,
    format_percent,
    format_share,
    plural,
)
from oper.base.spoken import all_figures, option, spoken
from oper.cli.judgement_text import (
    advice_sentence,
    basis_sentence,
    command_to_run,
    steps_sentence,
)
from oper.cli.shared.console import new_console, new_table, tell

if TYPE_CHECKING:
    from oper.plan.plan import Plan
    from oper.planner.replan.drift import Drift, HotSets, RankSeconds, TableDrift, WindowDrift

_MOST_TABLES = 10
_NAMED_TABLES = 3
_MOST_RANKS = 16
_SHOWN_RANKS = 8  # of more, the slowest
# Relative to a transfer time: a smaller loss is due to rounding.
_NO_LOSS = 5e-5


def print_drift(drift: "Drift", plan: str, profile: str, old: "Plan | None" = None) -> None:
    """Print the drift of the plan `old` under one profile, which have these names."""
    out = new_console()
    for sentence in verdict_sentences(drift, plan, profile):
        out.print(sentence)
    command = command_to_run(drift.judgement, old, plan, profile)
    # A vocabulary that is out of date calls for the commands that the first sentence names.
    if command is not None and not drift.outdated_vocabularies:
        tell(command)
    out.print()
    out.print(_candidates(drift))
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
    """Return the advice, what it rests on, and the tables to blame."""
    sentences = [advice_sentence(drift.judgement, plan, profile)]
    if drift.outdated_vocabularies:
        sentences = [_vocabulary_sentence(drift), steps_sentence(drift.judgement, plan, profile)]
    sentences.append(basis_sentence(drift.judgement))
    if drift.made_step_seconds is not None:
        made = format_duration(drift.made_step_seconds)
        sentences.append(
            f"For the data it was made from, {plan} was predicted to take {made} a step"
        )
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
    return sentences


def _vocabulary_sentence(drift: "Drift") -> str:
    tables = drift.outdated_vocabularies
    named = ", ".join(
        f"{each.table} ({format_share(each.unknown_share, 0)} of its accesses)"
        for each in tables[:_NAMED_TABLES]
    )
    more = ", and others" if len(tables) > _NAMED_TABLES else ""
    counted = spoken("oper profile LOG -o PROFILE", "oper.profile(log)")
    return (
        f"Drift in vocabulary: the plan does not know many values of {named}{more}; they all read "
        f"row 0, under any plan for these rows. Count the log without the plan's vocabularies, "
        f"{counted}, and plan from scratch"
    )


def _candidates(drift: "Drift") -> Any:
    """Return a table of the plans that were judged."""
    from oper.analysis.wording import CHOICES

    made = new_table("plan", "step (predicted)", "bytes moved", "time to move")
    for each in drift.judgement.candidates:
        moves = format_bytes(each.moved_bytes), format_duration(each.moving_seconds)
        made.add_row(CHOICES[each.choice], format_duration(each.step_seconds), *moves)
    return made


def _unevenness(drift: "Drift", lost: float) -> str | None:
    """Return a sentence that the ranks are uneven, if this costs more than rows in wrong places
    do."""
    now = drift.rank_seconds.now.tolist()
    longer = max(now) - float(drift.rank_seconds.fresh.max())
    if longer < _NO_LOSS * max(now) or lost >= longer / 2:
        return None
    return (
        f"The ranks have become uneven: transfers take {format_duration(min(now))} on the "
        f"fastest and {format_duration(max(now))} on the slowest"
    )


def _losing(drift: "Drift") -> "list[TableDrift]":
    """Return the tables whose rows are where they cost time, by what they lose; none if transfers
    take no longer than with a plan from scratch."""
    now, fresh = (float(of.max()) for of in (drift.rank_seconds.now, drift.rank_seconds.fresh))
    if now - fresh < _NO_LOSS * now:
        return []
    losing = [table for table in drift.tables if table.worse_seconds > _NO_LOSS * now]
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
    table = new_table("transfers of rank", "when made", "now", "from scratch", "longer")
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
    from oper.analysis.wording import advice_words, step_columns, steps_of

    out = new_console()
    out.print(windows_verdict(drift, plan, profile))
    out.print()
    judgements = [window.drift.judgement for window in drift.windows]
    columns = step_columns([each.step_seconds for each in judgements])
    table = new_table("window", "samples", "steps", "step", *columns, "lost", "advice")
    for number, (window, judgement) in enumerate(zip(drift.windows, judgements, strict=True)):
        own, *steps = steps_of(judgement.step_seconds, columns)
        if judgement.source is None:
            steps[1] += " *"
        table.add_row(
            f"@{number}",
            f"{window.samples:,}",
            format_digits(window.iterations, 4),
            own,
            *steps,
            format_duration(window.cost_seconds),
            advice_words(window.drift.advice, window.too_small),
        )
    out.print(table)
    out.print("lost: by all steps of a window, compared with the best other plan")
    if any(window.drift.judgement.source is None for window in drift.windows):
        out.print(
            "*: judged on the data that it was made from, because the window is not split in time "
            "and is the first one, or because the plan was made from the window"
        )


def windows_verdict(drift: "WindowDrift", plan: str, profile: str) -> str:
    """Return the advice on replanning by the windows, and the cost of keeping the plan."""
    from oper.analysis.wording import OUTDATED_VOCABULARIES

    judged = {number: window.drift for number, window in drift.judged.items()}
    left_out = _left_out(drift)
    if not judged:
        return f"Keep {plan}: no window of {profile} is large enough to tell. {left_out}"
    tolerated = format_percent(drift.threshold)
    over = [f"@{number}" for number, window in judged.items() if window.verdict == "replan"]
    cost = (
        f"Not re-planning costs {format_duration(drift.cost_seconds)} in all, "
        f"{format_share(drift.cost_share)} of the time with the best other plan"
    )
    if left_out:
        cost += f". {left_out}"
    most = max(window.judgement.worse for window in judged.values())
    worst = format_share(most)
    if any(window.outdated_vocabularies for window in judged.values()):
        return (
            f"{OUTDATED_VOCABULARIES}. A step takes up to {worst} longer than with the best other "
            f"plan for the same rows. {cost}"
        )
    if over:
        some = ", ".join(over[:_MOST_TABLES]) + (" and others" if len(over) > _MOST_TABLES else "")
        return (
            f"Replan: with {plan} a step takes up to {worst} longer than with the best other plan; "
            f"another plan pays, and saves more than the {tolerated} that {option('--worse')} "
            f"tolerates, in {len(over):,} of {plural(len(judged), 'window')} ({some}). {cost}"
        )
    if most <= 0:
        kept = f"Keep {plan}: in no window of {profile} does another plan have a shorter step"
        return f"{kept}. {left_out}" if left_out else kept
    return (
        f"Keep {plan}: in no window of {profile} does another plan pay and save more than the "
        f"{tolerated} that {option('--worse')} tolerates; a step takes up to {worst} longer than "
        f"with the best other plan. {cost}"
    )


def _left_out(drift: "WindowDrift") -> str:
    """Return a sentence on windows too small to tell drift from chance; "" without such windows."""
    from oper.planner.enough_accesses import ENOUGH_ACCESSES

    small = [f"@{number}" for number, window in enumerate(drift.windows) if window.too_small]
    if not small:
        return ""
    some = ", ".join(small[:_MOST_TABLES]) + (" and others" if len(small) > _MOST_TABLES else "")
    return (
        f"Left out as too small: {plural(len(small), 'window')} ({some}) of fewer than "
        f"{ENOUGH_ACCESSES:,} accesses a rank, where chance looks like drift"
    )
