"""How a rank caches the rows of the tier."""

from dataclasses import dataclass

from oper.base.errors import OperError
from oper.base.units import parse_bytes, parse_share
from oper.scheduler.cache import EVICTIONS, Synchronisation


@dataclass(frozen=True)
class CacheSettings:
    """`size` of each rank's cache: a share of the bytes of the tables that are cached ("10%"), or
    bytes ("4GB"); with the optimizer's state. `sync`: when updates reach the tier, by the names of
    `oper simulate --sync`, but for fae; `evict`: what leaves the cache, by those of `--evict`."""

    size: str = "10%"
    sync: str = "on-demand"
    evict: str = "lru"

    def __post_init__(self) -> None:
        self.bytes_of(1)
        if self.evict not in EVICTIONS:
            raise OperError(f"evict {self.evict[:40]!r}: one of {', '.join(EVICTIONS)} was needed")
        if self.synchronisation.kind == "fae":
            raise OperError(
                "sync 'fae': there are no caches in it; replicas are in any plan without a tier"
            )

    @property
    def synchronisation(self) -> Synchronisation:
        """`sync`, parsed."""
        return Synchronisation.parse(self.sync)

    def bytes_of(self, all_bytes: int) -> float:
        """The size in bytes, where all rows take `all_bytes`."""
        if self.size.strip().endswith("%"):
            return parse_share(self.size, "the cache's size") * all_bytes
        return float(parse_bytes(self.size, "the cache's size"))
