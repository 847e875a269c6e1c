"""The plan, table by table: rows, bytes, accesses, how they are placed, and where."""

from dataclasses import dataclass

from oper.base.arrays import Ints
from oper.base.formatting import format_bytes, format_share
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import RowsByKind
from oper.profiling.profile import Profile


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number that it is sorted by."""

    shown: str
    value: float | None = None  # None: sorted as text


@dataclass(frozen=True)
class SortableTable:
    """A row for each table, those with the most accesses (or bytes) first."""

    headers: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    sentence: str


def table_list(plan: Plan, kinds: RowsByKind, profile: Profile | None) -> SortableTable:
    """With accesses where there is a profile."""
    accesses = None if profile is None else profile.accesses_of_tables
    sizes = kinds.bytes_of_tables
    weights = sizes if accesses is None else accesses
    order = sorted(range(len(plan.tables)), key=lambda t: (-int(weights[t]), -int(sizes[t]), t))
    all_bytes, all_accesses = max(int(sizes.sum()), 1), 1
    if accesses is not None:
        all_accesses = max(int(accesses.sum()), 1)
    rows = []
    for t in order:
        table = plan.tables[t]
        counted = []
        if accesses is not None:
            share = int(accesses[t]) / all_accesses
            counted = [
                Cell(f"{int(accesses[t]):,}", int(accesses[t])),
                Cell(format_share(share, 1), share),
            ]
        rows.append(
            (
                Cell(table.name),
                Cell(f"{table.rows:,}", table.rows),
                Cell(str(table.dim), table.dim),
                Cell(format_bytes(int(sizes[t])), int(sizes[t])),
                Cell(format_share(int(sizes[t]) / all_bytes, 1), int(sizes[t]) / all_bytes),
                *counted,
                *(
                    Cell(f"{int(of_kind[t]):,}", int(of_kind[t]))
                    for of_kind in (kinds.replicated, kinds.listed, kinds.striped)
                ),
                Cell(_where(plan, kinds, t)),
            )
        )
    counted_headers = [] if accesses is None else ["accesses", "of accesses"]
    headers = ["table", "rows", "dim", "bytes", "of bytes", *counted_headers]
    headers += ["replicated", "listed", "striped", "where"]
    return SortableTable(tuple(headers), rows, _sentence(plan, sizes, accesses))


def _sentence(plan: Plan, sizes: Ints, accesses: Ints | None) -> str:
    """Which tables dominate."""

    def most(values: Ints, noun: str) -> str:
        total = max(int(values.sum()), 1)
        if len(values) > 1 and int(values.min()) == int(values.max()):
            return f"All tables have as many {noun}, {values[0] / total:.1%} each."
        order = sorted(range(len(values)), key=lambda t: (-int(values[t]), t))[:3]
        shares = [f"{plan.tables[t].name} has {values[t] / total:.1%}" for t in order]
        return f"Of the {noun} {', '.join(shares)}."

    said = [] if accesses is None else [most(accesses, "accesses")]
    return " ".join([*said, most(sizes, "bytes")])


def _where(plan: Plan, kinds: RowsByKind, t: int) -> str:
    memory = "hosts of " if t in plan.tier else ""
    ranks = int(kinds.ranks_with_rows[t])
    return memory + ("all ranks" if ranks == plan.ranks else f"{ranks} of {plan.ranks} ranks")
