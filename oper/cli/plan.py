"""`oper plan`: make a plan from a profile; show, compare, explain and check plans."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from oper.cli import common
from oper.cli.default_verb import DEFAULT, verb
from oper.cli.plan_options import (
    BALANCE,
    BATCH_SIZE,
    CAPACITY,
    DOB,
    EXTRA_MEMORY,
    FETCH,
    JSON,
    MODE,
    THRESHOLD,
    TOPOLOGY,
    load_topology,
)


def register(app: typer.Typer) -> None:
    """Add `oper plan` and its sub-commands."""
    verbs = verb("Make a sharding plan from a profile; show, diff, explain and check plans.")
    verbs.command(DEFAULT, hidden=True)(make)
    app.add_typer(verbs, name="plan")


def make(
    profile: str = typer.Argument(help="A profile folder, or one of its windows: PROFILE@3."),
    output: Path = typer.Option(..., "-o", "--output", help="The plan folder to write."),
    topology: str = TOPOLOGY,
    mode: str = MODE,
    fetch: str = FETCH,
    batch_size: int = BATCH_SIZE,
    extra_memory: str = EXTRA_MEMORY,
    threshold: str = THRESHOLD,
    dob: str = DOB,
    balance: str = BALANCE,
    capacity: str | None = CAPACITY,
    as_json: bool = JSON,
) -> None:
    """Plan the placement of every row and certify how far it is from optimal."""
    from oper.cost import Workload
    from oper.planner.assemble import plan_and_save
    from oper.planner.planner import Settings
    from oper.planner.profile import Profile

    settings = Settings(
        common.parse_share(extra_memory, "--extra-memory"),
        common.parse_share(threshold, "--threshold"),
        common.parse_share(dob, "--dob"),
        balance,
    )
    ranks = load_topology(topology, capacity)
    workload = Workload(mode, fetch, batch_size)  # type: ignore[arg-type]
    opened = Profile.open(profile)
    with common.progress("planning", None) as meter:
        planned = plan_and_save(opened, ranks, workload, settings, output, meter.advance)
    content = {"plan": str(output), **planned.to_json()}
    warning = ranks.memory_warning(planned.realised.cost.memory_bytes)
    if warning:
        Console(stderr=True).print(f"warning: {warning}", highlight=False)
    common.emit(as_json, content, lambda: _print_plan(content))


def _print_plan(content: dict[str, Any]) -> None:
    out = common.console()
    ranks = content["ranks"]
    out.print(
        f"{content['plan']}: {content['rows']:,} rows on {ranks} ranks, {content['mode']}, "
        f"{content['fetch']} fetches, batch {content['batch_size']:,}"
    )
    out.print(rank_table(content))
    for line in plan_lines(content):
        out.print(line)


def rank_table(content: dict[str, Any]) -> Any:
    """Memory, lookups, link bytes and predicted time of each rank (first and last of many)."""
    table = common.table("rank", "memory", "rows served", "fetched", "E", "links", "T")
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
    dob, before = content["dob"], content["greedy_dob"]
    gap, bytes_moved = content["certified_gap"], content["communication_bytes"]
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
        f"traffic, all ranks   fetch {common.size(bytes_moved['fetch'])}, gradients "
        f"{common.size(bytes_moved['gradient'])}, AllReduce {common.size(bytes_moved['allreduce'])} "
        f"({content['allreduce_method']})",
        f"produced by          {content['step']} and {content['exchanges']} exchanges, in "
        f"{content['seconds']['total']:.2f} s",
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
