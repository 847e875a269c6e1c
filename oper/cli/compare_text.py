"""A comparison as `oper compare` prints it: what was compared, how good each is, the best."""

from typing import TYPE_CHECKING, Any

from oper.base.defaults import POOLED_GAIN
from oper.base.formatting import (
    at_most,
    format_bytes,
    format_digits,
    format_duration,
    format_factor,
    format_gap,
    format_number,
    format_percent,
    format_share,
    plural,
)
from oper.base.spoken import spoken
from oper.cli.shared.console import new_console, new_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oper.planner.baselines.baseline import TorchRecNotes
    from oper.planner.compare import Comparison, MethodResult

_EQUAL = 5e-5  # a relative difference of steps below which they are called equal
_READINGS = {"rank": "one rank", "all ranks": "all ranks"}
# The least factor over a rank's capacity that is not shown as 1.00.
_SHOWN_OVER = 1.005


def print_runs(runs: "Sequence[Comparison]", profile: str, verbose: bool) -> None:
    """Print what was compared, and of each run how good each method is and which is the best; with
    `verbose` the details as well."""
    out = new_console()
    out.print(_compared(runs, profile))
    varies = len({run.asked.threshold for run in runs}) > 1
    for run in runs:
        out.print()
        if len(runs) > 1:
            out.print(f"With {_limits(run, varies)}:")
        out.print(methods_table(run))
        if verbose and any(result.cost for result in run.methods.values()):
            _print_details(out, run)
        for line in (*pooled_remarks(run), *remarks(run.methods, verbose)):
            out.print(line)
        for line in verdict(run):
            out.print(line)
    out.print()
    detailed = spoken("-v prints", "to_json() has")
    out.print(
        "Steps are predicted, as if OPER ran each placement; sorts and dense layers are left out."
        + ("" if verbose else f" {detailed} memory, lookups and traffic of the ranks")
    )


def _compared(runs: "Sequence[Comparison]", profile: str) -> str:
    """Return the methods, data and machine of a comparison, in a sentence."""
    from oper.analysis.wording import FETCHES

    run = runs[0]
    fetch = run.workload.fetch
    assert fetch is not None  # the workload is that on the topology
    limits = _limits(run, False) if len(runs) == 1 else "the limits below"
    return (
        f"{plural(len(run.methods), 'method')} compared on {profile}: {run.workload.mode} on "
        f"{plural(run.ranks, 'rank')} ({run.topology}), "
        f"{plural(run.workload.batch_size, 'sample')} a step, "
        f"{FETCHES[fetch]}, {limits}"
    )


def _limits(run: "Comparison", with_threshold: bool) -> str:
    """Return the memory that plans may use, in words."""
    if run.limits.by_devices:
        held = dict.fromkeys(format_bytes(c) for c in sorted(run.capacity_bytes.tolist()))
        limits = f"{' to '.join([*held][:: max(len(held) - 1, 1)])} of memory a rank"
    else:
        most = format_bytes(int(run.capacity_bytes.max()))
        limits = (
            f"{format_percent(run.limits.extra_memory)} of extra memory for copies, at most {most} "
            "a rank"
        )
    if with_threshold:
        limits += f", partitions of at most {format_percent(run.asked.threshold)}"
    return limits


def methods_table(run: "Comparison") -> Any:
    """Return the table of the methods' steps and memory, the first thing to look at."""
    reference, against = _reference(run)
    later = [] if run.held_out is None else ["held out"]
    table = new_table(
        "method",
        "step",
        against,
        *later,
        "fits its memory",
        "fullest rank",
        "planning",
        left=1,
    )
    for name, result in run.methods.items():
        planning = format_duration(result.total_seconds)
        seconds, unseen = result.step_seconds, result.held_out_step_seconds
        if result.cost is None or seconds is None:
            table.add_row(name, "-", "-", *("-" for _ in later), _fits(result), "-", planning)
            continue
        table.add_row(
            name,
            format_duration(seconds),
            _times(seconds, reference),
            *("-" if unseen is None else format_duration(unseen) for _ in later),
            _fits(result),
            format_bytes(int(result.cost.memory_bytes.max())),
            planning + (" (limit)" if _stopped(result) else ""),
        )
    return table


def _stopped(result: "MethodResult") -> bool:
    from oper.planner.baselines.baseline import Status

    return result.status == Status.TIME_LIMIT


def _reference(run: "Comparison") -> tuple[float | None, str]:
    """Return the step that others are compared with, and the heading of the column."""
    if run.oper is not None and run.oper.step_seconds is not None:
        return run.oper.step_seconds, "times oper's"
    fitting = run.fitting
    return (run.methods[fitting[0]].step_seconds if fitting else None), "times the best"


def _times(seconds: float, reference: float | None) -> str:
    if reference is None:
        return "-"
    if reference:
        return format_factor(seconds / reference)
    return "1.00" if seconds == reference else "-"


def _fits(result: "MethodResult") -> str:
    """Return whether a placement keeps the limits; if not, its memory as a factor of the limit."""
    factor = result.capacity_factor
    if result.cost is None or factor is None:
        return "no plan in time" if _stopped(result) else "no plan"
    if not result.cost.feasible:
        shown = format_factor(factor) if factor >= _SHOWN_OVER else format_digits(factor, 6)
        return f"no: {shown}x its memory"
    return "yes" if result.fits else "no: too many copies"


def verdict(run: "Comparison") -> list[str]:
    """Return the best method, its gain, and the distance of OPER's plan from optimal."""
    fitting = run.fitting
    if not fitting:
        return ["No method fits: none has a plan within the limits"]
    best, *others = fitting
    seconds = run.methods[best].step_seconds or 0.0
    sentence = f"Best: {best}, {format_duration(seconds)} a step"
    if others:
        after, second = run.methods[others[0]].step_seconds or 0.0, others[0]
        if not seconds or after / seconds - 1 < _EQUAL:
            sentence += f"; {second}, the next that fits, takes as long"
        else:
            share = format_share(after / seconds - 1)
            sentence += f"; {second}, the next that fits, takes {share} longer"
    else:
        sentence += "; no other method fits" if len(run.methods) > 1 else ""
    lines = [sentence]
    oper = run.oper
    if oper is not None and oper.cost is not None and oper.certified_gap is not None:
        transfer = format_duration(oper.cost.objective_seconds)
        said = (
            f"Certified: oper's transfer time, {transfer}, is {at_most(oper.certified_gap)} longer "
            "than that of any placement within these limits"
        )
        if run.workload.fetch == "auto":
            said += " with the same tables pooled" if oper.pooled_tables else " without pooling"
        lines.append(said)
    return [*lines, held_out_verdict(run)]


def held_out_verdict(run: "Comparison") -> str:
    """Return the best method on data that none has seen, or that this was not measured."""
    from oper.analysis.wording import HELD_OUT_DATA, WITHOUT_HELD_OUT

    if run.held_out is None:
        return WITHOUT_HELD_OUT
    found = sorted(
        (seconds, name)
        for name in run.fitting
        if (seconds := run.methods[name].held_out_step_seconds) is not None
    )
    said = f"On {HELD_OUT_DATA[run.held_out.source]} ({plural(run.held_out.samples, 'sample')})"
    if not found:
        return f"{said}: no method that fits could be priced"
    (seconds, best), *others = found
    said += f" {best} takes {format_duration(seconds)} a step, the least of those priced"
    if others and seconds:
        after, second = others[0]
        longer = after / seconds - 1
        takes = "takes as long" if longer < _EQUAL else f"takes {format_share(longer)} longer"
        said += f"; {second} {takes}"
    if len(found) < len(run.fitting):
        said += ". held out: -, of methods that do not say which of equally hot rows go where"
    return said


def pooled_remarks(run: "Comparison") -> list[str]:
    """Return the tables that each method pools, if any may be pooled."""
    fetch = run.workload.fetch
    if fetch == "pooled":
        return ["Other methods than oper place rows as without pooling"]
    if fetch != "auto" or not any(result.pooled_tables for result in run.methods.values()):
        return []
    names: dict[int, list[str]] = {}
    for name, result in run.methods.items():
        if result.cost is not None:
            names.setdefault(len(result.pooled_tables), []).append(name)
    said = [f"{number or 'none'} by {', '.join(by)}" for number, by in names.items()]
    return [
        f"Tables pooled: {'; '.join(said)}",
        f"oper pools tables that make its step at least {format_percent(POOLED_GAIN)} shorter; the "
        "others, which place rows as without pooling, tables that make their transfers shortest",
    ]


def remarks(methods: "Mapping[str, MethodResult]", verbose: bool) -> list[str]:
    """Return remarks on methods without a plan, the paper's reading, TorchRec and the solver."""
    from oper.planner.baselines.baseline import PaperNotes, SolverNotes, TorchRecNotes

    lines = []
    for name, result in methods.items():
        cost, notes = result.cost, result.notes
        if cost is None:
            lines.append(f"{name}: {result.reason}")
            continue
        if isinstance(notes, PaperNotes) and notes.batch is not None:
            lines.append(
                f"{name}: its Batch_Size is read as that of {_READINGS[notes.batch]}, which gives "
                "the shorter transfer time"
            )
        if isinstance(notes, TorchRecNotes):
            lines += _torchrec_remarks(notes, verbose)
        elif cost.feasible and not result.fits:
            lines.append(
                f"{name}: its copies take {format_share(cost.extra_memory_ratio)} of the "
                "tables' bytes, more than was allowed"
            )
        if isinstance(notes, SolverNotes):
            lines.append(
                f"{name}: HiGHS placed {plural(notes.partitions, 'partition')}, each "
                "as a whole; its transfers take "
                f"{at_most(notes.solver_gap)} longer than those of the best such placement"
            )
    return lines


def _torchrec_remarks(notes: "TorchRecNotes", verbose: bool) -> list[str]:
    """Return remarks on the plan of TorchRec's planner, which counts memory itself and was given
    more memory until it found a plan."""
    tables = ", ".join(f"{n} {kind}" for kind, n in notes.tables.items())
    found = f"torchrec: its planner shards tables {tables}"
    if notes.capacity_factor > 1:
        found += f", found when it was told of {format_factor(notes.capacity_factor)}x the memory"
    if not verbose:
        return [found]
    return [
        found,
        f"torchrec: by its own estimate a step takes "
        f"{format_duration(notes.estimate_seconds)}, and moves "
        f"{format_bytes(notes.pooled_bytes.total)} of pooled vectors",
    ]


def _print_details(out: Any, run: "Comparison") -> None:
    """The figures of the ranks: memory, lookups, links, traffic and how even they are."""
    most = ("most", "mean", "least")
    memory = new_table(
        "of a rank", *(f"memory:\n{m}" for m in most), *(f"lookups:\n{m}" for m in most)
    )
    links = new_table(
        "of two ranks",
        *(f"bytes:\n{m}" for m in most),
        *(f"min/max:\n{kind}" for kind in ("memory", "lookups", "links")),
        "certified\ngap",
    )
    traffic = new_table("of all ranks", "rows", "gradients", "AllReduce", "its method", "total")
    for name, result in run.methods.items():
        cost, gap = result.cost, result.certified_gap
        if cost is None:
            continue
        memory.add_row(
            name,
            *map(format_bytes, _most_mean_least(cost.memory_bytes.tolist())),
            *map(format_number, _most_mean_least(cost.lookups.tolist())),
        )
        even = (cost.dob.memory, cost.dob.lookups, cost.dob.link_cost)
        links.add_row(
            name,
            *map(format_bytes, _most_mean_least(pairs(cost.link_bytes.tolist()))),
            *("-" if value is None else format_share(value) for value in even),
            "-" if gap is None else format_gap(gap),
        )
        moved = cost.communication_bytes
        traffic.add_row(
            name,
            *map(format_bytes, (moved.fetch, moved.gradient, moved.allreduce)),
            cost.allreduce_method,
            format_bytes(moved.total),
        )
    for table in (memory, links, *([traffic] if run.workload.training else [])):
        out.print()
        out.print(table)
    out.print()


def pairs(matrix: list[list[float]]) -> list[float]:
    """Return the values of ordered pairs of different ranks; a single 0 if there is one rank."""
    found = [v for i, row in enumerate(matrix) for j, v in enumerate(row) if i != j]
    return found or [0.0]


def _most_mean_least(values: list[float]) -> tuple[float, float, float]:
    return max(values), sum(values) / len(values), min(values)
