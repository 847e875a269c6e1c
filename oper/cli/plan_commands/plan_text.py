"""A plan's figures as the tables that `oper plan` and `oper plan show` print."""

from typing import Any

from rich.table import Table as RichTable

from oper.cli.shared.console import new_table
from oper.cli.shared.formatting import (
    format_bytes,
    format_duration,
    format_gap,
    format_number,
    plural,
)

_MOST_RANKS = 16
_DOB_NAMES = {"memory": "memory", "lookups": "lookups", "link_cost": "links"}


def rank_table(content: dict[str, Any]) -> Any:
    """Memory, lookups, link bytes and seconds of each rank (the first and last of many); of a plan
    with a tier, the memory of its device and of its host.

    The last time is the sum of the others: serving rows, fetching rows, and in training updating
    rows with gradients and AllReduce.
    """
    training = content["mode"] == "training"
    hosts = content["parts"]["tier"]["memory_bytes"] if "parts" in content else None
    memory = ["memory"] if hosts is None else ["device memory", "host memory"]
    headers = ["rank", *memory, "rows served", "fetched", "serving", "fetching"]
    table = new_table(*headers, *(["updating"] if training else []), "iteration")
    ranks = content["ranks"]
    shown = list(range(ranks))
    if ranks > _MOST_RANKS:
        shown = [*range(8), *range(ranks - 4, ranks)]
    for rank in shown:
        if ranks > _MOST_RANKS and rank == ranks - 4:
            table.add_row("…")
        serving, total = content["lookup_seconds"][rank], content["rank_seconds"][rank]
        fetching = sum(content["link_seconds"][rank])
        times = [serving, fetching, *([total - serving - fetching] if training else []), total]
        table.add_row(
            str(rank),
            format_bytes(content["memory_bytes"][rank]),
            *([] if hosts is None else [format_bytes(hosts[rank])]),
            format_number(content["lookups"][rank]),
            format_bytes(sum(content["link_bytes"][rank])),
            *map(format_duration, times),
        )
    return table


def plan_facts(content: dict[str, Any]) -> list[tuple[str, str]]:
    """A plan's properties as names and sentences."""
    dob, before = content["dob"], content["greedy_dob"]
    moved = {name: format_bytes(b) for name, b in content["communication_bytes"].items()}
    iteration = f"{format_duration(content['objective_seconds'])}, that of the slowest rank"
    if "certified_gap" in content:  # plans that were put together by hand have no certificate
        iteration += f"; certified within {format_gap(content['certified_gap'])} of optimal"
    facts = [
        ("predicted iteration", iteration),
        (
            "balance, min/max",
            ", ".join(
                f"{label} {'-' if dob[key] is None else format(dob[key], '.3%')}"
                for key, label in _DOB_NAMES.items()
            ),
        ),
    ]
    if before:
        facts.append(
            (
                "before refining",
                f"memory {before['memory']:.3%}, lookups {before['lookups']:.3%}",
            )
        )
    facts += [
        ("threshold", f"{100 * content['threshold']:.3g}%: {content['threshold_reason']}"),
        *([("tier", _tier(content))] if "parts" in content else []),
        *([("extra memory", _extra_memory(content))] if _on_devices(content) else []),
        (
            "traffic, all ranks",
            f"fetch {moved['fetch']}, gradients {moved['gradient']}, "
            f"AllReduce {moved['allreduce']} ({content['allreduce_method']})",
        ),
        (
            "produced by",
            f"{content['step']} and {plural(content['exchanges'], 'round')} of swaps"
            + (f", in {content['seconds']['total']:.2f} s" if "seconds" in content else ""),
        ),
    ]
    if content.get("mailbox_bytes"):
        facts.append(
            (
                "memory of a step",
                f"{format_bytes(content['mailbox_bytes'])} a rank for gradients, "
                f"{format_bytes(content['allreduce_memory_bytes'])} for their AllReduce, expected",
            )
        )
    if content.get("hot_row"):
        facts.append(("what limits it", content["hot_row"]))
    if content.get("bound_note"):
        facts.append(("the bound", content["bound_note"]))
    if not content["feasible"]:
        facts.append(("INFEASIBLE", "a rank holds more than its capacity"))
    return facts


def _on_devices(content: dict[str, Any]) -> bool:
    """Whether any tables are."""
    return "parts" not in content or "devices" in content["parts"]


def _tier(content: dict[str, Any]) -> str:
    """The tables in the hosts' memory, what their reads take, and what is left for caches."""
    names, parts = content["tier"], content["parts"]
    tables = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
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


def _extra_memory(content: dict[str, Any]) -> str:
    """What copies take, and what more of them would do."""
    used, asked = content["extra_memory_ratio"], content["asked"].get("extra_memory")
    full = content.get("full_memory_bound_seconds")
    if full is None and asked is None:
        return f"{used:.3%} used"
    if full is None:
        none = ": no copies pay off, or none fit" if asked and not used else ""
        return f"{used:.3%} used of {100 * asked:g}% allowed{none}"
    saved = max(1 - full / content["objective_seconds"], 0.0) if content["objective_seconds"] else 0
    capacity = format_bytes(min(content["capacity_bytes"]))
    return (
        f"{used:.3%} used; all that the devices have for it, {capacity} a rank, would save at most "
        f"{saved:.2%} of the iteration"
    )


def curve_table(curve: list[dict[str, Any]]) -> Any:
    """Memory and time; the row of the plan itself is marked."""
    table = new_table("extra memory", "used", "fullest rank", "iteration", "of least", "gap", "")
    least = min(point["objective_seconds"] for point in curve)
    for point in curve:
        seconds = point["objective_seconds"]
        table.add_row(
            f"{100 * point['extra_memory']:g}%",
            f"{100 * point['extra_memory_ratio']:.4g}%",
            format_bytes(point["memory_bytes"]),
            format_duration(seconds),
            f"{seconds / least:.4f}" if least else "-",
            format_gap(point["certified_gap"]),
            "the plan" if point["plan"] else "",
        )
    return table


def facts_table(facts: list[tuple[str, str]]) -> Any:
    """Names in the left column, sentences in the right one, wrapped where they are long."""
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for name, sentence in facts:
        table.add_row(name, sentence)
    return table
