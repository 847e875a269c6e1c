"""Capacity: the bytes of rows that each rank may hold.

The paper's heap size, unless one is given (§6.1): with total the bytes m of all rows, x the extra
memory and w the bytes of each width of row,

    capacity = ⌈total / M · (1 + x)⌉ + Σ w

Σ w is one row of each width, because total / M need not be whole rows. A capacity that is given is
in bytes, or a factor of total / M. If neither a capacity nor x is given, devices have their memory
less a share reserved for the rest of the model, and less the memory of a step.
"""

import math
from collections.abc import Sequence

import numpy as np

from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.base.units import GB, parse_bytes
from oper.topology.number_ranges import BANDWIDTH, MEMORY
from oper.topology.transports import NVSHMEM, STAGE_BYTES, Transport


class CapacityError(OperError):
    """Capacity too small for the tables; `reason` says why, without naming whose capacity it is."""

    def __init__(self, reason: str, of: str = "capacity") -> None:
        super().__init__(f"{of}: {reason}")
        self.reason = reason


# None: the heap size. A float: one factor of total/M for all ranks. A tuple: one value per rank, an
# int in bytes or a float as a factor.
Capacity = tuple[int | float, ...] | float | None

MAX_RANKS = 4_096  # of a topology: a matrix of link costs is then 128 MiB
# A larger bare number is more likely bytes without a unit; no rank holds 10,000 times its share.
_LARGEST_FACTOR = 10_000.0


def parse_capacity(text: str, ranks: int) -> Capacity:
    """Parse `64GB`, or a bare factor of total/ranks such as `3`; one value, or one per rank with
    commas."""
    values = [_parse_one(piece.strip()) for piece in text.split(",")]
    if len(values) == 1:
        return values[0] if isinstance(values[0], float) else tuple(values * ranks)
    if len(values) != ranks:
        raise OperError(
            f"capacity {text!r}: expected one value, or one for each of {ranks} ranks, got "
            f"{len(values)} values"
        )
    return tuple(values)


def rank_capacities(
    capacity: Capacity,
    ranks: int,
    total_bytes: int,
    extra_memory: float,
    width_memory_bytes: Sequence[int],
) -> list[int]:
    """Return the bytes that each rank may hold, for tables of `total_bytes` whose rows have these
    widths.

    Raise OperError, with the missing bytes and a sufficient number of ranks, if not even one copy
    of every row fits.
    """
    if capacity is None:
        heap = math.ceil(total_bytes / ranks * (1 + extra_memory)) + sum(width_memory_bytes)
        return [heap] * ranks
    per_rank = capacity if isinstance(capacity, tuple) else (capacity,) * ranks
    limits = [c if isinstance(c, int) else int(c * total_bytes / ranks) for c in per_rank]
    if total_bytes:
        by_factor = any(isinstance(c, float) for c in per_rank)
        _check_room(limits, by_factor, total_bytes, width_memory_bytes)
    return limits


def device_capacities(
    device_memory_bytes: Sequence[int],
    reserve: float,
    step_bytes: float,
    transport: Transport | None = None,
) -> list[int]:
    """Return the bytes for rows on devices with these memories, [M]: all but the share `reserve`
    and the `step_bytes` of a step. They are negative if the memory is too small. With NVSHMEM every
    rank allocates the same bytes, so the smallest device decides."""
    step = math.ceil(step_bytes)
    room = [int(memory * (1 - reserve)) - step for memory in device_memory_bytes]
    return [min(room) - STAGE_BYTES] * len(room) if transport == NVSHMEM else room


def check_host(
    name: str, ranks: int, memory_bytes: Sequence[int] | None, bandwidth: Sequence[float] | None
) -> None:
    """Raise OperError unless the hosts of topology `name` have one size and one rate per rank,
    within limits, as far as they are given."""
    for what, values, limits in (
        ("host memory", memory_bytes, MEMORY),
        ("host bandwidth", bandwidth, BANDWIDTH),
    ):
        if values is None:
            continue
        if len(values) != ranks:
            raise OperError(
                f"topology {name}: the {what} of {len(values)} ranks, and it has {ranks}"
            )
        for rank, value in enumerate(values):
            if not limits.holds(value):
                raise OperError(
                    f"topology {name}: {what} of rank {rank}: expected {limits}, got {value}"
                )


def memory_warning(
    name: str,
    have_bytes: Sequence[int] | None,
    rows_bytes: Sequence[float] | Floats,
    step_bytes: float,
) -> str | None:
    """Return a warning if the rows of a rank of topology `name` (bytes, [M]) and `step_bytes`
    exceed its memory, [M]; else None."""
    if have_bytes is None:
        return None
    have = np.array(have_bytes, dtype=np.float64)
    over = np.asarray(rows_bytes, dtype=np.float64) + step_bytes - have
    if not (over > 0).any():
        return None
    rank = int(over.argmax())
    with_step = f" and {step_bytes / GB:,.3g} GB for a step" if step_bytes else ""
    return (
        f"rank {rank} needs {rows_bytes[rank] / GB:,.1f} GB for rows{with_step} and has "
        f"{have[rank] / GB:,.1f} GB of memory ({name}): it will not fit without more "
        "ranks, narrower rows or a host tier"
    )


def _parse_one(text: str) -> int | float:
    try:
        factor = float(text)
    except ValueError:
        size = parse_bytes(text, "capacity")
        if size < 1:
            raise OperError(f"capacity {text!r}: expected at least a byte") from None
        return size
    if not 0 < factor <= _LARGEST_FACTOR:
        raise OperError(
            f"capacity {text!r}: a bare number is a factor of total/ranks, above 0 and at most "
            f"{_LARGEST_FACTOR:,.0f}; write bytes with their unit, such as 64GB"
        )
    return factor


def _check_room(
    limits: Sequence[int], by_factor: bool, total_bytes: int, widths: Sequence[int]
) -> None:
    ranks, largest = len(limits), max(limits)
    if max(widths) > largest:
        raise CapacityError(
            f"a row of {max(widths):,} bytes (with its optimizer state, in training) "
            f"fits on no rank, as the largest may hold {largest:,}; raise the capacity"
        )
    # Rows are not split: bytes beyond a multiple of the widths' common divisor hold no row.
    step = math.gcd(*widths)
    usable = [limit // step * step for limit in limits]
    missing = total_bytes - sum(usable)
    if missing <= 0:
        return
    if by_factor:
        enough = 1 + ranks * sum(widths) / total_bytes
        remedy = (
            "more ranks would not help, as a factor is of total/ranks: on average it must be "
            f"{enough:.6g}, which is 1 and a row of each width for rounding"
        )
    else:
        needed = ranks - (-missing // max(usable))
        remedy = f"the smallest number of ranks that is enough is {needed}"
        if needed > MAX_RANKS:
            least = -(-total_bytes // ranks) + sum(widths)
            remedy = (
                f"more ranks would not help: {needed:,} would fit, and a topology has at most "
                f"{MAX_RANKS:,}: raise the capacity, to {least:,} bytes a rank for these {ranks}"
            )
        elif len(set(limits)) > 1:
            remedy += f", if each added rank may hold {largest:,}"
    raise CapacityError(
        f"the tables take {total_bytes:,} bytes and the {ranks} ranks can hold "
        f"{sum(usable):,} of them in whole rows, {missing:,} too few; {remedy}"
    )
