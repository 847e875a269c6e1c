"""Where a row is and why, as `oper plan explain` prints it: a sentence, the reason, the details."""

from typing import Any

from oper.base.formatting import plural
from oper.cli.plan_commands.plan_text import facts_table
from oper.cli.shared.console import new_console

_MOST_SLOTS = 4


def print_row(content: dict[str, Any], verbose: bool) -> None:
    """Print what `oper.audit.explain` found; with `verbose` partition and slots."""
    out = new_console()
    for sentence in row_sentences(content):
        out.print(sentence)
    if verbose:
        out.print(facts_table(_details(content)))


def row_sentences(content: dict[str, Any]) -> list[str]:
    """Where the row is and how often it was read, then why."""
    name = f"Row {content['row']:,} of table {content['table']}"
    read = _read(content)
    if content["kind"] == "striped":
        kept = content["why"].startswith("it stayed")
        why = f"{content['why']}; this one is" if not kept else f"{content['why']}: it is"
        why = f"{why} on {_rank(content)}"
        return [f"{name}: {read}; {why}" if read else f"{name}: {why}"]
    reason = f"Why: {content['why']}"
    if content["kind"] == "replicated":
        copies, ranks = content["replicas"], len(content["path"])
        where = "every rank" if len(copies) == ranks else f"ranks {ranges(copies)} of {ranks:,}"
        return [f"{name}: a copy on {where}; {read}", reason]
    where = _rank(content) + ("" if content["in_tier"] else " alone")
    return [f"{name}: on {where}; {read}", reason]


def _read(content: dict[str, Any]) -> str:
    """How often the row was read in the profile, as far as that is known."""
    accesses, most = content["accesses"], content["accesses_at_most"]
    if accesses is not None:
        return f"read {plural(accesses, 'time')} in the profile" if accesses else "never read"
    if content["kind"] == "replicated":
        return (
            f"read at least {plural(content['accesses_at_least'], 'time')} (--profile has the "
            "count)"
        )
    return "" if most is None else f"read at most {plural(most, 'time')}"


def _rank(content: dict[str, Any]) -> str:
    rank = f"rank {content['owner']:,}"
    return (
        f"{rank}, in its host's memory (the table is in the tier)" if content["in_tier"] else rank
    )


def _details(content: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [("kind", content["kind"])]
    if content["partition"] is not None:
        facts.append(("partition", f"{content['partition']:,}, in order of accesses from 0"))
    slots = [f"{slot:,} on rank {rank}" for rank, slot in content["slots"].items()]
    more = ", …" if len(slots) > _MOST_SLOTS else ""
    facts.append(("slots", ", ".join(slots[:_MOST_SLOTS]) + more))
    if content["kind"] == "replicated":
        sources = ranges(sorted(set(content["path"])))
        facts.append(("read from", f"ranks {sources}, each rank from the nearest"))
    return facts


def ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)
