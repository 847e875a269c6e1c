"""Whether what plan.json states is of the kinds that docs/plan-format.md promises.

In: parts of plan.json, the number of ranks. Out: nothing, or a ValueError that names the key.
Nothing acts on these figures, so a value of another kind would be met only where it is printed.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from oper.cost.allreduce import METHODS

Kind = tuple[str, Callable[[Any, int], bool]]  # in words, and whether a value is of it


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_vector(value: Any, ranks: int) -> bool:
    return isinstance(value, list) and len(value) == ranks and all(map(_is_number, value))


def _is_matrix(value: Any, ranks: int) -> bool:
    right = isinstance(value, list) and len(value) == ranks
    return right and all(_is_vector(row, ranks) for row in value)


NUMBER: Kind = ("a number", lambda value, ranks: _is_number(value))
MAYBE: Kind = ("a number or null", lambda value, ranks: value is None or _is_number(value))
TEXT: Kind = ("text", lambda value, ranks: isinstance(value, str))
SENTENCE: Kind = ("text or null", lambda value, ranks: value is None or isinstance(value, str))
TRUTH: Kind = ("true or false", lambda value, ranks: isinstance(value, bool))
VECTOR: Kind = ("a number for each rank", _is_vector)
MATRIX: Kind = ("a number for each pair of ranks", _is_matrix)

_PLAN: dict[str, Kind | dict[str, Kind]] = {
    **dict.fromkeys(("samples", "replica_accesses"), NUMBER),
    **dict.fromkeys(("profile", "fingerprint", "produced_by"), TEXT),
}
_DOB = {"memory": MAYBE, "lookups": MAYBE, "link_cost": MAYBE}
# A mapping is an object with these keys; further ones are left alone.
_KINDS: dict[str, Kind | dict[str, Kind]] = {
    **dict.fromkeys(
        ("objective_seconds", "extra_memory_ratio", "allreduce_memory_bytes", "mailbox_bytes"),
        NUMBER,
    ),
    **dict.fromkeys(("threshold", "exchanges"), NUMBER),
    **dict.fromkeys(("memory_bytes", "capacity_bytes", "lookups", "lookup_seconds"), VECTOR),
    **dict.fromkeys(("gradient_lookup_seconds", "allreduce_seconds", "rank_seconds"), VECTOR),
    **dict.fromkeys(("link_bytes", "link_seconds", "gradient_link_seconds"), MATRIX),
    **dict.fromkeys(("allreduce_method", "step", "threshold_reason"), TEXT),
    "feasible": TRUTH,
    "communication_bytes": dict.fromkeys(("fetch", "gradient", "allreduce", "total"), NUMBER),
    "dob": _DOB,
    "dob_before_exchanges": _DOB,
}
_GREEDY = {"greedy_dob": {"memory": NUMBER, "lookups": NUMBER}}
_CERTIFICATE: dict[str, Kind | dict[str, Kind]] = {
    "lower_bound_seconds": NUMBER,
    "certified_gap": NUMBER,
    "hot_row": SENTENCE,
}
_PARTITIONS: dict[str, Kind | dict[str, Kind]] = dict.fromkeys(
    (
        "threshold",
        "access_bounded",
        "memory_bounded",
        "access_bounded_bytes",
        "access_bounded_accesses",
    ),
    NUMBER,
)
_SETTINGS: dict[str, Kind | dict[str, Kind]] = {
    **dict.fromkeys(("extra_memory", "threshold", "dob"), NUMBER),
    "balance": TEXT,
}


def check_stated(content: Mapping[str, Any], ranks: int) -> None:
    """ValueError where the figures of a plan.json are not numbers, texts or vectors over `ranks` as
    they should be, or a certificate, partitions or settings that are there are not."""
    figures = content["figures"]
    _check("plan", content, _PLAN, ranks)
    _check("figures", figures, _KINDS, ranks)
    if figures["allreduce_method"] not in METHODS:
        raise ValueError(
            f"figures.allreduce_method is {_short(figures['allreduce_method'])}, and one of "
            f"{', '.join(METHODS)} was needed"
        )
    if figures["greedy_dob"] is not None:
        _check("figures", figures, _GREEDY, ranks)
    for name, kinds in (
        ("certificate", _CERTIFICATE),
        ("partitions", _PARTITIONS),
        ("settings", _SETTINGS),
    ):
        if content[name] != {}:
            _check(name, content[name], kinds, ranks)
    if "full_memory_bound_seconds" in content["certificate"]:
        full: dict[str, Kind | dict[str, Kind]] = {"full_memory_bound_seconds": NUMBER}
        _check("certificate", content["certificate"], full, ranks)


def _check(
    name: str, content: Any, kinds: Mapping[str, Kind | dict[str, Kind]], ranks: int
) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{name} is {_short(content)}, and an object was needed")
    for key, kind in kinds.items():
        if isinstance(kind, dict):
            _check(f"{name}.{key}", content.get(key), kind, ranks)
            continue
        needed, fits = kind
        if not fits(content.get(key), ranks):
            found = _short(content[key]) if key in content else "missing"
            raise ValueError(f"{name}.{key} is {found}, and {needed} was needed")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
