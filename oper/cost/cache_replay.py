"""The memory in which every rank replays the caches of all ranks (csrc/include/oper/scheduler/).

Each rank has a record of each row that any rank caches, with a part for every rank: with M ranks,
caches on demand and LRU 64 + 8 M bytes. Next to the records lie the rows' numbers by address, and
the order in which rows leave each cache.
"""

from dataclasses import dataclass

from oper.base import native


@dataclass(frozen=True)
class CacheReplay:
    """Host memory of the replay on each rank, in bytes.

    `row_bytes`: per row that any rank caches. `total_bytes`: for all rows, with their index and
    their order, if every cache is full.
    """

    row_bytes: int
    total_bytes: int

    @classmethod
    def of(
        cls, ranks: int, rows: int, cached: int, bounded: bool = False, eviction: int = 0
    ) -> "CacheReplay":
        """Return the memory for `ranks` that cache `cached` of `rows` rows each.

        `bounded`: with a staleness (HET). `eviction`: the number of the eviction policy in
        `oper.scheduler.cache_settings.EVICTIONS`; LRU unless given.
        """
        row, copy, number, order = native.ops().cache_record_bytes(bounded, eviction).tolist()
        known = min(rows, ranks * cached)
        row_bytes = row + ranks * copy
        return cls(row_bytes, known * (row_bytes + number) + ranks * cached * order)
