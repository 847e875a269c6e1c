"""A plan as `oper plan show` and `oper plan -v` print it: summary, ranks, tables, reasons."""

from typing import TYPE_CHECKING, Any

from oper.base.formatting import (
    format_bytes,
    format_digits,
    format_duration,
    format_factor,
    format_number,
    format_percent,
    format_share,
    plural,
)
from oper.base.spoken import all_figures, option, spoken
from oper.cli.plan_commands.plan_summary import print_summary
from oper.cli.shared.console import facts_table, new_console, new_table

if TYPE_CHECKING:
    from oper.analysis.plan_facts import Copies, LinkUse, PlanFigures
    from oper.cost.step_time import StepTime
    from oper.plan.plan import Plan
    from oper.plan.reference_figures import SimplePlan
    from oper.planner.place_by_table import FetchChoice

_MOST_RANKS = 16
_SHOWN_RANKS = 8  # of more
_MOST_TABLES = 14
_SHOWN_TABLES = 12  # of more
_SHOWN_SAVING = 5e-5  # of the transfer time: less is 0.00 %


def print_plan(
    figures: "PlanFigures", name: str, verbose: bool, choice: "FetchChoice | None" = None
) -> None:
    """Print a plan called `name`; with `verbose` all tables, and how the plan was made."""
    out = new_console()
    print_summary(figures, name, choice)
    out.print()
    print_ranks(out, figures.plan, verbose)
    out.print()
    shown, rest = tables_table(figures, verbose)
    out.print(shown)
    for sentence in tables_text(figures, rest):
        out.print(sentence)
    out.print()
    out.print(facts_table(plan_facts(figures.plan, verbose)))


def print_ranks(out: Any, plan: "Plan", verbose: bool) -> None:
    """Print memory, lookups, fetched bytes and transfer times of the ranks, or of the slowest of
    many; with tables in the hosts' memory, the memory of each device and host.

    The last time is the sum of the others: serving rows, fetching rows, and in training updating
    rows with gradients and AllReduce.
    """
    training, cost = plan.workload.training, plan.cost
    memory = ["memory"] if len(plan.memories) == 1 else [f"{m.name} memory" for m in plan.memories]
    headers = ["rank", *memory, "lookups", "fetched", "serving", "fetching"]
    table = new_table(*headers, *(["updating"] if training else []), "transfer time")
    totals = cost.rank_seconds.tolist()
    shown = list(range(plan.ranks))
    if not verbose and len(shown) > _MOST_RANKS:
        shown = sorted(shown, key=lambda rank: -totals[rank])[:_SHOWN_RANKS]
    for rank in shown:
        serving, total = float(cost.lookup_seconds[rank]), totals[rank]
        fetching = float(cost.link_seconds[rank].sum())
        times = [serving, fetching, *([total - serving - fetching] if training else []), total]
        table.add_row(
            f"{rank:,}",
            *(format_bytes(int(held.cost.memory_bytes[rank])) for held in plan.memories),
            format_number(float(cost.lookups[rank])),
            format_bytes(float(cost.link_bytes[rank].sum())),
            *map(format_duration, times),
        )
    out.print(table)
    if len(shown) < len(totals):
        out.print(
            f"the {len(shown)} slowest; the fastest of {len(totals):,} takes "
            f"{format_duration(min(totals))}. {spoken('-v prints', 'to_json() has')} all"
        )
    updating = "; updating: gradients to the rows' owners, and AllReduce" if training else ""
    out.print(f"serving: reads of a rank's own rows; fetching: rows of other ranks{updating}")


def tables_table(figures: "PlanFigures", verbose: bool) -> tuple[Any, int]:
    """Return the largest tables first, and how many are left out; with `verbose` none."""
    kinds, tables = figures.kinds, figures.plan.tables
    sizes = kinds.bytes_of_tables
    order = sorted(range(len(tables)), key=lambda t: -int(sizes[t]))
    shown = order
    if not verbose and len(order) > _MOST_TABLES:
        shown = order[:_SHOWN_TABLES]
    made = new_table("table", "rows", "memory", "accesses", "replicated", "listed", "striped")
    for t in shown:
        made.add_row(
            tables[t].name,
            f"{int(kinds.rows[t]):,}",
            format_bytes(int(sizes[t])),
            _accesses(figures, t),
            *(f"{int(of[t]):,}" for of in (kinds.replicated, kinds.listed, kinds.striped)),
        )
    return made, len(order) - len(shown)


def _accesses(figures: "PlanFigures", t: int) -> str:
    """Return the table's share of all accesses, of which a plan without its profile has no counts
    of striped rows."""
    plan, listed = figures.plan, int(figures.kinds.listed_accesses[t])
    total = int(plan.owner_accesses.sum()) + plan.replica_accesses
    if not total:
        return "-"
    if figures.accesses is not None:
        return format_share(int(figures.accesses[t]) / total, 1)
    share = format_share(listed / total, 1)
    if not figures.kinds.striped[t]:
        return share
    return f"≥ {share}" if listed else "-"


def tables_text(figures: "PlanFigures", left_out: int) -> list[str]:
    """Return the meaning of the table's columns, and the tables that it leaves out."""
    kinds = figures.kinds
    rows = max(int(kinds.rows.sum()), 1)
    parts = [
        f"{name}: {what} ({format_share(int(number.sum()) / rows, 1)} of all rows)"
        for name, what, number in (
            ("replicated", "a copy on several ranks", kinds.replicated),
            ("listed", "on the rank that was chosen for it", kinds.listed),
            ("striped", "over the ranks in turn, as it is seldom read", kinds.striped),
        )
        if number.any()
    ]
    more = f"and {left_out:,} more, smaller; {all_figures(verbose=True)} them all"
    uncounted = figures.accesses is None and kinds.striped.any()
    if uncounted:
        more_counts = spoken("for which give --profile", "which the profile has")
        parts_of_accesses = (
            f"accesses: share of all; ≥: without those of striped rows, {more_counts}"
        )
    return [
        *([more] if left_out else []),
        "; ".join(parts),
        *([parts_of_accesses] if uncounted else []),
    ]


def plan_facts(plan: "Plan", verbose: bool) -> list[tuple[str, str]]:
    """Return a plan's properties as names and sentences; with `verbose` how it was made."""
    from oper.analysis.plan_facts import copies, link_use, threshold
    from oper.analysis.wording import METHOD_NAMES, bound_note, hot_row, threshold_sentence

    facts, cost, certificate = [], plan.cost, plan.certificate
    if plan.host is not None:
        facts.append(("tier", _tier(plan)))
    if plan.memories[0].tables:
        facts.append(("copies", copies_text(plan, copies(plan))))
    links = link_use(plan)
    if links is not None:
        facts.append(("links", links_text(links)))
    facts.append(("traffic", _traffic(plan)))
    if cost.mailbox_bytes:
        facts.append(("memory of a step", _step_memory(plan)))
    found = threshold(plan)
    if found is not None:
        facts.append(("threshold", threshold_sentence(found)))
    if certificate is not None:
        for name, said in (
            ("what limits it", hot_row(certificate)),
            ("the bound", bound_note(certificate)),
        ):
            facts += [] if said is None else [(name, said)]
    if verbose:
        facts += [(METHOD_NAMES[each.method], simple_plan_text(each)) for each in plan.simple_plans]
        facts += _making(plan)
    if plan.step_time is not None:
        facts.append(("phases of a step", phases_text(plan.step_time)))
    facts.append((_FETCHING, fetching_text(plan)))
    facts.append(
        (
            "times",
            "predicted. The transfer time, of the plan and of ranks, is that of rows and gradients "
            "alone; plans are compared by it. A step also has latency, outputs and ids, and its "
            "memories and links work at once. Sorts and dense layers are in neither",
        )
    )
    return facts


def phases_text(step: "StepTime") -> str:
    """Return the phases of a step with their times."""
    return ", ".join(f"{phase.name} {format_duration(phase.seconds)}" for phase in step.phases)


def _step_memory(plan: "Plan") -> str:
    """Return the memory of a step on a rank, in addition to rows."""
    cost, what = plan.cost, "gradients"
    if plan.topology.of_devices:
        what = "batches, their sort, sums and mailbox" if plan.workload.training else "batches"
    step = f"{format_bytes(cost.mailbox_bytes)} a rank for {what}"
    if cost.allreduce_memory_bytes:
        replicas = "replicas' sums" if plan.topology.of_devices else "their AllReduce"
        step += f", {format_bytes(cost.allreduce_memory_bytes)} for {replicas}"
    return f"{step}, expected"


_FETCHING = "fetches"


def fetching_text(plan: "Plan") -> str:
    """Return the way rows are fetched, and the plans that this one compares with."""
    from oper.analysis.wording import fetching

    fetch = plan.workload.fetch
    text = fetching(plan)
    if plan.pooled_tables and fetch != "pooled":
        text += (
            f": pooled of {len(plan.pooled_tables)} of {plural(len(plan.tables), 'table')} "
            f"({', '.join(plan.pooled_tables)}), {fetch} of the others"
        )
    else:
        text += (
            f". Compare it with plans of {fetch} fetches alone, as those with others move other "
            f"bytes; without {option('--fetch')} they are raw on one node and distinct on several"
        )
    if plan.vector_ratio is not None:
        text += (
            f"; {_range_of(plan.vector_ratio)} bytes of sums come from other nodes for a byte of "
            "the rows that are added up there"
        )
    return text


def _range_of(values: tuple[float, ...]) -> str:
    """Numbers in three digits: the least and the largest, or one where these are equal."""
    ends = [format_digits(value, 3) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def simple_plan_text(found: "SimplePlan") -> str:
    """Return the steps of a simple plan, and whether it fits."""
    parts = [f"{format_duration(found.step_seconds)} a step"]
    if found.held_out_step_seconds is not None:
        parts.append(f"held out {format_duration(found.held_out_step_seconds)}")
    fits = "" if found.fits else ", which does not fit"
    taken = format_percent(found.memory_factor)
    parts.append(f"{taken} of the fullest rank's memory{fits}")
    return "; ".join(parts)


def _traffic(plan: "Plan") -> str:
    if plan.ranks == 1:
        return "none: there is one rank"
    moved = plan.cost.communication_bytes
    parts = [f"{format_bytes(moved.fetch)} of rows"]
    if plan.workload.training:
        parts.append(f"{format_bytes(moved.gradient)} of gradients to owners")
        if plan.allreduce_method != "none":
            parts.append(
                f"{format_bytes(moved.allreduce)} of copies' gradients (AllReduce by "
                f"{plan.allreduce_method})"
            )
    return f"in a step, all ranks together: {', '.join(parts)}"


def _tier(plan: "Plan") -> str:
    """Return the tables in the hosts' memory, what their reads take, and what is left for
    caches."""
    from oper.analysis.plan_facts import cache_replay, cache_room_bytes

    assert plan.host is not None
    names = plan.tier_names
    tables = ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")
    if len(names) == len(plan.tables):
        tables = "all tables"
    sentence = (
        f"{tables} in the hosts' memory: {format_duration(plan.host.cost.objective_seconds)} of "
        "a rank's transfer time, if no cache had any of their rows"
    )
    free, replay = cache_room_bytes(plan), cache_replay(plan)
    if free is not None:
        sentence += f"; {format_bytes(free)} a device are left for caches"
    if replay is not None:
        sentence += (
            f"; every rank replays the caches of all, in {replay.row_bytes:,} bytes of its host's "
            f"memory for each row that any of them caches, {format_bytes(replay.total_bytes)} if "
            "all cached all"
        )
    return sentence


def copies_text(plan: "Plan", found: "Copies") -> str:
    """Return the memory of copies, and the reason for no more copies."""
    from oper.analysis.plan_facts import CopiesLimit

    if found.limit == CopiesLimit.ONE_RANK:
        return "none: there is one rank"
    used = found.used_share
    taken = f"they take {format_percent(used)} of the tables' bytes" if used else "none"
    if found.limit == CopiesLimit.LEAST_MEMORY:
        assert found.saved_share is not None
        capacity = format_bytes(int(plan.cost.capacity_bytes.min()))
        shorter = "not be shorter"
        if found.saved_share >= _SHOWN_SAVING:
            shorter = f"be at most {format_share(found.saved_share)} shorter"
        return (
            f"{taken}; with all memory that plans may use, {capacity} a rank, the transfer time "
            f"would {shorter}"
        )
    if found.allowed_share is None:
        return taken
    if found.limit != CopiesLimit.NONE_PAYS:
        return f"{taken}, as much as was allowed" if used else f"{taken}, as none is allowed"
    more = "another" if used else "one"
    why = "save no time"
    if plan.workload.training:
        why = "save less in reads than its gradients cost"
    return (
        f"{taken}, though {format_percent(found.allowed_share)} of the tables' bytes were allowed: "
        f"{more} would {why}, or not fit"
    )


def links_text(found: "LinkUse") -> str:
    """Return the reason that links are used unevenly, if that is right."""
    from oper.analysis.plan_facts import LinkLoad

    even = (
        "what counts is their sum for each rank, and transfer times of ranks are even to "
        f"{format_share(found.even)}"
    )
    if found.load == LinkLoad.UNEVEN:
        least = format_share(found.balance, 1)
        return f"the least busy is used {least} as long as the busiest; {even}"
    links = (
        f"{format_share(found.slow_share, 0)} of the links are {format_factor(found.slower)} times "
        "slower than the fastest"
    )
    slow, fast = format_bytes(found.slow_bytes), format_bytes(found.fast_bytes)
    if found.load == LinkLoad.SLOW_LESS:
        return (
            f"{links}, so ranks read less through these: {slow} a pair of ranks, {fast} through "
            "fast ones"
        )
    if found.load == LinkLoad.SLOW_MORE:
        return (
            f"{links}, and {slow} a pair of ranks go through these, {fast} through fast ones; "
            f"{even}"
        )
    return f"{links} and carry as much as fast ones, {fast} a pair of ranks; {even}"


def _making(plan: "Plan") -> list[tuple[str, str]]:
    """Return the balance of the ranks, and the stages that reached it."""
    dob, record, parts = plan.cost.dob, plan.record, plan.main.partitions
    even = (
        f"{label} {'-' if value is None else format_share(value, 3)}"
        for label, value in (
            ("memory", dob.memory),
            ("lookups", dob.lookups),
            ("links", dob.link_cost),
        )
    )
    facts = [("balance, min/max", ", ".join(even))]
    if record is not None:
        if record.greedy_dob is not None:
            before = record.greedy_dob
            memory, lookups = (format_share(v, 3) for v in (before.memory, before.lookups))
            facts.append(("before refining", f"memory {memory}, lookups {lookups}"))
        made = f"{record.step} and {plural(record.swaps, 'round')} of swaps"
        if plan.seconds:
            made += f", in {format_duration(plan.seconds['total'])}"
        facts.append(("produced by", made))
    if parts is not None:
        facts.append(
            (
                "partitions",
                f"{parts.access_bounded:,} closed by their accesses, with "
                f"{format_share(parts.access_bounded_accesses, 1)} of all in "
                f"{format_share(parts.access_bounded_bytes, 1)} of the bytes; "
                f"{parts.memory_bounded:,} closed by their bytes",
            )
        )
    layout = plan.layout
    facts.append(
        (
            "address map",
            f"{layout.bitmap_bytes_per_row():.3f} bytes a row; "
            f"{plural(layout.listed, 'row')} with an entry, the others striped",
        )
    )
    return facts
