"""Settings of the ranks' caches of the tier: their size, synchronisation and eviction.

The transmissions: csrc/include/oper/scheduler/bulk_synchronous.h (Herald) and bounded_staleness.h
(HET).
"""

import math
from dataclasses import dataclass

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.base.units import parse_bytes, parse_share

EVICTIONS = ("lru", "lfu", "light-lfu", "emark")  # in the kernels' order
PUSHES = ("bsp", "on-demand", "peer")  # in the kernels' order
_MOST = 1 << 40  # updates: more than any row gets
# For `het`: HET's staleness, and the weight of an update of a row that all samples of a batch read.
# So copies are also at most a tenth of a batch apart, which was found to keep the AUC
# (docs/design/staleness-by-frequency.md).
_HET_STALENESS, _HET_BATCH = 100, 1000


@dataclass(frozen=True)
class Synchronisation:
    """Time at which updates reach the tier.

    `bsp`: all updates after every iteration. `on-demand`: when another worker trains the row next.
    `peer`: like on demand, but straight to the workers that train the row and have a copy.
    `het-exact` and `het-printed` (HET as printed in the paper): copies are at most `staleness`
    updates apart. `het`: like `het-exact`, with fewer updates for rows that more samples read.
    `fae`: the share `frequent` of all rows lies on all workers, and no other row is cached.
    """

    kind: str
    staleness: float = 0  # updates; infinite: pushed only when a row leaves its cache
    frequent: float = 0

    @classmethod
    def parse(cls, text: str) -> "Synchronisation":
        """Parse `bsp`, `on-demand`, `peer`, `fae:SHARE`, `het`, `het:S` or `het-exact:S`, S a
        number or inf."""
        kind, colon, bound = text.partition(":")
        if kind == "fae":
            return cls(kind, frequent=parse_share(bound, f"{option('--sync')} fae"))
        if kind in PUSHES and not colon:
            return cls(kind)
        if text == "het":
            return cls(kind, _HET_STALENESS)
        staleness = math.inf if bound == "inf" else float(bound) if bound.isdecimal() else -1
        if kind not in ("het", "het-exact") or not (0 <= staleness < _MOST or bound == "inf"):
            raise OperError(
                f"{option('--sync', text[:40])}: expected bsp, on-demand, peer, fae:SHARE, het, "
                "het:S or het-exact:S, with S the staleness in updates, such as het-exact:10, or "
                "inf"
            )
        return cls("het-printed" if kind == "het" else kind, staleness)

    def __str__(self) -> str:
        if self.kind == "fae":
            return f"fae:{100 * self.frequent:g}%"
        if self.kind in ("het-printed", "het-exact"):
            return f"{self.kind.removesuffix('-printed')}:{self.staleness:g}"
        return self.kind

    @property
    def bound(self) -> int:
        """Staleness in the form that the kernels take."""
        return int(min(self.staleness, _MOST))

    @property
    def batch_weight(self) -> int:
        """Weight that the kernels count for an update of a row that all samples of a batch read, in
        proportion to the samples for other rows; 0 if each update counts 1."""
        return _HET_BATCH if self.kind == "het" else 0

    @property
    def exact(self) -> bool:
        """True if every read has all updates of earlier iterations, for any log."""
        pushed_at_once = self.kind == "het-exact" and self.staleness == 0
        return pushed_at_once or self.kind in (*PUSHES, "fae")


ON_DEMAND = Synchronisation("on-demand")


@dataclass(frozen=True)
class CacheSettings:
    """Settings of each rank's cache of rows of the tier's tables.

    Args:
        size: of a rank's cache, including optimizer states: a share of the bytes of the cached
            tables, "10%", like TorchRec's cache load factor, or bytes, "4GB".
        sync: when updates reach the tier, as in `oper simulate --sync`, except fae, which is
            simulated only.
        evict: eviction from a full cache, as in `oper simulate --evict`; FBGEMM's cache algorithm.

    Raises:
        OperError: a setting is invalid.
    """

    size: str = "10%"
    sync: str = "on-demand"
    evict: str = "lru"

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("sync", self.sync), ("evict", self.evict)):
            if not isinstance(value, str):
                raise OperError(
                    f"{name}: expected a text, such as "
                    f"{type(self).__dataclass_fields__[name].default!r}, got {type(value).__name__}"
                )
        if self.bytes_of(1 << 40) <= 0:
            raise OperError(
                f"size: expected more than 0, such as '10%' or '4GB', got {self.size!r}"
            )
        if self.evict not in EVICTIONS:
            raise OperError(
                f"evict: expected one of {', '.join(EVICTIONS)}, got {self.evict[:40]!r}"
            )
        if self.synchronisation.kind == "fae":
            raise OperError(
                f"sync {self.sync!r}: fae is simulated only, by oper simulate, and caches nothing; "
                f"give it another one, such as {ON_DEMAND}"
            )

    @property
    def synchronisation(self) -> Synchronisation:
        """`sync`, parsed."""
        return Synchronisation.parse(self.sync)

    def bytes_of(self, all_bytes: int) -> float:
        """Return the size in bytes, given `all_bytes` of all rows."""
        if self.size.strip().endswith("%"):
            return parse_share(self.size, "size") * all_bytes
        return float(parse_bytes(self.size, "size"))
