"""Address maps of all ranks, read from a plan's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Ints, as_int64
from oper.plan.address_map import AddressMap
from oper.plan.layout import copies_map
from oper.plan.plan import Plan, load_rank_map

_CHUNK_ADDRESSES = 1 << 18  # 2 MiB of int64, which fit in a second-level cache


class Addresses(NamedTuple):
    """Rows of one table, int64 [N], the addresses at which each rank reads them, int64 [M, N], and
    the same addresses with LOCAL for every copy that the rank has, even if it reads another."""

    table: int
    rows: Ints
    addresses: Ints
    copies: Ints


class RankMaps:
    """Maps of all ranks of a plan."""

    def __init__(self, plan: Plan, folder: Path | str) -> None:
        self._rows = plan.layout.rows.tolist()
        self._chunk_rows = max(_CHUNK_ADDRESSES // plan.ranks, 1024)
        layout = plan.layout
        maps = [load_rank_map(folder, rank, layout) for rank in range(plan.ranks)]
        self._maps = [AddressMap(plan.tables, layout, rank_map) for rank_map in maps]
        self._maps_of_copies = {
            rank: AddressMap(plan.tables, layout, copies_map(layout, maps[rank]))
            for rank in np.flatnonzero(layout.unread_copies.any(axis=0)).tolist()
        }

    def translate(self, rank: int, table: int, rows: Ints) -> Ints:
        """Return the addresses at which one rank reads rows of a table, int64 [N]."""
        addresses: Ints = self._maps[rank].translate(table, as_int64(rows)).numpy()
        return addresses

    def chunks(self, table: int, rows: Ints) -> Iterator[Addresses]:
        """Yield the addresses of rows of a table, in chunks."""
        for first in range(0, len(rows), self._chunk_rows):
            part = rows[first : first + self._chunk_rows]
            addresses = np.stack(
                [self.translate(rank, table, part) for rank in range(len(self._maps))]
            )
            copies = addresses.copy() if self._maps_of_copies else addresses
            for rank, of_copies in self._maps_of_copies.items():
                copies[rank] = of_copies.translate(table, as_int64(part)).numpy()
            yield Addresses(table, part, addresses, copies)

    def all_rows(self) -> Iterator[Addresses]:
        """Yield the addresses of all rows of all tables, in chunks."""
        for table, rows in enumerate(self._rows):
            for first in range(0, rows, self._chunk_rows):
                part = np.arange(first, min(first + self._chunk_rows, rows))
                yield from self.chunks(table, part)
