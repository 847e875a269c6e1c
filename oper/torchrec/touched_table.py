"""Touched rows of a table, for an incremental save: their ids and values.

Rows are ascending, those of rank 0's block first. So a delta's tensors are a table and its
optimizer's states with fewer rows; one more tensor has the numbers of these rows in the table. They
are cut like the table in a whole save: a piece has the touched ones of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import ListedRows, RowRange
from oper.runtime.tables.optimizers import State
from oper.torchrec.streamed_table import Streamed, TableRows, pieces_of_ranks

_ROWS_TOGETHER = 1 << 21  # of a rank, whose marks all ranks exchange at once: 16 bytes each


@dataclass(frozen=True)
class TouchedBlock:
    """Touched rows of this rank's block of a table, piece by piece: the first row of each piece,
    and a packed bit for each of its rows, which take less memory than ids. `before` is the number
    of touched rows of the ranks before this one, `total` that of all ranks."""

    firsts: list[int]
    bits: list[torch.Tensor]
    counts: list[int]
    before: int = 0
    total: int = 0

    @classmethod
    def of(
        cls, engine: EmbeddingEngine, table: int, blocks: list[tuple[int, int]]
    ) -> "TouchedBlock":
        """Return the touched rows of a table of which the ranks have these blocks. Call it on all
        ranks."""
        firsts: list[int] = []
        bits: list[torch.Tensor] = []
        counts: list[int] = []
        pieces = pieces_of_ranks(engine, table, blocks)
        together = max(_ROWS_TOGETHER // max(rows for _, rows in pieces[0]), 1)
        for begin in range(0, len(pieces), together):
            some = pieces[begin : begin + together]
            asked = [
                RowRange(table, of_rank[0][0], sum(rows for _, rows in of_rank))
                for of_rank in zip(*some, strict=True)
            ]
            own_pieces = [piece[engine.rank] for piece in some]
            touched = engine.touched_rows(asked).split([rows for _, rows in own_pieces])
            firsts += [first for first, _ in own_pieces]
            bits += [torch.from_numpy(np.packbits(part.numpy())) for part in touched]
            counts += [int(part.sum()) for part in touched]
        return cls(firsts, bits, counts)

    def among(self, rows: Sequence[int], rank: int) -> "TouchedBlock":
        """Return this block as that of rank `rank`, given the number of touched `rows` of each
        rank's block."""
        return replace(self, before=sum(rows[:rank]), total=sum(rows))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First position of each piece's rows among all touched rows, and their number."""
        ends = (self.before + np.cumsum(self.counts)).tolist()
        return [(end - count, count) for end, count in zip(ends, self.counts, strict=True)]

    def ids(self, piece: int) -> torch.Tensor:
        """Return the touched rows of a piece, int64, ascending."""
        offsets = np.flatnonzero(np.unpackbits(self.bits[piece].numpy()))
        return torch.from_numpy(offsets + self.firsts[piece])


class TouchedIds(Streamed):
    """Ids of the touched rows of a table."""

    def __init__(self, touched: TouchedBlock) -> None:
        super().__init__((touched.total,), torch.int64, touched.pieces)
        self._touched = touched

    def read(self, piece: int) -> torch.Tensor:
        """Return the ids of a piece, [rows]."""
        return self._touched.ids(piece)


class TouchedTable(TableRows):
    """Touched rows of a table, or of a state of its optimizer."""

    def __init__(
        self, engine: EmbeddingEngine, table: int, state: State | None, touched: TouchedBlock
    ) -> None:
        super().__init__(engine, table, state, touched.total, touched.pieces)
        self._touched = touched

    def read(self, piece: int) -> torch.Tensor:
        """Return the values of a piece, [rows, dim] or [rows]."""
        asked = ListedRows(self._table, self._touched.ids(piece))
        (values,) = self._engine.read_rows([asked], self._state)
        return values.to(self.dtype)
