"""The least extra memory that is nearly as good as all that devices hold, by the lower bound.

In: `DeviceLimits`. Out: a share of extra memory. Copies of ever colder rows save ever less, so
most of the memory would be spent on the last percent. The bound of bounds/lagrangian_bound.py is
within a fraction of a percent of what plans reach, falls as memory grows, and takes milliseconds:
the shares, of three digits each, are searched by bisection. Whether the plans themselves are as
close is for place_in_memory.py to see.
"""

from bisect import bisect_left
from functools import cache

from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.memory.device_limits import DeviceLimits

TOLERANCE = 0.01  # relative, of the iteration's time: copies that save less are not made

_SMALLEST_EXPONENT = -6  # a millionth of the tables' bytes, which is hardly a row


def shares_up_to(most: float) -> list[float]:
    """All shares of three digits from none to `most`, ascending."""
    shares = [0.0]
    exponent = _SMALLEST_EXPONENT
    while shares[-1] < most:
        shares += [float(f"{digits}e{exponent - 2}") for digits in range(100, 1000)]
        exponent += 1
    return shares[: bisect_left(shares, most)] + ([most] if most > 0 else shares[:1])


def bound_seconds(limits: DeviceLimits, extra_memory: float) -> float:
    """No plan with this share of extra memory has a shorter iteration."""
    problem = limits.beside_most_replicas(extra_memory)
    return lower_bound(
        problem.classes,
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
    ).seconds


def least_share(limits: DeviceLimits, shares: list[float]) -> int:
    """The index of the least of `shares` whose bound is within TOLERANCE of that of the last."""
    bound = cache(lambda index: bound_seconds(limits, shares[index]))
    most = bound(len(shares) - 1) * (1 + TOLERANCE)
    return bisect_left(range(len(shares) - 1), True, key=lambda index: bound(index) <= most)
