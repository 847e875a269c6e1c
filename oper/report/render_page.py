"""A report as one self-contained HTML page.

Vega draws the charts: it is kept by the University of Washington's data lab and many others, its
charts are data, its SVG has labels for screen readers, and vl-convert embeds all of it in 0.9 MB.
The page is filled in by Jinja, which escapes every text, such as names of tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from oper import __version__
from oper.files.overwrite_rules import FILE_MARK
from oper.files.storage import atomic_file
from oper.report.charts.chart import CONFIG, Chart
from oper.report.table_list import SortableTable


@dataclass(frozen=True)
class Snippet:
    """Lines of code under a heading, and a sentence about them."""

    title: str
    code: str
    sentence: str


@dataclass(frozen=True)
class Section:
    """Part of the page with a heading; empty fields are left out."""

    key: str  # its id in the page
    title: str
    sentences: Sequence[str] = ()
    emphasis: bool = False  # larger sentences
    tiles: Sequence[tuple[str, str]] = ()  # names and values
    snippet: Snippet | None = None
    charts: Sequence[Chart] = ()
    table: SortableTable | None = None
    words: Sequence[tuple[str, str]] = ()
    points: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    title: str
    kind: str  # a line above the title: the page's subject
    sections: Sequence[Section]
    version: str = field(default=__version__)


def write_page(page: Page, path: Path, overwrite: bool) -> None:
    """Write the page to a file, completely or not at all."""
    text = render(page)
    with atomic_file(path, overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")


def render(page: Page) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True)
    return environment.from_string(_asset("page.html")).render(
        page=page,
        mark=FILE_MARK,
        css=Markup(_asset("page.css")),
        config=CONFIG,
        library=Markup(vega()),
        script=Markup(_asset("page.js")),
    )


@cache
def vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, which defines `vegaEmbed` for the
    page."""
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # Within a page a script ends at the first of these, even inside a string.
    return script.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (resources.files("oper.report") / "page_assets" / name).read_text(encoding="utf-8")
