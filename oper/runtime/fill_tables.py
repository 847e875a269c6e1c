"""Filling tables with their initial values, in blocks of rows.

Every rank makes or has whole blocks and writes them to the ranks that hold their rows, so that
values do not depend on the plan; a round has one block of each rank, so that little memory is
needed.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from oper.base import native
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.initial_values import BLOCK_ROWS, Fill, block_rows, initial_rows
from oper.runtime.table_io import RowBlock, RowRange
from oper.tables.table import Table


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
    native.ops().trim_memory()  # the blocks are larger than what steps allocate


def copy_tables(engine: EmbeddingEngine, weights: Sequence[torch.Tensor]) -> None:
    """Give all rows the values that rank 0 has of them: of each table [rows, dim]. To be called on
    all ranks."""
    tables = planned_tables(engine)
    for t, first, count in _blocks(tables, [BLOCK_ROWS] * len(tables)):
        block = [RowBlock(t, first, weights[t][first : first + count])]
        engine.write_rows(block if engine.rank == 0 else [])
    native.ops().trim_memory()


def planned_tables(engine: EmbeddingEngine) -> list[Table]:
    """The tables of an engine as its plan has them."""
    return [engine.plan.tables[table.index] for table in engine.tables]


def _blocks(tables: Sequence[Table], sizes: Sequence[int]) -> list[RowRange]:
    """All rows in blocks."""
    return [
        RowRange(number, first, min(size, table.rows - first))
        for number, (table, size) in enumerate(zip(tables, sizes, strict=True))
        for first in range(0, table.rows, size)
    ]
