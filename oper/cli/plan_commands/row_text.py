"""Place of a row, as `oper plan explain` prints it: a sentence, the reason, the details."""

from typing import TYPE_CHECKING

from oper.base.formatting import format_digits, format_duration, plural
from oper.cli.shared.console import facts_table, new_console

if TYPE_CHECKING:
    from oper.analysis.row_facts import RowFacts

_MOST_SLOTS = 4


def print_row(row: "RowFacts", verbose: bool) -> None:
    """Print the facts of a row; with `verbose` partition and slots."""
    out = new_console()
    for sentence in row_sentences(row):
        out.print(sentence)
    if verbose:
        out.print(facts_table(_details(row)))


def row_sentences(row: "RowFacts") -> list[str]:
    """Return the row's place and its number of reads, then the reason."""
    from oper.analysis.row_facts import RowReason

    name, read = f"Row {row.row:,} of table {row.table}", _read(row)
    if row.kind == "striped":
        why = f"cold rows are spread over the ranks in turn; this one is on {_rank(row)}"
        if row.why == RowReason.STAYED:
            why = (
                "it stayed where the previous plan had it, as moving it would not pay: it is on "
                f"{_rank(row)}"
            )
        return [f"{name}: {read}; {why}" if read else f"{name}: {why}"]
    reason = f"Why: {_reason(row)}"
    if row.kind == "replicated":
        copies, ranks = row.replicas, len(row.source)
        where = "every rank" if len(copies) == ranks else f"ranks {ranges(copies)} of {ranks:,}"
        return [f"{name}: a copy on {where}; {read}", reason]
    where = _rank(row) + ("" if row.memory == "host" else " alone")
    return [f"{name}: on {where}; {read}" if read else f"{name}: on {where}", reason]


def _reason(row: "RowFacts") -> str:
    """Return the reason for the place of a listed or replicated row, with its transfer time."""
    from oper.analysis.row_facts import CountBasis, RowReason

    if row.cost is None:
        return {
            RowReason.ONE_RANK: "there is only one rank",
            RowReason.NEVER_READ: (
                "it was never read: it costs only memory, and is where there was room"
            ),
            RowReason.UNREAD: (
                "it was never read, but further samples may read it: how often the plan expects "
                "that is told with --profile"
            ),
            RowReason.ROOM_EVERYWHERE: (
                "there was memory for a copy of it on every rank; how often it was read is in the "
                "profile"
            ),
        }[row.why]
    often = format_digits(row.cost.reads, 3)
    read = {
        CountBasis.PLANNED: f"each rank reads it {often} times a step",
        CountBasis.AT_LEAST: f"each rank reads it at least {often} times a step",
        CountBasis.COUNTED: (
            f"by its count each rank reads it {often} times a step (--profile tells how "
            "often the plan expects it)"
        ),
    }[row.cost.basis]
    alone = format_duration(row.cost.one_owner_seconds)
    copied = format_duration(row.cost.everywhere_seconds)
    times = f"{alone} of a rank's transfer time with one owner, {copied}"
    one_owner = "it has one owner, chosen for an even load"
    return {
        RowReason.EVEN_LOAD: (
            f"{read}, as far as no cache has it; a row of the tier has one owner, chosen for an "
            "even load"
        ),
        RowReason.COPIES_PAY: f"{read}: {times} with a copy on every rank, so it is replicated",
        RowReason.SOME_COPIES_PAY: (
            f"{read}; copies on {len(row.replicas)} ranks avoid the slower links, and more copies "
            "would save less than other rows' copies do with that memory"
        ),
        RowReason.COPIES_DO_NOT_PAY: (
            f"{read}: {times} with copies, so they do not pay; it has one owner"
        ),
        RowReason.LEAST_MEMORY: (
            f"{read}: {times} with copies, but a plan takes the least memory that comes within 1% "
            f"of the fastest, and this one does without; {one_owner}"
        ),
        RowReason.NO_ROOM: (
            f"{read}: {times} with copies, but its copies alone would exceed the extra memory; "
            f"{one_owner}"
        ),
        RowReason.ALLREDUCE_LATENCY: (
            f"{read}: {times} with copies, but all such rows together would save less than the "
            f"AllReduce's latency costs; {one_owner}"
        ),
        RowReason.OTHERS_SAVE_MORE: (
            f"{read}: {times} with copies, but the extra memory is used by rows that save more per "
            f"byte; {one_owner}"
        ),
    }[row.why]


def _read(row: "RowFacts") -> str:
    """Return the number of reads of the row in the profile, as far as it is known."""
    if row.accesses is not None:
        return (
            f"read {plural(row.accesses, 'time')} in the profile" if row.accesses else "never read"
        )
    if row.kind == "replicated":
        return f"read at least {plural(row.accesses_at_least, 'time')} (--profile has the count)"
    most = row.accesses_at_most
    return "" if most is None else f"read at most {plural(most, 'time')}"


def _rank(row: "RowFacts") -> str:
    rank = f"rank {row.owner:,}"
    return (
        f"{rank}, in its host's memory (the table is in the tier)" if row.memory == "host" else rank
    )


def _details(row: "RowFacts") -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = [("kind", row.kind)]
    if row.partition is not None:
        facts.append(("partition", f"{row.partition:,}, in order of accesses from 0"))
    slots = [f"{slot:,} on rank {rank}" for rank, slot in row.slots.items()]
    more = ", …" if len(slots) > _MOST_SLOTS else ""
    facts.append(("slots", ", ".join(slots[:_MOST_SLOTS]) + more))
    if row.kind == "replicated":
        sources = ranges(sorted(set(row.source)))
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
