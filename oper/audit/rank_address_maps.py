"""The address maps of all ranks as they lie in a plan's folder, side by side."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Ints
from oper.base.tensors import as_int64
from oper.plan.address_map import AddressMap
from oper.plan.plan import Plan, load_rank_map

_CHUNK_ADDRESSES = 1 << 18  # 2 MiB of int64, what a second-level cache holds


class Addresses(NamedTuple):
    """Rows of one table, int64 [N], and where each rank reads them, int64 [M, N]."""

    table: int
    rows: Ints
    addresses: Ints


class RankMaps:
    """The maps of all ranks of a plan."""

    def __init__(self, plan: Plan, folder: Path | str) -> None:
        self._rows = plan.layout.rows.tolist()
        self._chunk_rows = max(_CHUNK_ADDRESSES // plan.ranks, 1024)
        self._maps = [
            AddressMap(plan.tables, plan.layout, load_rank_map(folder, rank, plan.layout))
            for rank in range(plan.ranks)
        ]

    def translate(self, rank: int, table: int, rows: Ints) -> Ints:
        """Where one rank reads rows of a table: addresses int64 [N]."""
        addresses: Ints = self._maps[rank].translate(table, as_int64(rows)).numpy()
        return addresses

    def chunks(self, table: int, rows: Ints) -> Iterator[Addresses]:
        """The addresses of rows of a table, some of the rows at a time."""
        for first in range(0, len(rows), self._chunk_rows):
            part = rows[first : first + self._chunk_rows]
            found = [self.translate(rank, table, part) for rank in range(len(self._maps))]
            yield Addresses(table, part, np.stack(found))

    def all_rows(self) -> Iterator[Addresses]:
        """The addresses of all rows of all tables."""
        for table, rows in enumerate(self._rows):
            for first in range(0, rows, self._chunk_rows):
                part = np.arange(first, min(first + self._chunk_rows, rows))
                yield from self.chunks(table, part)
