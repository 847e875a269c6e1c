"""The tables of published data sets, by the data set's name (published.json)."""

import json
from importlib import resources
from typing import Any

from oper.tables.table import Table


def published_names() -> tuple[str, ...]:
    """The data sets whose tables `load_tables` knows by name."""
    return tuple(_published_facts())


def _published_facts() -> dict[str, Any]:
    text = resources.files("oper.tables").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)


def published_table(name: str, base: dict[str, Any]) -> tuple[Table, ...]:
    facts = _published_facts()[name]
    rows = facts["rows"]
    if isinstance(rows, dict):
        rows = [rows["each"]] * rows["tables"]
    names = facts["names"]
    if isinstance(names, str):
        names = [names.format(index) for index in range(len(rows))]
    return tuple(Table(name=n, rows=r, **base) for n, r in zip(names, rows, strict=True))
