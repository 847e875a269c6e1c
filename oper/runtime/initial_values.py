"""The initial values of tables: a function of the seed, the table's name and the row.

A plan decides the places of rows, and must not decide their values. So rows are made in blocks,
each by the table's own function with a generator that is seeded by a hash of seed, table and block;
any rank can make any block. Tables are filled in rounds of one block per rank, which writes it to
the ranks that hold its rows, so that little memory is needed.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import RowBlock, RowRange
from oper.tables.table import Table

Fill = Callable[[Tensor], object]

BLOCK_ROWS = 65_536

# Functions of torch.nn.init that draw each value by itself, whatever the tensor's shape.
_BY_VALUE = (
    torch.nn.init.uniform_,
    torch.nn.init.normal_,
    torch.nn.init.trunc_normal_,
    torch.nn.init.constant_,
    torch.nn.init.ones_,
    torch.nn.init.zeros_,
)


def block_rows(fill: Fill | None, table: Table) -> int:
    """Return the number of rows of a table that are made at once.

    TorchRec hands a config's `init_fn` the whole table, and the function may look at the shape,
    count rows or copy trained ones. Only functions that are known to draw each value by itself get
    BLOCK_ROWS: those of torch.nn.init, alone or in a functools.partial. Others get the whole table.
    """
    function = fill.func if isinstance(fill, functools.partial) else fill
    return BLOCK_ROWS if fill is None or function in _BY_VALUE else max(table.rows, 1)


def initial_rows(fill: Fill | None, table: Table, seed: int, first: int, count: int) -> Tensor:
    """Return the initial values of rows [first, first + count) of a table, float32 [count, dim].

    Args:
        fill: writes values into a tensor [n, dim] that it is given, drawing from torch's global
            generator, which is left as it was: a TorchRec config's `init_fn`. None is uniform in
            ±√(1/rows), TorchRec's default.
        seed: equal on all ranks.

    Raises:
        OperError: `fill` raised, with the table's name.
    """
    if fill is None:
        bound = math.sqrt(1 / max(table.rows, 1))
        fill = functools.partial(torch.nn.init.uniform_, a=-bound, b=bound)
    rows = torch.empty(count, table.dim)
    step = block_rows(fill, table)
    for begin in range(first - first % step, first + count, step):
        block, end = begin // step, min(begin + step, table.rows)
        low, high = max(begin, first), min(end, first + count)
        if (begin, end) == (low, high):
            _fill_block(fill, table, seed, block, rows[low - first : high - first])
        else:
            whole = torch.empty(end - begin, table.dim)
            _fill_block(fill, table, seed, block, whole)
            rows[low - first : high - first] = whole[low - begin : high - begin]
    return rows


def _fill_block(fill: Fill, table: Table, seed: int, block: int, rows: Tensor) -> None:
    key = hashlib.blake2b(f"{seed} {block} {table.name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(int.from_bytes(key, "little"))
        try:
            fill(rows)
        except Exception as error:
            raise OperError(
                f"table {table.name!r}: its init_fn failed on float32 {list(rows.shape)}: {error}"
            ) from error


def fill_tables(engine: EmbeddingEngine, fills: Sequence[Fill | None]) -> None:
    """Give all rows the initial values that the tables' `fills` make, by the seed of rank 0's
    torch. To be called on all ranks."""
    # A seed is 64 bits without a sign.
    seed = torch.tensor([torch.initial_seed() % (1 << 63)])
    if engine.node.group is not None:
        engine.node.group.run(dist.broadcast, seed, group_src=0, action="tell its seed")
    tables = planned_tables(engine)
    blocks = _blocks(tables, [block_rows(f, t) for f, t in zip(fills, tables, strict=True)])
    for begin in range(0, len(blocks), engine.ranks):
        mine = blocks[begin:][engine.rank : engine.rank + 1]
        try:
            rows = [
                RowBlock(t, first, initial_rows(fills[t], tables[t], int(seed), first, count))
                for t, first, count in mine
            ]
        except BaseException as error:
            engine.fail(error)
            raise
        engine.write_rows(rows)
    native.ops().trim_memory()  # the blocks are larger than the allocations of steps


def copy_tables(engine: EmbeddingEngine, weights: Sequence[torch.Tensor]) -> None:
    """Give all rows the values that rank 0 has of them, [rows, dim] per table. To be called on all
    ranks."""
    tables = planned_tables(engine)
    for t, first, count in _blocks(tables, [BLOCK_ROWS] * len(tables)):
        block = [RowBlock(t, first, weights[t][first : first + count])]
        engine.write_rows(block if engine.rank == 0 else [])
    native.ops().trim_memory()


def planned_tables(engine: EmbeddingEngine) -> list[Table]:
    """Return the tables of an engine as its plan has them."""
    return [engine.plan.tables[table.index] for table in engine.tables]


def _blocks(tables: Sequence[Table], sizes: Sequence[int]) -> list[RowRange]:
    """Return all rows in blocks."""
    return [
        RowRange(number, first, min(size, table.rows - first))
        for number, (table, size) in enumerate(zip(tables, sizes, strict=True))
        for first in range(0, table.rows, size)
    ]
