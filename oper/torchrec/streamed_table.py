"""Tables in a state dict without their rows, which are read and written in pieces.

A StreamedTable is a value of a state dict in the place of a ShardedTensor. Each rank has the block
of rows that the ShardedTensor would have there (state_dict.py), and reads it in pieces, of which
only one is in memory at a time. torch.distributed.checkpoint sees the pieces as shards, so they
have its own format.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from oper.runtime.engine import EmbeddingEngine
from oper.runtime.initial_values import planned_tables
from oper.runtime.table_io import RowBlock, RowRange
from oper.runtime.tables.optimizer_buckets import TORCH_DTYPE
from oper.runtime.tables.optimizers import State

# Bytes of a piece's rows as float32, with their optimizer's states and addresses; a save takes
# several times as much in addition to the tables. The allocator requests blocks of 32 MB and more
# from the system each time.
_PIECE_BYTES = 1 << 24
_ADDRESS_BYTES = 16  # per row: its number and its address


class Streamed(ABC):
    """Tensor of rows, of which each rank has some pieces: their first rows and numbers of rows.
    Every rank has equally many, some of them empty: all ranks read and write together."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[tuple[int, int]]
    ) -> None:
        self.shape, self.dtype, self.pieces = shape, dtype, pieces

    @abstractmethod
    def read(self, piece: int) -> torch.Tensor:
        """Return a piece of this rank's by its number. Call it on all ranks, for each piece."""

    def offsets(self, first: int) -> torch.Size:
        """Return the offsets of a piece in the whole tensor."""
        return torch.Size([first] + [0] * (len(self.shape) - 1))

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Return the pieces as shards. torch.distributed.checkpoint's planner calls a method of
        this name: see its planner_helpers.py."""
        return [
            WriteItem(
                MetadataIndex(name, self.offsets(first)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(self.offsets(first), torch.Size([rows, *self.shape[1:]])),
                    TensorProperties(dtype=self.dtype),
                    torch.Size(self.shape),
                ),
            )
            for first, rows in self.pieces
            if rows
        ]


class TableRows(Streamed):
    """Rows of a table, or of a state of its optimizer: `table` and `state` are their names."""

    def __init__(
        self,
        engine: EmbeddingEngine,
        table: int,
        state: State | None,
        rows: int,
        pieces: list[tuple[int, int]],
    ) -> None:
        planned = planned_tables(engine)[table]
        self._engine, self._table = engine, table
        self._state = state.name if state else None
        self.table, self.state = planned.name, self._state
        tail = (planned.dim,) if state is None else () if state.rowwise else (planned.dim,)
        dtype = torch.float32 if state else TORCH_DTYPE.get(planned.dtype, torch.float32)
        super().__init__((rows, *tail), dtype, pieces)


class StreamedTable(TableRows):
    """Rows of a table, or of a state of its optimizer, in pieces of this rank's block."""

    def __init__(
        self,
        engine: EmbeddingEngine,
        table: int,
        state: State | None,
        blocks: list[tuple[int, int]],
    ) -> None:
        """Cut the ranks' `blocks`, the first row and the number of rows of each, into pieces."""
        rows = planned_tables(engine)[table].rows
        pieces = [piece[engine.rank] for piece in pieces_of_ranks(engine, table, blocks)]
        super().__init__(engine, table, state, rows, pieces)

    def read(self, piece: int) -> torch.Tensor:
        """Return a copy of rows, [rows, dim] or [rows]."""
        asked = RowRange(self._table, *self.pieces[piece])
        (values,) = self._engine.read_rows([asked], self._state)
        return values.to(self.dtype)

    def write(self, parts: list[tuple[int, torch.Tensor]]) -> None:
        """Give rows new values: first rows, and the values from there on. Call it on all ranks, for
        each piece."""
        blocks = [RowBlock(self._table, first, values) for first, values in parts]
        self._engine.write_rows(blocks, self._state)


def pieces_of_ranks(
    engine: EmbeddingEngine, table: int, blocks: list[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Return the pieces of all ranks' blocks of a table, first rows and numbers of rows: a list of
    the pieces that all ranks read together, [ranks] each."""
    planned = planned_tables(engine)[table]
    (optimizer,) = {b.optimizer for b in engine.buckets if table in b.tables}
    row_bytes = 4 * planned.dim + optimizer.state_bytes(planned.dim) + _ADDRESS_BYTES
    rows = max(_PIECE_BYTES // row_bytes, 1)
    most = max(count for _, count in blocks)
    return [
        [(first + at, max(min(rows, count - at), 0)) for first, count in blocks]
        for at in range(0, most, rows)
    ]
