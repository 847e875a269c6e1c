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


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


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
INTEGER: Kind = ("an integer of 64 bits", lambda value, ranks: _is_integer(value))
POSITIVE: Kind = ("a number above 0", lambda value, ranks: _is_number(value) and value > 0)
SHARE: Kind = ("a share above 0", lambda value, ranks: _is_number(value) and 0 < value <= 1)
SEED: Kind = ("0 to 2^64 - 1", lambda value, ranks: type(value) is int and 0 <= value < 1 << 64)
VECTOR: Kind = ("a number for each rank", _is_vector)
MATRIX: Kind = ("a number for each pair of ranks", _is_matrix)

_PLAN: dict[str, Kind | dict[str, Kind]] = {
    **dict.fromkeys(("samples", "replica_accesses"), NUMBER),
    **dict.fromkeys(("profile", "fingerprint", "produced_by"), TEXT),
    # Without one of these a workload would have what is usual, and the plan was not made for that.
    "workload": {"mode": TEXT, "fetch": TEXT, "batch_size": INTEGER},
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
    "bound_note": SENTENCE,
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
    "reserve": MAYBE,
}
_OPTIONAL: dict[str, Kind | dict[str, Kind]] = {"rows": TEXT, "time_unit": TEXT}
_SAMPLED: dict[str, Kind | dict[str, Kind]] = {"share": SHARE, "seed": SEED}
# Of a window of samples, of times, and of counts that `oper synth` drew.
_OF_SAMPLES: dict[str, Kind | dict[str, Kind]] = {"from_sample": INTEGER, "to_sample": INTEGER}
_OF_TIMES: dict[str, Kind | dict[str, Kind]] = {
    "column": TEXT,
    "from_value": NUMBER,
    "to_value": NUMBER,
}
_SPAN: dict[str, Kind | dict[str, Kind]] = {"every": POSITIVE, "number": INTEGER}
_DATES: dict[str, Kind | dict[str, Kind]] = {"from": TEXT, "to": TEXT}
_DRAWN: dict[str, Kind | dict[str, Kind]] = {"from": INTEGER, "to": INTEGER}


def check_stated(content: Mapping[str, Any], ranks: int) -> None:
    """ValueError where the figures of a plan.json are not numbers, texts or vectors over `ranks` as
    they should be, or a certificate, partitions, settings or a log part that are there are not."""
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
    for name, part in figures.get("parts", {}).items():
        if name not in ("devices", "tier"):
            raise ValueError(f"figures.parts.{name} is of no memory that a plan has")
        _check(f"figures.parts.{name}", part, _KINDS, ranks)
        _check(f"figures.parts.{name}", part, {"owner_accesses": VECTOR}, ranks)
        _check(f"figures.parts.{name}.certificate", part["certificate"], _CERTIFICATE, ranks)
        if part["allreduce_method"] not in METHODS:
            raise ValueError(f"figures.parts.{name}.allreduce_method is none of its methods")
        if part["greedy_dob"] is not None:
            _check(f"figures.parts.{name}", part, _GREEDY, ranks)
    if "log_part" in content:
        _check_log_part(content["log_part"], ranks)


def _check_log_part(part: Any, ranks: int) -> None:
    _check("log_part", part, _present(part, _OPTIONAL), ranks)
    if "sampled" in part:
        _check("log_part.sampled", part["sampled"], _SAMPLED, ranks)
    if "window" not in part:
        return
    window = part["window"]
    if _present(window, _OF_TIMES):
        kinds = _OF_TIMES | _present(window, _DATES)
        # Both, or none in plans of before.
        kinds |= _SPAN if _present(window, _SPAN) else {}
    else:
        kinds = _DRAWN if _present(window, _DRAWN) else _OF_SAMPLES
    _check("log_part.window", window, kinds, ranks)


def _present(
    content: Any, kinds: Mapping[str, Kind | dict[str, Kind]]
) -> dict[str, Kind | dict[str, Kind]]:
    """The kinds of those keys that are there, as some may be missing."""
    return {
        key: kind for key, kind in kinds.items() if isinstance(content, dict) and key in content
    }


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
