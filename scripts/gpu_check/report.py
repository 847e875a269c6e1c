"""The report of gpu_check: a section for each stage, its records as a table."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(records: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Return the report of records with a field "stage"; the last of each stage has its
    "outcome"."""
    parts = ["# GPU check\n"]
    for name, title in titles.items():
        of_stage = [
            {k: v for k, v in r.items() if k != "stage"} for r in records if r["stage"] == name
        ]
        results = [record for record in of_stage if "outcome" not in record]
        end = next((record for record in of_stage if "outcome" in record), {"outcome": "not run"})
        parts.append(f"## {title}\n{sentence(end)}\n")
        # Records with the same fields are one table.
        for fields in dict.fromkeys(tuple(record) for record in results):
            same = [record for record in results if tuple(record) == fields]
            parts.append(table(fields, same))
    return "\n".join(parts)


def sentence(end: Mapping[str, Any]) -> str:
    took = f" in {end['seconds']} s" if "seconds" in end else ""
    why = f": {end['why']}" if "why" in end else ""
    return f"{end['outcome']}{took}{why}."


def table(fields: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    lines = [" | ".join(fields), " | ".join("---" for _ in fields)]
    lines += [" | ".join(cell(record[field]) for field in fields) for record in records]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
