"""Touched rows of a table, as an incremental save writes them: their ids, and values beside these.

Rows are ascending, those of rank 0's block first. So a delta's tensors are a table's and its
optimizer's states with fewer rows, and one more has the number of each of these in the table. They
are cut as a whole save cuts the table: a piece has the touched ones of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import ListedRows, RowRange
from oper.runtime.tables.optimizers import State
from oper.torchrec.streamed_table import Streamed, TableRows, pieces_of_ranks

_ROWS_TOGETHER = 1 << 21  # of a rank, of which all know their marks at a time: 16 bytes each


@dataclass(frozen=True)
class TouchedBlock:
    """The touched rows of this rank's block of a table, piece by piece: the first row of each, and
    a bit for each of its rows, packed, which take less than ids. `before` are touched rows of the
    ranks before this one, `total` those of all."""

    firsts: list[int]
    bits: list[torch.Tensor]
    counts: list[int]
    before: int = 0
    total: int = 0

    @classmethod
    def of(
        cls, engine: EmbeddingEngine, table: int, blocks: list[tuple[int, int]]
    ) -> "TouchedBlock":
        """Those of a table of which the ranks have these blocks. To be called on all ranks."""
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
            mine = [piece[engine.rank] for piece in some]
            touched = engine.touched_rows(asked).split([rows for _, rows in mine])
            firsts += [first for first, _ in mine]
            bits += [torch.from_numpy(np.packbits(part.numpy())) for part in touched]
            counts += [int(part.sum()) for part in touched]
        return cls(firsts, bits, counts)

    def among(self, rows: Sequence[int], rank: int) -> "TouchedBlock":
        """This block, of a rank, where the ranks' blocks have so many touched rows."""
        return replace(self, before=sum(rows[:rank]), total=sum(rows))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Where the rows of each piece begin among all touched ones, and how many there are."""
        ends = (self.before + np.cumsum(self.counts)).tolist()
        return [(end - count, count) for end, count in zip(ends, self.counts, strict=True)]

    def ids(self, piece: int) -> torch.Tensor:
        """The touched rows of a piece, int64, ascending."""
        found = np.flatnonzero(np.unpackbits(self.bits[piece].numpy()))
        return torch.from_numpy(found + self.firsts[piece])


class TouchedIds(Streamed):
    """Which rows of a table were touched."""

    def __init__(self, touched: TouchedBlock) -> None:
        super().__init__((touched.total,), torch.int64, touched.pieces)
        self._touched = touched

    def read(self, piece: int) -> torch.Tensor:
        """Their ids, [rows]."""
        return self._touched.ids(piece)


class TouchedTable(TableRows):
    """The touched rows of a table, or of a state of its optimizer."""

    def __init__(
        self, engine: EmbeddingEngine, table: int, state: State | None, touched: TouchedBlock
    ) -> None:
        super().__init__(engine, table, state, touched.total, touched.pieces)
        self._touched = touched

    def read(self, piece: int) -> torch.Tensor:
        """Their values, [rows, dim] or [rows]."""
        asked = ListedRows(self._table, self._touched.ids(piece))
        (values,) = self._engine.read_rows([asked], self._state)
        return values.to(self.dtype)
