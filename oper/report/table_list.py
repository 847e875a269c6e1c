"""The plan, table by table: rows, bytes, accesses, kinds of placement, and places."""

from collections.abc import Sequence
from dataclasses import dataclass

from oper.base.arrays import Ints
from oper.base.formatting import format_bytes, format_share
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import RowsByKind
from oper.profiling.profile import Profile

_NAMED = 5  # tables in a sentence
_ALIKE = 0.99  # of the largest
_SHOWN = 5e-4  # a smaller share prints as 0.0%


@dataclass(frozen=True)
class Cell:
    """A text, and the number that it is sorted by."""

    shown: str
    value: float | None = None  # None: sorted as text


@dataclass(frozen=True)
class SortableTable:
    """A row for each table, those with the most accesses (or bytes) first."""

    headers: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    sentence: str
    total: tuple[str, ...] = ()  # a last row, which is not sorted
    noun: str = "table"  # name of one of its rows


def table_list(plan: Plan, kinds: RowsByKind, profile: Profile | None) -> SortableTable:
    """Return the list of a plan's tables; it has their accesses if there is a profile."""
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
                _share(share),
            ]
        rows.append(
            (
                Cell(table.name),
                Cell(f"{table.rows:,}", table.rows),
                Cell(str(table.dim), table.dim),
                Cell(format_bytes(int(sizes[t])), int(sizes[t])),
                _share(int(sizes[t]) / all_bytes),
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


def _share(share: float) -> Cell:
    """Return a share, to a tenth of a percent."""
    return Cell("<0.1%" if 0 < share < _SHOWN else format_share(share, 1), share)


def _sentence(plan: Plan, sizes: Ints, accesses: Ints | None) -> str:
    """Return the tables that dominate, in a sentence."""
    said = [] if accesses is None else [_most(plan, accesses, "accesses")]
    return " ".join([*said, _most(plan, sizes, "bytes")])


def _most(plan: Plan, values: Ints, noun: str) -> str:
    """Return a sentence on the tables with the most of something, or that none stands out."""
    total, tables = int(values.sum()), len(values)
    if not total:
        return f"There are no {noun}."
    order = sorted(range(tables), key=lambda t: (-int(values[t]), t))
    largest = int(values[order[0]])
    alike = sum(int(value) >= _ALIKE * largest for value in values)
    if alike > _NAMED:
        every = "all" if alike == tables else f"{alike:,} of the"
        return (
            f"No table dominates the {noun}: {every} {tables:,} tables have {largest / total:.1%} "
            f"each{'' if alike == tables else ', and none has more'}."
        )
    named = [order[0]]
    named += [t for t in order[1:_NAMED] if int(values[t]) / total >= _SHOWN]
    names, amounts = [plan.tables[t].name for t in named], [int(values[t]) for t in named]
    others = tables - len(named)
    if others:
        names.append(f"the other {others:,} tables together" if others > 1 else "the other table")
        amounts.append(total - sum(amounts))
    shares = ", ".join(map("{} {}".format, names, shares_that_add_up(amounts)))
    return f"Of the {noun}: {shares}."


def shares_that_add_up(amounts: Sequence[int]) -> list[str]:
    """Return the share of each amount in their sum, which is positive, to a tenth of a percent. The
    printed shares add up to 100 %: the largest remainders are rounded up. A part is never printed
    as 0 % or 100 %."""
    total = sum(amounts)
    tenths = [1000 * amount // total for amount in amounts]
    by_remainder = sorted(range(len(amounts)), key=lambda n: (-(1000 * amounts[n] % total), n))
    for n in by_remainder[: 1000 - sum(tenths)]:
        tenths[n] += 1

    def shown(amount: int, tenth: int) -> str:
        if not amount:
            return "none"
        if not tenth:
            return "less than 0.1%"
        if tenth == 1000 and amount < total:
            return "more than 99.9%"
        return f"{tenth / 10:.1f}%"

    return list(map(shown, amounts, tenths))


def _where(plan: Plan, kinds: RowsByKind, t: int) -> str:
    memory = "hosts of " if t in plan.tier else ""
    ranks = int(kinds.ranks_with_rows[t])
    return memory + ("all ranks" if ranks == plan.ranks else f"{ranks} of {plan.ranks} ranks")
