"""Output of `oper drift`: the verdict and its reason, the tables to blame, then the rest."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from oper.cli.drift_text import print_drift, print_windows, verdict_sentences, windows_verdict
from oper.cli.judgement_text import command_to_run
from oper.plan.reference_figures import HeldOutSource
from oper.planner.replan.drift import Drift, VocabularyDrift, Window, WindowDrift
from tests.support.planner.judgements import a_drift, a_judgement, a_table

Capture = pytest.CaptureFixture[str]


def sentences(drift: Drift) -> list[str]:
    return verdict_sentences(drift, "plan", "w@3")


def test_the_verdict_and_its_reason_come_first_and_the_guilty_tables_next(capsys: Capture) -> None:
    found = a_drift(1.2e-5, [a_table("a", 1e-7), a_table("b", -2e-16), a_table("c", 9e-7)])
    first, second, third, fourth = sentences(found)
    assert first == (
        "Replan: on the later part of w@3 a step takes 12 µs with plan (predicted), 20.00% longer "
        "than 10 µs with the rows moved that pay; --worse tolerates 5%. Moving 30 kB once pays "
        "after 2 steps"
    )
    assert second == (
        "Judged on 1,000 samples that no plan was made from; steps that plans predict of other "
        "samples, such as those they were made from, do not compare with these"
    )
    assert third == "For the data it was made from, plan was predicted to take 9 µs a step"
    assert fourth == "Most of the time is lost in c (90%), a (10%)"
    print_drift(found, "plan", "w@3")
    text = capsys.readouterr().out
    places = [
        text.index(words)
        for words in (
            "Replan",
            "Most of",
            "\nRun: oper replan plan w@3 -o NEW\n",
            "\nas it was",
            "\nc ",
            "\na ",
            "\ntransfers",
            "share",
        )
    ]
    assert places == sorted(places)
    assert "\nb " not in text  # it lost nothing
    assert "and 1 table that lost less" in text


def test_a_plan_that_is_as_good_as_new_has_no_culprits() -> None:
    said = sentences(a_drift(1e-5, [a_table("a", 3e-22), a_table("b", -1e-20)]))
    assert said[0] == (
        "Keep plan: on the later part of w@3 a step takes 10 µs (predicted), and no less with "
        "another plan"
    )
    assert len(said) == 3
    kept = sentences(a_drift(1.02e-5, [a_table("a", 2e-7)]))[0]
    assert kept.endswith(
        "10.2 µs (predicted), and 10 µs with the rows moved that pay; --worse tolerates 5%"
    )


def test_the_data_of_the_verdict_and_the_reservation_are_named() -> None:
    found = a_drift(1.2e-5, [])

    def said(source: HeldOutSource | None, reservation: str = "") -> str:
        judgement = replace(found.judgement, source=source, reservation=reservation)
        return ". ".join(sentences(replace(found, judgement=judgement))[:2])

    assert said(HeldOutSource.THIS_WINDOW).startswith("Replan: on w@3 a step takes")
    last = said(HeldOutSource.LAST_PART)
    assert last.startswith("Replan: on the held-out last part of the log a step takes")
    seen = said(None, "why not")
    assert seen.startswith("Replan: under w@3 a step takes")
    assert seen.endswith("but on the 1,000 samples that the new plans were made from; why not")


def test_other_plans_than_a_replan_are_advised() -> None:
    found = a_drift(1.2e-5, [])
    scratch = replace(found, judgement=a_judgement(1.2e-5, 1.1e-5, 1e-5))
    assert sentences(scratch)[0].startswith("Plan from scratch: ")
    command = command_to_run(scratch.judgement, None, "-plan", "w@3")
    assert command == "Run, with the other options of -plan: oper.make_plan(profile, …)"
    copies = replace(found, judgement=a_judgement(1.2e-5, 1.1e-5, 1e-5, 5e-6))
    assert sentences(copies)[0].startswith("Copy all rows to all ranks: ")
    command = command_to_run(copies.judgement, None, "plan", "w@3")
    assert command is not None
    assert command.endswith("(profile, …, oper.PlanSettings(extra_memory=ranks - 1))")
    slow = replace(found.judgement, horizon=1)
    slow = replace(slow, candidates=tuple(replace(c, moving_seconds=1.0) for c in slow.candidates))
    assert sentences(replace(found, judgement=slow))[0].endswith(
        "12 µs (predicted); no other plan saves what its moves take within 1 step"
    )


def test_drift_in_vocabulary_is_drift(capsys: Capture) -> None:
    found = replace(a_drift(1e-5, []), vocabularies=(VocabularyDrift("a", 0.04),))
    assert found.verdict == "keep"
    found = replace(found, vocabularies=(VocabularyDrift("b", 0.4), *found.vocabularies))
    assert (found.advice, found.verdict) == ("recount", "replan")
    first, second, *_ = sentences(found)
    assert first.startswith(
        "Drift in vocabulary: the plan does not know many values of b (40% of its accesses); "
    )
    assert first.endswith("oper profile LOG -o PROFILE, and plan from scratch")
    assert second == (
        "On the later part of w@3 a step takes 10 µs with plan (predicted), and 10 µs with the "
        "rows moved that pay"
    )
    for step in (1e-5, 1.2e-5):
        print_drift(replace(found, judgement=a_drift(step, []).judgement), "plan", "w@3")
        said = capsys.readouterr().out
        # A replan would keep the vocabulary.
        assert not re.search("Keep|Replan|Run", said), said


def test_small_data_keep_the_plan_whatever_the_steps(capsys: Capture) -> None:
    found = a_drift(1.2e-5, [])
    assert found.verdict == "replan"
    small = replace(found, judgement=replace(found.judgement, source=None, too_small=True))
    assert (small.advice, small.verdict) == ("keep", "keep")
    print_drift(small, "plan", "w@3")
    said = capsys.readouterr().out
    assert said.startswith("Keep plan: w@3 has fewer than 4,096 accesses a rank, where chance ")
    assert "Run" not in said
    windowed = WindowDrift((Window(small, 10, 10, 1.0),))
    assert windows_verdict(windowed, "plan", "w").startswith("Keep plan: no window of w is large")


def test_uneven_ranks_are_named_where_no_table_explains_the_loss() -> None:
    said = " ".join(sentences(a_drift(2e-5, [a_table("a", 1e-8)])))
    assert "uneven: transfers take 10 µs on the fastest and 20 µs on the slowest" in said
    assert "uneven" not in " ".join(sentences(a_drift(1.2e-5, [a_table("a", 2e-6)])))


NAMES = [f"table_with_a_name_of_sixty_characters_as_some_models_have_{n:03}" for n in range(856)]


@pytest.mark.parametrize(
    "names", [NAMES, [f"表格名称很长的嵌入表格用于测试列宽度{n}" for n in range(30)]]
)
def test_many_ranks_and_long_names_keep_100_columns(capsys: Capture, names: list[str]) -> None:
    found = a_drift(
        1.5e-5, [a_table(name, 1e-7 - n * 1e-12) for n, name in enumerate(names)], 0.05, 1024
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
    found = a_drift(1e-5 * factor, [a_table(f"t{n}", fresh * x) for n, x in enumerate(losses)])
    text = " ".join(sentences(found))
    assert not re.search(r"\d[eE][-+]?\d|-0\b(?!\.)", text), text


def windows(verdicts: list[str]) -> WindowDrift:
    """Windows of these verdicts, whose steps take 0.1 s in all."""
    seconds, iterations = 1e-5, 1e-1 / 1e-5 / len(verdicts)
    best = {"keep": seconds / 1.02, "replan": seconds / 1.07}
    drifts = [
        replace(
            a_drift(seconds, []),
            judgement=a_judgement(seconds, best[verdict], seconds),
        )
        for verdict in verdicts
    ]
    found = WindowDrift(tuple(Window(drift, 10, 10**9, iterations) for drift in drifts))
    assert [window.drift.verdict for window in found.windows] == verdicts
    return found


def test_windows_name_those_that_are_too_slow(capsys: Capture) -> None:
    keep = windows_verdict(windows(["keep"] * 3), "plan", "w")
    assert keep.startswith("Keep plan: in no window of w does another plan pay and save more than ")
    assert "a step takes up to 2.00% longer than with the best other plan" in keep
    assert "Not re-planning costs 1.961 ms in all, 2.00% of" in keep
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
    assert "full copies" not in text
    copies = replace(long.windows[1].drift, judgement=a_judgement(1e-5, 2e-5, 2e-5, 123.4e-6))
    print_windows(
        replace(long, windows=(long.windows[0], replace(long.windows[1], drift=copies))),
        "plan",
        "w",
    )
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert "full copies" in rows[0]
    assert ("123.4 µs" in rows[1], "123.4 µs" in rows[2]) == (False, True)
    assert max(map(len, rows)) <= 100
    print_windows(long, "plan", "w")
    text += capsys.readouterr().out
    assert " 123,500 " in text
    assert max(map(len, text.splitlines())) <= 100


def test_windows_of_unknown_values_name_the_vocabularies(capsys: Capture) -> None:
    kept = windows(["keep"] * 2)
    drift = replace(kept.windows[1].drift, vocabularies=(VocabularyDrift("b", 0.4),))
    found = WindowDrift((kept.windows[0], replace(kept.windows[1], drift=drift)))
    assert found.verdict == "replan"
    said = windows_verdict(found, "plan", "w")
    assert said.startswith("The plan's vocabularies are out of date")
    assert "another plan pays" not in said
    print_windows(found, "plan", "w")
    *_, last, _ = capsys.readouterr().out.splitlines()
    assert last.split()[0] == "@1"
    assert last.split()[-1] == "recount"
