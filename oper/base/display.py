"""Summaries of objects in notebooks, as HTML, and for rich, as text; and their text for `print`."""

import html
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oper.base.formatting import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_ROWS = 30  # of the table


@dataclass(frozen=True)
class Summary:
    """A title, named facts, and a table whose first column is left-aligned; of a long table the
    first rows are shown."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    @property
    def left_out(self) -> str:
        """Sentence with the number of rows that are not shown."""
        more = len(self.rows) - _MOST_ROWS
        return f"and {more:,} more" if more > 0 else ""

    def to_html(self) -> str:
        """Return the summary as HTML, with every text escaped."""
        escape = html.escape
        parts = [f"<p><b>{escape(self.title)}</b></p>"]
        if self.facts:
            facts = (f"<li>{escape(name)}: {escape(text)}</li>" for name, text in self.facts)
            parts.append(f"<ul>{''.join(facts)}</ul>")
        if self.headers:
            head = "".join(f'<th scope="col">{escape(header)}</th>' for header in self.headers)
            body = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
                for row in self.rows[:_MOST_ROWS]
            )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        if self.left_out:
            parts.append(f"<p>{self.left_out}</p>")
        return "".join(parts)

    def to_rich(self) -> "RenderableType":
        """Return the summary as rich prints it."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        def plain(text: str) -> Text:
            return Text(printable(text))

        parts: list[RenderableType] = [Text(printable(self.title), style="bold")]
        parts += [plain(f"{name}: {text}") for name, text in self.facts]
        if self.headers:
            table = Table(box=None, pad_edge=False)
            for number, header in enumerate(self.headers):
                table.add_column(plain(header), justify="right" if number else "left")
            for row in self.rows[:_MOST_ROWS]:
                table.add_row(*map(plain, row))
            parts.append(table)
        if self.left_out:
            parts.append(Text(self.left_out))
        return Group(*parts)


class Summarised:
    """Object that notebooks and rich show by its summary, and `print` like the command line.

    Summaries and texts are made in modules of higher layers, which are imported when the first is
    shown: `summarised_by` and `printed_by` name them.
    """

    def __str__(self) -> str:
        text: str = importlib.import_module(*_printers).text_of(self)
        return text

    def _repr_html_(self) -> str:
        return _summary_of(self).to_html()

    def __rich__(self) -> "RenderableType":
        return _summary_of(self).to_rich()


_makers: list[str] = []
_printers: list[str] = []


def summarised_by(module: str) -> None:
    """Let `summary_of` of a module, by its name, make the summaries."""
    _makers[:] = [module]


def printed_by(module: str) -> None:
    """Let `text_of` of a module, by its name, make the texts."""
    _printers[:] = [module]


def _summary_of(given: Summarised) -> Summary:
    (module,) = _makers
    summary: Summary = importlib.import_module(module).summary_of(given)
    return summary
