"""A plan as `oper plan` and `oper plan show` print it: what it is, its ranks, its tables, why."""

from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from oper.base.formatting import (
    at_most,
    format_bytes,
    format_digits,
    format_duration,
    format_gap,
    format_number,
    plural,
)
from oper.cli.plan_commands.plan_facts import plan_facts
from oper.cli.plan_commands.table_kinds import tables_table, tables_text
from oper.cli.shared.console import new_console, new_table

if TYPE_CHECKING:
    from oper.topology.topology import Topology

_MOST_RANKS = 16
_SHOWN_RANKS = 8  # of more


def print_plan(content: dict[str, Any], topology: "Topology", verbose: bool) -> None:
    """Print the JSON object of a plan for `topology`; with `verbose` all tables, and how the plan
    was made."""
    out = new_console()
    for sentence in headline(content, topology.name):
        out.print(sentence)
    out.print()
    print_ranks(out, content, verbose)
    out.print()
    shown, rest = tables_table(content, verbose)
    out.print(shown)
    for sentence in tables_text(content, rest):
        out.print(sentence)
    out.print()
    out.print(facts_table(plan_facts(content, topology, verbose)))


def headline(content: dict[str, Any], topology: str) -> list[str]:
    """What the plan is and how good, in sentences."""
    tables = len(content["tables_by_kind"])
    sentences = [
        f"{content['plan']}: {plural(content['rows'], 'row')} of {plural(tables, 'table')} on "
        f"{plural(content['ranks'], 'rank')} ({topology}), for {content['mode']} with batches of "
        f"{plural(content['batch_size'], 'sample')}, {content['fetch']} fetches"
    ]
    iteration = f"Predicted iteration: {format_duration(content['objective_seconds'])}"
    if "certified_gap" in content:  # plans that were put together by hand have no certificate
        iteration += f", {at_most(content['certified_gap'])} longer than the best possible"
    sentences.append(iteration)
    if not content["feasible"]:
        over = [
            held - capacity
            for held, capacity in zip(
                content["memory_bytes"], content["capacity_bytes"], strict=True
            )
        ]
        rank = max(range(len(over)), key=over.__getitem__)
        sentences.append(
            "INFEASIBLE: a rank holds more than its capacity"
            if over[rank] <= 0
            else f"INFEASIBLE: rank {rank} holds {format_bytes(over[rank])} more than its capacity"
        )
    return sentences


def print_ranks(out: Any, content: dict[str, Any], verbose: bool) -> None:
    """Memory, lookups, fetched bytes and seconds of each rank (of many, of the slowest); of a plan
    with a tier, the memory of its device and of its host.

    The last time is the sum of the others: serving rows, fetching rows, and in training updating
    rows with gradients and AllReduce.
    """
    training = content["mode"] == "training"
    hosts = content["parts"]["tier"]["memory_bytes"] if "parts" in content else None
    memory = ["memory"] if hosts is None else ["device memory", "host memory"]
    headers = ["rank", *memory, "lookups", "fetched", "serving", "fetching"]
    table = new_table(*headers, *(["updating"] if training else []), "iteration")
    totals = content["rank_seconds"]
    shown = list(range(content["ranks"]))
    if not verbose and len(shown) > _MOST_RANKS:
        shown = sorted(shown, key=lambda rank: -totals[rank])[:_SHOWN_RANKS]
    for rank in shown:
        serving, total = content["lookup_seconds"][rank], totals[rank]
        fetching = sum(content["link_seconds"][rank])
        times = [serving, fetching, *([total - serving - fetching] if training else []), total]
        table.add_row(
            f"{rank:,}",
            format_bytes(content["memory_bytes"][rank]),
            *([] if hosts is None else [format_bytes(hosts[rank])]),
            format_number(content["lookups"][rank]),
            format_bytes(sum(content["link_bytes"][rank])),
            *map(format_duration, times),
        )
    out.print(table)
    if len(shown) < len(totals):
        out.print(
            f"the {len(shown)} slowest; the fastest of {len(totals):,} takes "
            f"{format_duration(min(totals))}. -v prints all"
        )
    updating = "; updating: gradients to the rows' owners, and AllReduce" if training else ""
    out.print(f"serving: reads of a rank's own rows; fetching: rows of other ranks{updating}")


def curve_table(curve: list[dict[str, Any]]) -> Any:
    """Memory and time; the row of the plan itself is marked."""
    table = new_table(
        "extra memory",
        "used by copies",
        "fullest rank",
        "iteration",
        "times the least",
        "above the best\npossible",
        "",
    )
    least = min(point["objective_seconds"] for point in curve)
    for point in curve:
        seconds = point["objective_seconds"]
        table.add_row(
            f"{format_digits(100 * point['extra_memory'], 4)}%",
            f"{format_digits(100 * point['extra_memory_ratio'], 4)}%",
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
