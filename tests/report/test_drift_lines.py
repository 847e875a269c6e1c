"""Caption of the chart of drift, and the title of a drift in a notebook."""

from dataclasses import replace

import pytest

from oper.plan.reference_figures import HeldOutSource
from oper.planner.replan.drift import VocabularyDrift
from oper.report.charts.drift_lines import NamedDrift, drift_chart
from oper.report.notebook_summaries import summary_of
from tests.support.planner.judgements import a_drift


@pytest.mark.parametrize(
    ("source", "caption", "title"),
    [
        (None, "On w@3, which the other plans were made from, a step", "the newest data, which"),
        (HeldOutSource.THIS_WINDOW, "On w@3, which none of the plans was", "on the newest data"),
        (HeldOutSource.LATER_PART, "On the later part of w@3, which none", "on the later part of"),
        (HeldOutSource.LAST_PART, "On the held-out last part of the log, ", "on the held-out last"),
    ],
)
def test_the_data_of_a_judgement_are_named(
    source: HeldOutSource | None, caption: str, title: str
) -> None:
    found = a_drift(1.2e-5)
    found = replace(found, judgement=replace(found.judgement, source=source))
    assert drift_chart(NamedDrift("w@3", found, "digest"), 0).caption.startswith(caption)
    assert title in summary_of(found).title


def test_unknown_values_are_the_reason_to_plan_from_scratch() -> None:
    found = replace(a_drift(1e-5), vocabularies=(VocabularyDrift("a", 0.4),))
    assert found.judgement.verdict == "keep"
    for said in (
        drift_chart(NamedDrift("w@3", found, "digest"), 0).caption,
        summary_of(found).title,
    ):
        assert "vocabularies are out of date" in said
        assert "Another plan pays" not in said
        assert "(keep)" not in said
