"""The notebook of examples/ runs from its first cell to its last, in a kernel of its own."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.check

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "plan_in_a_notebook.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[Any]:
    """Run the notebook, and return its cells of code."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1200, kernel_name="python3").execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], last_line: str) -> dict[str, str]:
    """Return the output of the cell that ends with `last_line`, by media type."""
    (cell,) = (cell for cell in cells if cell.source.splitlines()[-1] == last_line)
    return cell.outputs[-1]["data"]


def test_objects_are_shown_as_html(cells: list[Any]) -> None:
    for name, words in (
        ("profile", ("250,000 rows of 2 tables", "204,800 samples", "<td>item</td>")),
        ("plan", ("predicted step", "from optimal, at most", "<td>7</td>")),
        ("comparison", ("5 methods on 8 ranks", "<td>row_wise</td>", "<td>1.00</td>")),
    ):
        html = shown(cells, name)["text/html"]
        for word in words:
            assert word in html, (name, word)


def test_the_kept_outputs_are_those_of_now(cells: list[Any]) -> None:
    """A reader who runs nothing sees the outputs of this version."""
    kept = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    for before, after in zip(kept, cells, strict=True):
        now = [o["data"] for o in after.outputs if o.output_type != "stream"]  # warnings of torch
        assert [o["data"] for o in before.outputs] == now
