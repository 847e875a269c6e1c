"""Output of `oper drift`: the verdict and its reason, the tables to blame, then the rest."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from oper.cli.drift_text import print_drift, print_windows, verdict_sentences, windows_verdict
from oper.plan.reference_figures import HeldOutSource
from oper.planner.replan.drift import (
    Drift,
    HotSet,
    HotSets,
    Objective,
    RankSeconds,
    TableDrift,
    UnseenDrift,
    Window,
    WindowDrift,
)

Capture = pytest.CaptureFixture[str]


def table(name: str, lost: float) -> TableDrift:
    return TableDrift(
        table=name,
        slowest_rank_seconds=2e-6,
        mean_seconds=1e-6 + lost,
        fresh_mean_seconds=1e-6,
        lookups_dob=0.5,
    )


def content(now: float, tables: list[TableDrift], threshold: float = 0.05, ranks: int = 4) -> Drift:
    hot = HotSet(rows=5, then=0.5, now=0.4, hottest_now=0.45)
    fresh = np.full(ranks, 1e-5)
    return Drift(
        worse=now / 1e-5 - 1,
        threshold=threshold,
        unseen=None,
        objective_seconds=Objective(9e-6, now, 1e-5),
        rank_seconds=RankSeconds(np.full(ranks, 9e-6), np.append(fresh[1:], now), fresh),
        hot_set=HotSets(hot, hot),
        tables=tuple(tables),
    )


def sentences(drift: Drift) -> list[str]:
    return verdict_sentences(drift, "plan", "w@3")


def test_the_verdict_and_its_reason_come_first_and_the_guilty_tables_next(capsys: Capture) -> None:
    found = content(1.2e-5, [table("a", 1e-7), table("b", -2e-16), table("c", 9e-7)])
    first, second, third, fourth = sentences(found)
    assert first == (
        "Replan: under w@3 the transfer time of a step is 20.00% longer than with a plan made "
        "from scratch, more than the 5% that --worse tolerates"
    )
    assert second == "Most of the time is lost in c (90%), a (10%)"
    assert third.startswith("Transfer time of a step: 9 µs when the plan was made, 12 µs now")
    assert fourth.endswith("not measured on data the plan has not seen")
    print_drift(found, "plan", "w@3")
    text = capsys.readouterr().out
    places = [
        text.index(words)
        for words in (
            "Replan",
            "Most of",
            "\nRun: oper replan plan w@3 -o NEW\n",
            "\nc ",
            "\na ",
            "\nrank",
            "share",
        )
    ]
    assert places == sorted(places)
    assert "\nb " not in text  # it lost nothing
    assert "and 1 table that lost less" in text


def test_a_plan_that_is_as_good_as_new_has_no_culprits() -> None:
    said = sentences(content(1e-5, [table("a", 3e-22), table("b", -1e-20)]))
    assert said[0] == (
        "Keep plan: under w@3 the transfer time of a step is no longer than with a plan made from "
        "scratch"
    )
    assert len(said) == 3
    kept = sentences(content(1.02e-5, [table("a", 2e-7)]))[0]
    assert "2.00% longer" in kept
    assert kept.endswith("and --worse tolerates 5%")


def test_the_verdict_is_of_data_that_neither_plan_was_made_from() -> None:
    found = content(1.2e-5, [])
    this = UnseenDrift(HeldOutSource.THIS_WINDOW, 100, 0.02, 1.2e-5, 1.2e-5 / 1.02)
    kept = replace(found, unseen=this)
    assert kept.verdict == "keep"
    said = sentences(kept)
    assert said[0] == (
        "Keep plan: under w@3 the transfer time of a step is 2.00% longer than with a plan made "
        "from scratch "
        "for the window before, and --worse tolerates 5%"
    )
    assert not any("not measured" in sentence for sentence in said)
    later = replace(this, source=HeldOutSource.LAST_PART, worse=0.3)
    said = sentences(replace(found, unseen=later))
    assert said[0].startswith(
        "Replan: on the held-out last part of the log the transfer time of a step is 30.00% longer "
        "than with a plan made from scratch for w@3, more than"
    )


def test_uneven_ranks_are_named_where_no_table_explains_the_loss() -> None:
    said = " ".join(sentences(content(2e-5, [table("a", 1e-8)])))
    assert "uneven: transfers take 10 µs on the fastest and 20 µs on the slowest" in said
    assert "uneven" not in " ".join(sentences(content(1.2e-5, [table("a", 2e-6)])))


def test_plans_that_even_out_links_are_judged_by_them() -> None:
    found = replace(content(1e-5, []), worse=0.5)
    assert "the busiest link is in use 50.00% longer" in sentences(found)[0]


NAMES = [f"table_with_a_name_of_sixty_characters_as_some_models_have_{n:03}" for n in range(856)]


@pytest.mark.parametrize(
    "names", [NAMES, [f"表格名称很长的嵌入表格用于测试列宽度{n}" for n in range(30)]]
)
def test_many_ranks_and_long_names_keep_100_columns(capsys: Capture, names: list[str]) -> None:
    found = content(
        1.5e-5, [table(name, 1e-7 - n * 1e-12) for n, name in enumerate(names)], 0.05, 1024
    )
    print_drift(found, "plan", "w@3")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 100
    assert len(lines) < 60
    assert any("the fastest of 1,024 takes 10 µs" in line for line in lines)
    assert any(
        f"and {len(names) - 10:,} tables" in line or "tables that lost" in line for line in lines
    )


@given(
    st.floats(1e-9, 1e3),
    st.lists(st.floats(-1e-3, 1e-3), max_size=4),
    st.floats(1, 3),
)
def test_no_number_has_an_exponent_or_a_sign_before_zero(
    fresh: float, losses: list[float], factor: float
) -> None:
    found = content(1e-5 * factor, [table(f"t{n}", fresh * x) for n, x in enumerate(losses)])
    text = " ".join(sentences(found))
    assert not re.search(r"\d[eE][-+]?\d|-0\b(?!\.)", text), text


def windows(verdicts: list[str]) -> WindowDrift:
    """Windows of these verdicts, in which not re-planning costs 1 ms in all, 1 % of the time."""
    seconds, iterations = 1e-5, 1e-1 / 1e-5 / len(verdicts)
    drifts = [
        replace(
            content(seconds * 1.01, []),
            worse=0.02 if verdict == "keep" else 0.07,
            objective_seconds=Objective(seconds, seconds * 1.01, seconds),
        )
        for verdict in verdicts
    ]
    found = WindowDrift(tuple(Window(drift, 10, 10**9, iterations) for drift in drifts))
    assert [window.drift.verdict for window in found.windows] == verdicts
    return found


def test_windows_name_those_that_are_too_slow(capsys: Capture) -> None:
    keep = windows_verdict(windows(["keep"] * 3), "plan", "w")
    assert keep.startswith("Keep plan: in no window of w do transfers take more than 2.00% ")
    assert "Not re-planning costs 1 ms in all, 1.00% of" in keep
    found = windows(["keep", "replan", "keep", "replan"])
    assert "in 2 of 4 windows (@1, @3)" in windows_verdict(found, "plan", "w")
    assert "(@0, @1, @2, @3, @4, @5, @6, @7, @8, @9 and others)" in windows_verdict(
        windows(["replan"] * 40), "plan", "w"
    )
    long = replace(found, windows=(replace(found.windows[0], iterations=123_456.789),) * 2)
    print_windows(found, "plan", "w")
    text = capsys.readouterr().out
    assert text.startswith("Replan: ")
    assert " 2,500 " in text
    print_windows(long, "plan", "w")
    text += capsys.readouterr().out
    assert " 123,500 " in text
    assert max(map(len, text.splitlines())) <= 100
