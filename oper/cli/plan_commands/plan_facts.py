"""Why a plan is as it is: memory, links, traffic, threshold, limits, as names and sentences."""

from typing import TYPE_CHECKING, Any

from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_share,
    plural,
)
from oper.cli.plan_commands.link_use import link_use

if TYPE_CHECKING:
    from oper.topology.topology import Topology

_DOB_NAMES = {"memory": "memory", "lookups": "lookups", "link_cost": "links"}
# Of the extra memory allowed: a part of it that is worth a word if it is not used.
_UNUSED = 0.01


def plan_facts(
    content: dict[str, Any], topology: "Topology", verbose: bool
) -> list[tuple[str, str]]:
    """A plan's properties as names and sentences; with `verbose` how it was made."""
    facts = []
    if "parts" in content:
        facts.append(("tier", _tier(content)))
    if _on_devices(content):
        facts.append(("copies", copies_text(content)))
    links = link_use(content, topology)
    if links is not None:
        facts.append(("links", links))
    facts.append(("traffic", _traffic(content)))
    if content.get("mailbox_bytes"):
        step = f"{format_bytes(content['mailbox_bytes'])} a rank for gradients"
        if content["allreduce_memory_bytes"]:
            step += f", {format_bytes(content['allreduce_memory_bytes'])} for their AllReduce"
        facts.append(("memory of a step", f"{step}, expected"))
    facts.append(("threshold", threshold_text(content)))
    if content.get("hot_row"):
        facts.append(("what limits it", content["hot_row"]))
    if content.get("bound_note"):
        facts.append(("the bound", content["bound_note"]))
    if verbose:
        facts += _making(content)
    facts.append(
        (
            "times",
            "predicted, of moving rows and gradients alone: without kernel launches and dense "
            "layers",
        )
    )
    return facts


def _on_devices(content: dict[str, Any]) -> bool:
    """Whether any tables are."""
    return "parts" not in content or "devices" in content["parts"]


def _traffic(content: dict[str, Any]) -> str:
    if content["ranks"] == 1:
        return "none: there is one rank"
    moved = {name: format_bytes(b) for name, b in content["communication_bytes"].items()}
    parts = [f"{moved['fetch']} of rows"]
    if content["mode"] == "training":
        parts.append(f"{moved['gradient']} of gradients to owners")
        method = content["allreduce_method"]
        if method != "none":
            parts.append(f"{moved['allreduce']} of copies' gradients (AllReduce by {method})")
    return f"in an iteration, all ranks together: {', '.join(parts)}"


def _tier(content: dict[str, Any]) -> str:
    """The tables in the hosts' memory, what their reads take, and what is left for caches."""
    names, parts = content["tier"], content["parts"]
    tables = ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")
    if "devices" not in parts:
        tables = "all tables"
    sentence = (
        f"{tables} in the hosts' memory: {format_duration(parts['tier']['objective_seconds'])} of "
        "a rank's iteration, if no cache had any of their rows"
    )
    if content["asked"].get("reserve") is None:
        return sentence
    memory = zip(content["capacity_bytes"], content["memory_bytes"], strict=True)
    free = min(capacity - held for capacity, held in memory)
    # Of plans without tables on devices the gradients of a step are taken off already.
    step = parts["tier"]["mailbox_bytes"] if _on_devices(content) else 0
    return f"{sentence}; {format_bytes(max(free - step, 0))} a device are left for caches"


def copies_text(content: dict[str, Any]) -> str:
    """What copies take, and why no more of them."""
    if content["ranks"] == 1:
        return "none: there is one rank"
    used, asked = content["extra_memory_ratio"], content["asked"].get("extra_memory")
    taken = f"they take {format_percent(used)} of the tables' bytes" if used else "none"
    part = content.get("parts", {}).get("devices", content)  # of a plan with a tier
    full = part.get("certificate", part).get("full_memory_bound_seconds")
    if full is not None:
        objective = part["objective_seconds"]
        saved = max(1 - full / objective, 0.0) if objective else 0.0
        capacity = format_bytes(min(content["capacity_bytes"]))
        return (
            f"{taken}; with all memory that plans may use, {capacity} a rank, an iteration would "
            f"be at most {format_share(saved)} shorter"
        )
    if asked is None or content["asked"].get("reserve") is not None:
        return taken
    if used >= asked * (1 - _UNUSED):
        return f"{taken}, as much as was allowed" if used else f"{taken}, as asked"
    more = "another" if used else "one"
    why = "save no time"
    if content["mode"] == "training":
        why = "save less in reads than its gradients cost"
    return (
        f"{taken}, though {format_percent(asked)} of the tables' bytes were allowed: {more} would "
        f"{why}, or not fit"
    )


def threshold_text(content: dict[str, Any]) -> str:
    """The threshold as asked and as it ended, and why."""
    now, reason = content["threshold"], content["threshold_reason"]
    asked = content["asked"].get("threshold", now)
    halved = now != asked
    said = f"{format_percent(asked)}, as asked"
    if halved:
        said = f"{format_percent(asked)} asked; halved to {format_percent(now)}"
    if reason.startswith("both balances reached"):
        balance = content["asked"].get("dob")
        even = "" if balance is None else f" to {format_percent(balance)}"
        why = f"where the ranks were even{even}"
    elif reason.startswith("halving the threshold no longer helped"):
        why = "where halving again no longer helped" if halved else "as halving it did not help"
    elif reason.startswith("the threshold was halved"):
        why = "the least that is tried"
    else:
        return f"{said}, but this plan's rows were not placed in partitions"
    return (
        f"{said}, {why}. Rows are placed in partitions of at most this share of all bytes and of "
        "all accesses"
    )


def _making(content: dict[str, Any]) -> list[tuple[str, str]]:
    """How even the ranks are, and by which steps."""
    dob, before = content["dob"], content["greedy_dob"]
    even = (
        f"{label} {'-' if dob[key] is None else format_share(dob[key], 3)}"
        for key, label in _DOB_NAMES.items()
    )
    facts = [("balance, min/max", ", ".join(even))]
    if before:
        memory, lookups = (format_share(before[key], 3) for key in ("memory", "lookups"))
        facts.append(("before refining", f"memory {memory}, lookups {lookups}"))
    made = f"{content['step']} and {plural(content['exchanges'], 'round')} of swaps"
    if "seconds" in content:
        made += f", in {format_duration(content['seconds']['total'])}"
    facts.append(("produced by", made))
    if parts := content.get("partitions"):
        facts.append(
            (
                "partitions",
                f"{parts['access_bounded']:,} closed by their accesses, with "
                f"{format_share(parts['access_bounded_accesses'], 1)} of all in "
                f"{format_share(parts['access_bounded_bytes'], 1)} of the bytes; "
                f"{parts['memory_bounded']:,} closed by their bytes",
            )
        )
    if "address_map_bytes_per_row" in content:
        facts.append(
            (
                "address map",
                f"{content['address_map_bytes_per_row']:.3f} bytes a row; "
                f"{plural(content['explicit_rows'], 'row')} with an entry, the others striped",
            )
        )
    return facts
