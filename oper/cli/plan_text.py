"""What a plan looks like in a terminal."""

from typing import Any

from oper.cli import common


def rank_table(content: dict[str, Any]) -> Any:
    """Memory, lookups, link bytes and predicted time of each rank (first and last of many)."""
    table = common.table("rank", "memory", "rows served", "fetched", "serving E", "links C", "all T")
    fetched = [sum(row) for row in content["link_bytes"]]
    links = [sum(row) for row in content["link_seconds"]]
    ranks = content["ranks"]
    shown = list(range(ranks)) if ranks <= 16 else [*range(8), *range(ranks - 4, ranks)]
    for rank in shown:
        if ranks > 16 and rank == ranks - 4:
            table.add_row("…")
        table.add_row(
            str(rank),
            common.size(content["memory_bytes"][rank]),
            common.quantity(content["lookups"][rank]),
            common.size(fetched[rank]),
            common.duration(content["lookup_seconds"][rank]),
            common.duration(links[rank]),
            common.duration(content["rank_seconds"][rank]),
        )
    return table


def plan_lines(content: dict[str, Any]) -> list[str]:
    """What a plan says of itself, a line each."""
    dob, before, gap = content["dob"], content["greedy_dob"], content["certified_gap"]
    moved = {name: common.size(b) for name, b in content["communication_bytes"].items()}
    lines = [
        f"predicted iteration  {common.duration(content['objective_seconds'])}, the slowest rank; "
        f"certified within {gap:.4%} of optimal",
        f"balance (min/max)    {_dob_line(dob)}",
    ]
    if before:
        lines.append(
            f"before refining      memory {before['memory']:.3%}, lookups {before['lookups']:.3%}"
        )
    lines += [
        f"threshold            {content['threshold']:.4%}: {content['threshold_reason']}",
        f"extra memory         {content['extra_memory_ratio']:.3%} used of "
        f"{content['asked']['extra_memory']:.3%} asked",
        f"traffic, all ranks   fetch {moved['fetch']}, gradients {moved['gradient']}, "
        f"AllReduce {moved['allreduce']} ({content['allreduce_method']})",
        f"produced by          {content['step']} and {content['exchanges']} exchanges"
        + (f", in {content['seconds']['total']:.2f} s" if "seconds" in content else ""),
    ]
    if content.get("hot_row"):
        lines.append(f"what binds           {content['hot_row']}")
    if not content["feasible"]:
        lines.append("INFEASIBLE           a rank holds more than its capacity")
    return lines


def _dob_line(dob: dict[str, float | None]) -> str:
    names = {"memory": "memory", "lookups": "lookups", "link_cost": "links"}
    return ", ".join(
        f"{label} {'-' if dob[key] is None else format(dob[key], '.3%')}"
        for key, label in names.items()
    )
