"""Settings requested of a plan, and its limits, of which the devices may decide a part.

`PlanSettings` are written as they were given; the values chosen for missing settings are in
`Limits`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oper.base.defaults import DOB, THRESHOLD
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.base.units import finite_number


@dataclass(frozen=True)
class PlanSettings:
    """Settings requested of a plan.

    extra_memory: bytes of extra copies, as a share of one copy of all tables; None lets the
    devices' memory decide (oper/planner/device_limits.py), of which `reserve` is the share for the
    rest of the model, or a default share if their memory is unknown. threshold: the share of all
    bytes or accesses at which a partition is closed (§4.1). dob: the degree of balance that
    backtracking aims at (§4.2). balance: minimise the slowest rank's "time" or the slowest "link".
    tier: the names of the tables that lie in the hosts' memory, or "all".

    Raise OperError if a value is out of range.
    """

    extra_memory: float | None = None
    threshold: float = THRESHOLD
    dob: float = DOB
    balance: Literal["time", "link"] = "time"
    reserve: float | None = None  # None: the default, if there is a device memory
    tier: Sequence[str] | Literal["all"] = ()

    def __post_init__(self) -> None:
        for name in ("extra_memory", "threshold", "dob", "reserve"):
            value = getattr(self, name)
            if value is not None or name not in ("extra_memory", "reserve"):
                object.__setattr__(
                    self, name, finite_number(value, option(f"--{name.replace('_', '-')}"))
                )
        if self.extra_memory is not None and not 0 <= self.extra_memory <= 1e6:
            raise OperError(
                f"{option('--extra-memory', self.extra_memory)}: expected a share of at least 0"
            )
        if not 0 < self.threshold <= 1:
            raise OperError(
                f"{option('--threshold', self.threshold)}: expected a share above 0, at most 1"
            )
        if not 0 < self.dob <= 1:
            raise OperError(f"{option('--dob', self.dob)}: expected a share above 0, at most 1")
        if self.reserve is not None and not 0 <= self.reserve < 1:
            raise OperError(
                f"{option('--reserve', self.reserve)}: expected a share of at least 0, below 1"
            )
        if self.balance not in ("time", "link"):
            raise OperError(f"{option('--balance', self.balance)}: expected 'time' or 'link'")
        if self.tier != "all":
            object.__setattr__(self, "tier", _table_names(self.tier))


def _table_names(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise OperError(f"tier: expected a list of tables' names, or 'all', got {given!r}")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str) or not name:
            raise OperError(f"tier: expected names of tables, got {name!r} among them")
        if names.count(name) > 1:
            raise OperError(f"tier: table {name!r} is named twice; name each once")
    return names


@dataclass(frozen=True)
class Limits:
    """Limits that a plan keeps.

    extra_memory: bytes of extra copies, as a share of one copy of all tables on devices. reserve:
    the share of a device's memory that is left to the rest of the model; None if the devices'
    memory does not limit the plan.
    """

    extra_memory: float
    reserve: float | None = None

    @property
    def by_devices(self) -> bool:
        """True if the devices' memory limits the plan."""
        return self.reserve is not None
