"""How each rank caches rows of the tier."""

from dataclasses import dataclass

from oper.base.errors import OperError
from oper.base.units import parse_bytes, parse_share
from oper.scheduler.cache import EVICTIONS, Synchronisation


@dataclass(frozen=True)
class CacheSettings:
    """`size` of a rank's cache: a share of the bytes of the tables that are cached, "10%", or
    bytes, "4GB"; states of their optimizers included. `sync`: when updates reach the tier, as
    `oper simulate --sync` has it, but for fae. `evict`: what leaves a cache, as `--evict`.

    OperError where one is not of these.
    """

    size: str = "10%"
    sync: str = "on-demand"
    evict: str = "lru"

    def __post_init__(self) -> None:
        for name, given in (("size", self.size), ("sync", self.sync), ("evict", self.evict)):
            if not isinstance(given, str):
                raise OperError(
                    f"{name} is a {type(given).__name__}, and a text was needed, such as "
                    f"{type(self).__dataclass_fields__[name].default!r}"
                )
        if self.bytes_of(1 << 40) <= 0:
            raise OperError(f"size {self.size!r}: more than 0 was needed, such as '10%' or '4GB'")
        if self.evict not in EVICTIONS:
            raise OperError(f"evict {self.evict[:40]!r}: one of {', '.join(EVICTIONS)} was needed")
        if self.synchronisation.kind == "fae":
            raise OperError(f"sync {self.sync!r}: is without caches; one with caches was needed")

    @property
    def synchronisation(self) -> Synchronisation:
        """`sync`, parsed."""
        try:
            return Synchronisation.parse(self.sync)
        except OperError as error:
            raise OperError(str(error).replace("--sync", "sync")) from None

    def bytes_of(self, all_bytes: int) -> float:
        """The size in bytes, where all rows take `all_bytes`."""
        if self.size.strip().endswith("%"):
            return parse_share(self.size, "size") * all_bytes
        return float(parse_bytes(self.size, "size"))
