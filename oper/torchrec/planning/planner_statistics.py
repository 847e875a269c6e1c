"""Statistics of TorchRec's planner, for a plan of OPER."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from oper.analysis.wording import NOT_MEASURED
from oper.base.formatting import plural
from oper.plan.plan import Plan

_WIDTH = 100
_MOST_RANKS = 64


def planner_statistics(plan: Plan, tables: Mapping[str, str], seconds: float) -> list[str]:
    """Return the lines of the report: per rank, per table, and for the whole plan.

    `tables` are the tables' paths in the model by their names; `seconds` is the duration of
    planning.
    """
    prediction, ranks = plan.cost, plan.ranks
    proof = ""
    gap = None if plan.certificate is None else plan.certificate.certified_gap
    if gap is not None:
        proof = f", certified within {100 * gap:.3g} % of the least time"
    batch, fetch = plan.workload.batch_size, f"fetch {plan.workload.fetch}"
    if 0 < len(plan.pooled_tables) < len(plan.tables):
        fetch += f", pooled of {len(plan.pooled_tables)} of {plural(len(plan.tables), 'table')}"
    moved = prediction.communication_bytes
    lines = ["#" * _WIDTH, *_boxed(["--- Planner Statistics ---"], center=True)]
    lines += _boxed([f"--- OPER, ran for {seconds:.2f}s{proof} ---", "-" * (_WIDTH - 4)], True)
    lines += _boxed(_rank_table(plan))
    lines += _boxed(
        [
            "",
            "Perf: Total perf (Lookup, Fetch, Gradients and update), predicted",
            "Memory: rows and optimizer state, of the capacity; Served, Fetched: per iteration",
            "",
            "Parameter Info:",
            *_table_table(plan, tables),
            "",
            f"Batch Size: {batch // ranks} per rank, {batch} over {ranks} ranks; "
            f"mode {plan.workload.mode}, {fetch}",
            f"Copies of rows: {prediction.extra_memory_ratio:.2%} of the tables' memory; "
            f"AllReduce of their gradients: {plan.allreduce_method}",
            f"Perf of the slowest rank on data held out: {_held_out(plan)}",
            f"Moved per iteration, all ranks: fetch {moved.fetch / 1e6:.3f} MB, gradients "
            f"{moved.gradient / 1e6:.3f} MB, AllReduce {moved.allreduce / 1e6:.3f} MB",
        ]
    )
    return [*lines, "#" * _WIDTH]


def _held_out(plan: Plan) -> str:
    if plan.held_out is None:
        return NOT_MEASURED
    return f"{plan.held_out.objective_seconds * 1e3:.3f} ms"


def _rank_table(plan: Plan) -> list[str]:
    prediction = plan.cost
    rows = []
    for rank in range(min(plan.ranks, _MOST_RANKS)):
        total = prediction.rank_seconds[rank]
        lookup = prediction.lookup_seconds[rank]
        fetch = prediction.link_seconds[rank].sum()
        memory, capacity = prediction.memory_bytes[rank], prediction.capacity_bytes[rank]
        parts = (lookup, fetch, total - lookup - fetch)
        rows.append(
            [
                rank,
                f"{memory / 1e6:,.2f} ({memory / capacity:.0%})",
                f"{prediction.lookups[rank]:,.0f}",
                f"{prediction.link_bytes[rank].sum() / 1e6:.3f}",
                f"{total * 1e3:.3f} ({', '.join(f'{part * 1e3:.3f}' for part in parts)})",
            ]
        )
    table = _table(["Rank", "Memory (MB)", "Served (rows)", "Fetched (MB)", "Perf (ms)"], rows)
    left_out = plan.ranks - len(rows)
    return table + ([f"… and {left_out} more ranks"] if left_out else [])


def _table_table(plan: Plan, paths: Mapping[str, str]) -> list[str]:
    listed, copied = _listed_rows(plan)
    rows = [
        [
            f"{paths[table.name]}.{table.name}".removeprefix("."),
            f"{table.rows:,}",
            table.dim,
            table.dtype,
            f"{listed[t]:,}",
            f"{copied[t]:,}",
            table.optimizer,
        ]
        for t, table in enumerate(plan.tables)
    ]
    return _table(["FQN", "Rows", "Dim", "Dtype", "Placed singly", "Replicated", "Optimizer"], rows)


def _listed_rows(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of individually placed rows of each table, and of those with several
    copies."""
    layout = plan.layout
    first, (group, _) = layout.listed_offset, layout.listed_places()
    copied = np.append(0, np.cumsum(layout.holds.sum(axis=1)[group] > 1))
    return np.diff(first), np.diff(copied[first])


def _table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return lines with headers, rules and cells, each column as wide as its widest cell."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]


def _boxed(lines: Iterable[str], center: bool = False) -> list[str]:
    return [f"# {line:{'^' if center else '<'}{_WIDTH - 4}} #" for line in lines]
