"""The memory in which every rank replays the caches of all ranks (csrc/include/oper/scheduler/).

Each rank has a record of each row that any of them caches, with a part for each rank, whether it
caches the row or not: with M ranks, caches on demand and LRU 64 + 8 M bytes. Beside them lie the
rows' numbers by address, and the order in which each cache's rows leave it.
"""

from dataclasses import dataclass

from oper.base import native


@dataclass(frozen=True)
class CacheReplay:
    """Bytes of the host's memory that the replay takes on each rank.

    `row_bytes`: of a row that any rank caches. `total_bytes`: of all of them, with what finds them
    and puts them in order, where each rank caches as many rows as it may.
    """

    row_bytes: int
    total_bytes: int

    @classmethod
    def of(
        cls, ranks: int, rows: int, cached: int, bounded: bool = False, eviction: int = 0
    ) -> "CacheReplay":
        """Of `ranks` which cache `cached` of `rows` rows each.

        `bounded`: with a staleness (HET). `eviction`: the number of the way to evict in
        `oper.scheduler.cache_settings.EVICTIONS`; LRU unless given.
        """
        row, copy, number, order = native.ops().cache_record_bytes(bounded, eviction).tolist()
        known = min(rows, ranks * cached)
        row_bytes = row + ranks * copy
        return cls(row_bytes, known * (row_bytes + number) + ranks * cached * order)
