"""Pages in a headless browser: drawn without complaints, true to plan.json, for every reader."""

import json
from itertools import pairwise

import pytest
from selenium.webdriver.common.keys import Keys

from oper.base.formatting import format_bytes, format_duration, format_gap
from tests.report.conftest import Reported
from tests.support.commands import fine
from tests.support.report.browser import LAPTOP, PHONE, Browser

pytestmark = pytest.mark.check

FIGURES = "return [...document.querySelectorAll('figure[data-chart]')].map(f => f.id)"
ALL = {
    *("memory", "time", "work", "links", "link-times", "skew", "comparison", "sweep"),
    *("memory-curve", "drift-0", "drift-1", "counted"),
}


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_every_figure_is_drawn_and_nobody_complains(
    browser: Browser, reported: Reported, width: int, dark: bool
) -> None:
    browser.open(reported.page, width, dark)
    assert browser.complaints() == []
    assert set(browser.run(FIGURES)) == ALL
    for name in ALL:
        marks = browser.run(
            "return document.querySelectorAll(`#${arguments[0]} svg .mark-group path, "
            "#${arguments[0]} svg .mark-rect path, #${arguments[0]} svg .mark-line path`).length",
            name,
        )
        size = browser.run(
            "const r = document.querySelector(`#${arguments[0]} svg`).getBoundingClientRect();"
            "return [r.width, r.height]",
            name,
        )
        assert marks > 1, name
        assert min(size) > 100, name
        assert size[0] <= width, name
    # Nothing makes a reader scroll sideways; what is wider scrolls by itself.
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_it_needs_no_network(browser: Browser, reported: Reported) -> None:
    browser.open(reported.page)
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.run("return document.querySelectorAll('[src], link').length") == 0


def test_colours_follow_the_readers_light_or_dark(browser: Browser, reported: Reported) -> None:
    found = []
    for dark in (False, True):
        browser.open(reported.page, dark=dark)
        found.append(
            browser.run(
                "const text = document.querySelector('#memory svg .role-axis-label text');"
                "const bar = document.querySelector('#memory svg .mark-rect path');"
                "return [getComputedStyle(document.body).backgroundColor,"
                " getComputedStyle(text).fill, getComputedStyle(bar).fill]"
            )
        )
    light, dark_colours = found
    assert all(one != other for one, other in zip(light, dark_colours, strict=True)), found


def rows_of(browser: Browser, figure: str) -> list[list[str]]:
    """The figures of a chart, as its table has them."""
    return browser.run(
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        ".map(row => [...row.cells].map(cell => cell.textContent))",
        figure,
    )


def test_numbers_are_those_of_the_plan(browser: Browser, reported: Reported) -> None:
    plan = json.loads((reported.file("plan") / "plan.json").read_text())
    (memory,) = plan["memories"]
    figures, certificate = memory["cost"], memory["certificate"]
    browser.open(reported.page)
    tiles = browser.run(
        "return Object.fromEntries([...document.querySelectorAll('.tiles div')].map(tile =>"
        " [tile.querySelector('dt').textContent, tile.querySelector('dd').textContent]))"
    )
    assert tiles["transfer time"] == format_duration(figures["objective_seconds"])
    assert tiles["predicted step"] == format_duration(plan["step_time"]["seconds"])
    held, room = max(figures["memory_bytes"]), max(figures["capacity_bytes"])
    assert tiles["fullest rank"] == f"{format_bytes(held)} of {format_bytes(room)}"
    assert tiles["above the proved bound, at most"] == format_gap(certificate["certified_gap"])
    for name, shown, form in (
        ("memory", figures["memory_bytes"], format_bytes),
        ("time", figures["rank_seconds"], format_duration),
        ("work", figures["rank_seconds"], format_duration),
    ):
        totals = [row[-1] for row in rows_of(browser, name)]
        assert totals == [form(value) for value in shown], name
    drawn = browser.run(
        "return [...document.querySelectorAll('figure')].map("
        "f => JSON.parse(f.querySelector('script').textContent).data.values)"
    )
    assert all(values for values in drawn)
    words = browser.run("return document.querySelector('#plan').textContent")
    assert f"{plan['rows']['total']:,} rows of 2 embedding tables" in words
    assert format_duration(figures["objective_seconds"]) in words
    assert format_duration(certificate["lower_bound_seconds"]) in words
    code = browser.run("return document.querySelector('#plan pre').textContent")
    assert f"oper.Plan.load({str(reported.file('plan'))!r})" in code


def test_bars_are_as_high_as_their_figures(browser: Browser, reported: Reported) -> None:
    """The drawing itself, not the table next to it: the counted bytes are 1.1 times those
    predicted."""
    browser.open(reported.page)
    bars = browser.run(
        "return [...document.querySelectorAll('#counted svg .mark-rect path')]"
        ".map(bar => bar.getBBox().height)"
    )
    assert len(bars) == 6
    tall = sorted(height for height in bars if height > 1)
    assert any(abs(two / one - 1.1) < 0.02 for one, two in pairwise(tall)), bars


def test_screen_readers_find_every_figure(browser: Browser, reported: Reported) -> None:
    browser.open(reported.page)
    nodes = browser.command("Accessibility.getFullAXTree", {})["nodes"]
    by_role: dict[str, list[str]] = {}
    for node in nodes:
        role, name = node.get("role", {}).get("value"), node.get("name", {}).get("value", "")
        by_role.setdefault(role, []).append(name)
    titles = browser.run(
        "return [...document.querySelectorAll('figure h3')].map(h => h.textContent)"
    )
    assert sorted(by_role["figure"]) == sorted(titles)
    drawings = browser.run(
        "return [...document.querySelectorAll('figure [role=graphics-document]')]"
        ".map(drawing => drawing.getAttribute('aria-label'))"
    )
    for title, label in zip(titles, drawings, strict=True):
        assert label is not None
        assert label.startswith(title)
        assert any(character.isdigit() for character in label), label
    assert all(by_role["heading"])
    assert browser.run("return document.documentElement.lang") == "en"
    ids = browser.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids)), "an id twice names the wrong thing"


def test_tables_are_sorted_with_the_keyboard(browser: Browser, reported: Reported) -> None:
    browser.open(reported.page)
    header = "[...document.querySelectorAll('#tables .sortable button')]"
    browser.run(f"{header}.find(button => button.textContent === 'rows').focus()")
    orders = []
    for _ in range(2):
        browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
        orders.append(
            browser.run(
                "return [...document.querySelectorAll('#tables .sortable tbody tr')]"
                ".map(row => Number(row.cells[1].dataset.value))"
            )
        )
    assert orders[0] == sorted(orders[0], reverse=True)
    assert orders[1] == orders[0][::-1]
    assert len(set(orders[0])) == 2
    sorted_by = "return document.querySelector('#tables th[aria-sort]').textContent"
    assert browser.run(sorted_by) == "rows"


def test_figures_open_with_the_keyboard(browser: Browser, reported: Reported) -> None:
    browser.open(reported.page)
    browser.run("document.querySelector('#memory summary').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.run("return document.querySelector('#memory details').open")
    browser.driver.switch_to.active_element.send_keys(Keys.TAB)
    region = browser.run("return document.activeElement.getAttribute('aria-label')")
    assert region == "Figures: Memory of each rank"


def test_it_prints(browser: Browser, reported: Reported) -> None:
    browser.open(reported.page, dark=True)
    browser.command("Emulation.setEmulatedMedia", {"media": "print"})
    assert (
        browser.run("return getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert browser.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
    printed = browser.command("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 20_000


def test_two_plans(browser: Browser, reported: Reported) -> None:
    page = reported.file("two.html")
    fine("report", reported.file("plan"), reported.file("day"), "-o", page, "--force")
    for width in (LAPTOP, PHONE):
        browser.open(page, width)
        assert browser.complaints() == []
        assert set(browser.run(FIGURES)) == {"memory-0", "work-0", "memory-1", "work-1"}
        assert browser.run("return document.documentElement.scrollWidth") <= width
    said = json.loads(fine("plan", "diff", reported.file("plan"), reported.file("day"), "--json"))
    words = browser.run("return document.querySelector('#plans').textContent")
    assert f"{said['rows_changed']:,} of {said['rows']:,} rows" in words


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_labels_of_many_ranks_stand_apart(browser: Browser, reported: Reported, width: int) -> None:
    many, page = reported.file("many"), reported.file("many.html")
    fine("plan", reported.file("profile"), "--topology", "8x8-h100", "-o", many, "--force")
    fine("report", many, "-o", page, "--force")
    browser.open(page, width)
    boxes = browser.run(
        "return [...document.querySelectorAll('#memory svg .role-axis-label text')]"
        ".filter(text => getComputedStyle(text).opacity > 0)"
        ".map(text => text.getBoundingClientRect()).map(box => [box.left, box.right, box.top])"
    )
    lowest = max(top for _, _, top in boxes)
    ranks = sorted((left, right) for left, right, top in boxes if top == lowest)
    assert len(ranks) > 3
    assert all(one[1] + 8 < other[0] for one, other in pairwise(ranks)), ranks
