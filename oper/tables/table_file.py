"""Files of tables, with their rows, width, optimizer, and the columns that index them.

A file is the user's, YAML or JSON, or published.json, which has the tables of published data sets.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oper.base.defaults import DIM, DTYPE, OPTIMIZER
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.files.input_files import refuse_url
from oper.files.json_file import read_json
from oper.files.what_is import what_is
from oper.files.yaml_file import Document, KeyPath
from oper.tables.table import CHOICES, IdKind, IdRule, Table


def load_tables(
    spec: Path | str,
    *,
    dim: int = DIM,
    dtype: str = DTYPE,
    optimizer: str = OPTIMIZER,
    ids: IdKind = "dense",
) -> tuple[Table, ...]:
    """Return the tables of a YAML or JSON file, or of a published data set by name.

    A file is a list of tables, or a mapping with that list under `tables` and default settings
    under `defaults`. The arguments are the defaults below those. OperError names the file,
    line, table and value.
    """
    base = {"dim": dim, "dtype": dtype, "optimizer": optimizer, "ids": IdRule(ids)}
    if str(spec) in published_names():
        return _published_table(str(spec), base)
    refuse_url(spec)
    path = Path(spec)
    if not path.is_file():
        raise OperError(
            f"{option('--tables', str(spec))}: expected a YAML file of tables, a profile or a "
            f"plan, or a published data set ({', '.join(published_names())}), got {what_is(path)}"
        )
    return _from_document(Document.read(path), base)


def _from_document(document: Document, base: dict[str, Any]) -> tuple[Table, ...]:
    content = document.content
    keys: KeyPath = ()
    if isinstance(content, dict):
        unknown = set(content) - {"tables", "defaults"}
        if unknown or "tables" not in content:
            first = min(map(str, unknown)) if unknown else None
            document.fail(
                (first,) if first else (),
                "is an unknown key; known are `tables` and `defaults`"
                if first
                else "has no `tables`; give a list of tables",
            )
        base = base | _settings(document, ("defaults",), content.get("defaults") or {})
        content, keys = content["tables"], ("tables",)
    if not isinstance(content, list) or not content:
        document.fail(keys, "is not a list of tables; write one entry `- name: …` for each table")
    tables = tuple(
        _table(document, (*keys, index), entry, base) for index, entry in enumerate(content)
    )
    _check_names(document, keys, tables)
    return tables


def _table(document: Document, keys: KeyPath, entry: Any, base: dict[str, Any]) -> Table:
    if not isinstance(entry, dict):
        document.refuse(keys, "a mapping with `name` and `rows`", repr(entry))
    settings = base | _settings(document, keys, entry)
    if "name" not in settings:
        document.fail(keys, "has no name; add `name: …`")
    if settings["ids"].kind == "hash" and "rows" not in settings:
        document.fail(keys, f"table {settings['name']!r} has no rows; `ids: hash` needs them")
    try:
        return Table(**({"rows": 0} | settings))
    except OperError as error:
        document.fail(keys, str(error))


def _settings(document: Document, keys: KeyPath, entry: Any) -> dict[str, Any]:
    """Return the given fields of a table, or of the defaults, each checked for its type."""
    if not isinstance(entry, dict):
        document.refuse(keys, "a mapping", repr(entry))
    result: dict[str, Any] = {}
    for key, value in entry.items():
        here = (*keys, str(key))
        if key in ("rows", "dim"):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                document.refuse(here, "a whole number of at least 1", repr(value))
            result[key] = value
        elif key == "name":
            if not isinstance(value, str | int):
                document.refuse(here, "a name", repr(value))
            result[key] = str(value)
        elif key in ("dtype", "optimizer", "pooling"):
            if value not in CHOICES[key]:
                document.fail(here, f"is {value!r}; known are {', '.join(CHOICES[key])}")
            result[key] = value
        elif key == "features":
            result[key] = _features(document, here, value)
        elif key == "ids":
            result[key] = _rule(document, here, value)
        else:
            document.fail(
                here,
                "is an unknown key; known are name, rows, dim, dtype, optimizer, pooling, features "
                "and ids",
            )
    return result


def _features(document: Document, keys: KeyPath, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str | int) else value
    if not isinstance(names, list) or not all(isinstance(n, str | int) for n in names):
        document.refuse(keys, "a list of the log's columns", repr(value))
    return tuple(map(str, names))


def _rule(document: Document, keys: KeyPath, value: Any) -> IdRule:
    fields = {"kind": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or fields.get("kind") not in CHOICES["ids"]:
        document.refuse(keys, "dense, hash or vocab (alone, or as `kind`)", repr(value))
    unknown = set(fields) - {"kind", "min_count", "missing"}
    if unknown:
        document.fail((*keys, min(map(str, unknown))), "is unknown; kind, min_count, missing are")
    min_count = fields.get("min_count", 1)
    if not isinstance(min_count, int) or isinstance(min_count, bool) or min_count < 1:
        document.refuse((*keys, "min_count"), "a whole number of at least 1", repr(min_count))
    missing = fields.get("missing")
    return IdRule(fields["kind"], min_count, None if missing is None else str(missing))


def _check_names(document: Document, keys: KeyPath, tables: Sequence[Table]) -> None:
    seen: dict[str, int] = {}
    for index, table in enumerate(tables):
        if table.name in seen:
            document.fail(
                (*keys, index),
                f"is a second table {table.name!r}, after entry {seen[table.name]}; "
                "give each table a name of its own",
            )
        seen[table.name] = index


def published_names() -> tuple[str, ...]:
    """Return the data sets whose tables `load_tables` knows by name."""
    return tuple(_published_facts())


def _published_facts() -> dict[str, Any]:
    facts: dict[str, Any] = read_json(Path(__file__).with_name("published.json"))
    return facts


def _published_table(name: str, base: dict[str, Any]) -> tuple[Table, ...]:
    facts = _published_facts()[name]
    rows = facts["rows"]
    if isinstance(rows, dict):
        rows = [rows["each"]] * rows["tables"]
    names = facts["names"]
    if isinstance(names, str):
        names = [names.format(index) for index in range(len(rows))]
    return tuple(Table(name=n, rows=r, **base) for n, r in zip(names, rows, strict=True))
