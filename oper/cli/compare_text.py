"""A comparison as `oper compare` prints it: what was compared, how good each is, the best."""

from typing import Any

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
from oper.cli.shared.console import new_console, new_table

FETCHES = {
    "raw": "every access reads its row (raw fetches)",
    "distinct": "each rank reads a row once (distinct fetches)",
}
# Of a rank's capacity: a factor above it that is not shown as 1.00.
_SHOWN_OVER = 1.005


def print_runs(runs: list[dict[str, Any]], profile: str, verbose: bool) -> None:
    """Print what was compared, and of each run how good each method is and which is the best; with
    `verbose` the details as well."""
    out = new_console()
    out.print(_compared(runs, profile))
    varies = len({run["settings"]["threshold"] for run in runs}) > 1
    for run in runs:
        entries = run["methods"]
        out.print()
        if len(runs) > 1:
            out.print(f"With {_limits(run['settings'], varies)}:")
        out.print(methods_table(entries))
        if verbose and any(_placed(entry) for entry in entries.values()):
            _print_details(out, run)
        for line in remarks(entries, verbose):
            out.print(line)
        for line in verdict(entries):
            out.print(line)
    out.print()
    out.print(
        "Iterations are predicted, of moving embedding rows alone: without kernel launches and "
        "dense layers." + ("" if verbose else " -v prints memory, lookups and traffic of the ranks")
    )


def _compared(runs: list[dict[str, Any]], profile: str) -> str:
    """What was compared, in a sentence."""
    settings = runs[0]["settings"]
    limits = _limits(settings, False) if len(runs) == 1 else "the limits below"
    return (
        f"{plural(len(runs[0]['methods']), 'method')} compared on {profile}: {settings['mode']} on "
        f"{plural(settings['ranks'], 'rank')} ({settings['topology']}), "
        f"{plural(settings['batch_size'], 'sample')} an iteration, {FETCHES[settings['fetch']]}, "
        f"{limits}"
    )


def _limits(settings: dict[str, Any], with_threshold: bool) -> str:
    """What plans may use."""
    if "reserve" in settings:
        held = dict.fromkeys(format_bytes(c) for c in sorted(settings["capacity_bytes"]))
        limits = f"{' to '.join([*held][:: max(len(held) - 1, 1)])} of memory a rank"
    else:
        limits = f"{format_percent(settings['extra_memory'])} of extra memory for copies"
    if with_threshold:
        limits += f", partitions of at most {format_percent(settings['threshold'])}"
    return limits


def methods_table(entries: dict[str, dict[str, Any]]) -> Any:
    """How good each method is: the first thing to look at."""
    reference, against = _reference(entries)
    table = new_table(
        "method", "iteration", against, "fits its memory", "fullest rank", "planning", left=1
    )
    for name, entry in entries.items():
        planning = format_duration(entry["seconds"]["total"])
        if not _placed(entry):
            table.add_row(name, "-", "-", _fits(entry), "-", planning)
            continue
        seconds = entry["objective_seconds"]
        table.add_row(
            name,
            format_duration(seconds),
            _times(seconds, reference),
            _fits(entry),
            format_bytes(max(entry["memory_bytes"])),
            planning + (" (limit)" if entry["status"] == "time_limit" else ""),
        )
    return table


def _placed(entry: dict[str, Any]) -> bool:
    return entry["objective_seconds"] is not None


def _fitting(entries: dict[str, dict[str, Any]]) -> list[tuple[float, str]]:
    """The methods within the limits, the fastest first; of equal ones in the order given."""
    found = [
        (entry["objective_seconds"], name)
        for name, entry in entries.items()
        if _placed(entry) and entry["certified_gap"] is not None
    ]
    return sorted(found, key=lambda pair: pair[0])


def _reference(entries: dict[str, dict[str, Any]]) -> tuple[float | None, str]:
    """The iteration that others are compared with, and the heading of the column."""
    if "oper" in entries and _placed(entries["oper"]):
        return entries["oper"]["objective_seconds"], "times oper's"
    fitting = _fitting(entries)
    return (fitting[0][0] if fitting else None), "times the best"


def _times(seconds: float, reference: float | None) -> str:
    if reference is None:
        return "-"
    if reference:
        return format_factor(seconds / reference)
    return "1.00" if seconds == reference else "-"


def _fits(entry: dict[str, Any]) -> str:
    """Whether a placement keeps the limits; if not, by how much it exceeds the memory."""
    if not _placed(entry):
        return "no plan in time" if entry["status"] == "time_limit" else "no plan"
    factor = entry["capacity_factor"]
    if entry["status"] == "infeasible":
        shown = format_factor(factor) if factor >= _SHOWN_OVER else format_digits(factor, 6)
        return f"no: {shown}x its memory"
    return "yes" if entry["certified_gap"] is not None else "no: too many copies"


def verdict(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Which method is the best, by how much, and how far OPER is from optimal."""
    fitting = _fitting(entries)
    if not fitting:
        return ["No method fits: none has a plan within the limits"]
    seconds, best = fitting[0]
    sentence = f"Best: {best}, {format_duration(seconds)} an iteration"
    if len(fitting) > 1:
        after, second = fitting[1]
        if not seconds or after / seconds - 1 < 5e-5:
            sentence += f"; {second}, the next that fits, takes as long"
        else:
            share = format_share(after / seconds - 1)
            sentence += f"; {second}, the next that fits, takes {share} longer"
    else:
        sentence += "; no other method fits" if len(entries) > 1 else ""
    lines = [sentence]
    oper = entries.get("oper")
    if oper is not None and oper["certified_gap"] is not None:
        lines.append(
            f"Certified: oper's plan takes {at_most(oper['certified_gap'])} longer than the best "
            "possible within these limits"
        )
    return lines


def remarks(entries: dict[str, dict[str, Any]], verbose: bool) -> list[str]:
    """What the first table does not say: why there is no plan, what TorchRec and the solver did."""
    lines = []
    for name, entry in entries.items():
        notes = entry["notes"]
        if not _placed(entry):
            lines.append(f"{name}: {notes['reason']}")
            continue
        if name == "torchrec":
            lines += _torchrec_remarks(entry, verbose)
        elif entry["certified_gap"] is None and entry["status"] != "infeasible":
            lines.append(
                f"{name}: its copies take {format_share(entry['extra_memory_ratio'])} of the "
                "tables' bytes, more than was allowed"
            )
        if name == "milp":
            lines.append(
                f"milp: {notes['solver']} placed {plural(notes['partitions'], 'partition')}, each "
                "as a whole; an iteration "
                f"takes {at_most(notes['solver_gap'])} longer than with the best such placement"
            )
    return lines


def _torchrec_remarks(entry: dict[str, Any], verbose: bool) -> list[str]:
    """How TorchRec's planner came to its plan: it counts memory itself, and was given more of it
    until it found one."""
    notes, given = entry["notes"], entry["notes"]["capacity_factor"]
    tables = ", ".join(f"{n} {kind}" for kind, n in notes["tables"].items())
    found = f"torchrec: its planner shards tables {tables}"
    if given > 1:
        found += f", found when it was told of {format_factor(given)}x the memory"
    if not verbose:
        return [found]
    return [
        found,
        f"torchrec: by its own estimate an iteration takes "
        f"{format_duration(notes['estimate_seconds'])}, and moves "
        f"{format_bytes(notes['pooled_bytes']['total'])} of pooled vectors",
    ]


def _print_details(out: Any, run: dict[str, Any]) -> None:
    """The figures of the ranks: memory, lookups, links, traffic and how even they are."""
    placed = {name: entry for name, entry in run["methods"].items() if _placed(entry)}
    most = ("most", "mean", "least")
    memory = new_table(
        "of a rank", *(f"memory:\n{m}" for m in most), *(f"lookups:\n{m}" for m in most)
    )
    links = new_table(
        "of two ranks",
        *(f"bytes:\n{m}" for m in most),
        *(f"min/max:\n{kind}" for kind in ("memory", "lookups", "links")),
        "above the\nbest possible",
    )
    traffic = new_table("of all ranks", "rows", "gradients", "AllReduce", "its method", "total")
    for name, entry in placed.items():
        memory.add_row(
            name,
            *map(format_bytes, _most_mean_least(entry["memory_bytes"])),
            *map(format_number, _most_mean_least(entry["lookups"])),
        )
        even = [entry["dob"][kind] for kind in ("memory", "lookups", "link_cost")]
        gap = entry["certified_gap"]
        links.add_row(
            name,
            *map(format_bytes, _most_mean_least(pairs(entry["link_bytes"]))),
            *("-" if value is None else format_share(value) for value in even),
            "-" if gap is None else format_gap(gap),
        )
        moved = entry["communication_bytes"]
        traffic.add_row(
            name,
            *(format_bytes(moved[kind]) for kind in ("fetch", "gradient", "allreduce")),
            entry["allreduce_method"],
            format_bytes(moved["total"]),
        )
    for table in (memory, links, *([traffic] if run["settings"]["mode"] == "training" else [])):
        out.print()
        out.print(table)
    out.print()


def pairs(matrix: list[list[float]]) -> list[float]:
    """The values of ordered pairs of different ranks; a single 0 where there is one rank."""
    found = [v for i, row in enumerate(matrix) for j, v in enumerate(row) if i != j]
    return found or [0.0]


def _most_mean_least(values: list[float]) -> tuple[float, float, float]:
    return max(values), sum(values) / len(values), min(values)
