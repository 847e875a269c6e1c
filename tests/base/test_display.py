"""Summaries as notebooks and rich show them: every text as it is, long tables cut."""

import io

from rich.console import Console

from oper.base.display import Summary

HOSTILE = "<script>alert(1)</script> [bold]"


def printed(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(summary.to_rich())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_names_are_text_and_no_markup() -> None:
    summary = Summary(HOSTILE, ((HOSTILE, HOSTILE),), (HOSTILE,), ((HOSTILE,),))
    html = summary.to_html()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; [bold]") == 5
    assert printed(summary).count(HOSTILE) == 5


def test_long_tables_say_what_is_left_out() -> None:
    rows = [(f"row-{number}",) for number in range(1000)]
    summary = Summary("many", headers=("name",), rows=rows)
    for text in (summary.to_html(), printed(summary)):
        assert "row-29" in text
        assert "row-30" not in text
        assert "and 970 more" in text
    assert "more" not in printed(Summary("few", headers=("name",), rows=rows[:30]))


def test_nothing_but_a_title() -> None:
    assert Summary("alone").to_html() == "<p><b>alone</b></p>"
    assert printed(Summary("alone")) == "alone\n"
