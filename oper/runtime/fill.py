"""Filling tables with their first values, rank by rank in blocks of rows.

Every rank makes or has whole blocks and writes them to whoever holds their rows, so that values do
not depend on the plan; a round has one block of each rank, so that little memory is needed.
"""

from collections.abc import Iterator, Sequence

import torch

from oper.runtime.embedding import Embedding
from oper.runtime.initialise import BLOCK_ROWS, initial_rows


def fill_tables(engine: Embedding) -> None:
    """Give all rows the initial values of their tables, by the seed of rank 0's torch."""
    seed = engine.node.from_first(torch.initial_seed())
    blocks = list(_blocks(engine))
    for begin in range(0, len(blocks), engine.ranks):
        mine = blocks[begin + engine.rank : begin + engine.rank + 1]
        engine.write_rows(
            [
                (table, first, _initial(engine, table, seed, first, count))
                for table, first, count in mine
                if begin + engine.rank < len(blocks)
            ]
        )


def copy_tables(engine: Embedding, weights: Sequence[torch.Tensor]) -> None:
    """Give all rows the values that rank 0 has of them: of each table [rows, dim]."""
    for table, first, count in _blocks(engine):
        block = [(table, first, weights[table][first : first + count])]
        engine.write_rows(block if engine.rank == 0 else [])


def _initial(engine: Embedding, table: int, seed: int, first: int, count: int) -> torch.Tensor:
    planned = engine.plan.tables[engine.tables[table].index]
    return initial_rows(engine.tables[table].fill, planned, seed, first, count)


def _blocks(engine: Embedding) -> Iterator[tuple[int, int, int]]:
    """All tables in blocks: table, first row, rows."""
    for number, table in enumerate(engine.tables):
        rows = engine.plan.tables[table.index].rows
        for first in range(0, rows, BLOCK_ROWS):
            yield number, first, min(BLOCK_ROWS, rows - first)
