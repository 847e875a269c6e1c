"""The plan, table by table: rows, bytes, accesses, how they are placed, and where."""

from dataclasses import dataclass

from oper.base.arrays import Ints
from oper.base.formatting import format_bytes, format_share
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import RowsByKind
from oper.profiling.profile import Profile

_NAMED = 5  # tables in a sentence
_ALIKE = 0.99  # of the largest


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
    total: tuple[str, ...] = ()  # a last row, which is not sorted
    noun: str = "table"  # what one of its rows is


def table_list(plan: Plan, kinds: RowsByKind, profile: Profile | None) -> SortableTable:
    """The list of a plan's tables; it has their accesses where there is a profile."""
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
    counted_headers = [] if accesses is None else ["accesses", "of all accesses"]
    headers = ["table", "rows", "dim", "bytes", "of all bytes", *counted_headers]
    headers += ["replicated", "listed", "striped", "where"]
    of_kinds = (kinds.replicated, kinds.listed, kinds.striped)
    total = (
        "all tables",
        f"{int(kinds.rows.sum()):,}",
        "",
        format_bytes(int(sizes.sum())),
        "",
        *([] if accesses is None else [f"{int(accesses.sum()):,}", ""]),
        *(f"{int(of_kind.sum()):,}" for of_kind in of_kinds),
        "",
    )
    return SortableTable(tuple(headers), rows, _sentence(plan, sizes, accesses), total)


def _sentence(plan: Plan, sizes: Ints, accesses: Ints | None) -> str:
    """Which tables dominate."""
    said = [] if accesses is None else [_most(plan, accesses, "accesses")]
    return " ".join([*said, _most(plan, sizes, "bytes")])


def _most(plan: Plan, values: Ints, noun: str) -> str:
    """The tables that have most of something, or that none stands out."""
    total, tables = max(int(values.sum()), 1), len(values)
    order = sorted(range(tables), key=lambda t: (-int(values[t]), t))
    largest = int(values[order[0]])
    alike = sum(int(value) >= _ALIKE * largest for value in values)
    if alike > _NAMED:
        every = "all" if alike == tables else f"{alike:,} of the"
        return (
            f"No table dominates the {noun}: {every} {tables:,} tables have {largest / total:.1%} "
            f"each{'' if alike == tables else ', and none has more'}."
        )
    named = order[: min(_NAMED, tables)]
    together = sum(int(values[t]) for t in named) / total
    shares = ", ".join(f"{plan.tables[t].name} {values[t] / total:.1%}" for t in named)
    if len(named) == tables:
        return f"Of the {noun}: {shares}."
    return f"Of the {noun} {together:.1%} are in {len(named)} of {tables:,} tables: {shares}."


def _where(plan: Plan, kinds: RowsByKind, t: int) -> str:
    memory = "hosts of " if t in plan.tier else ""
    ranks = int(kinds.ranks_with_rows[t])
    return memory + ("all ranks" if ranks == plan.ranks else f"{ranks} of {plan.ranks} ranks")
