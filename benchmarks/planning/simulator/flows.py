"""Flows over shared resources: how long they take if at every moment rates are max-min fair.

Progressive filling: all rates grow alike until a resource is full, whose flows keep what they have;
the others go on (Bertsekas and Gallager, Data Networks, 6.5.2). When a flow has moved its bytes,
rates are found anew. The bytes through a resource over its bandwidth bound the time from below, for
any way of sharing; flows that are each given a rate in proportion to their bytes reach that bound.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_SAME = 1e-12  # relative: shares that differ by less are equal but for rounding


@dataclass(frozen=True)
class Flows:
    """Flow f moves `bytes[f]` through the resources of `used[f]`, each named once; `used` [F, K] is
    filled up with the number of resources R, which is none. `bandwidth` [R] in bytes/s."""

    bytes: Floats
    used: NDArray[np.int64]
    bandwidth: Floats

    @property
    def bound(self) -> float:
        """Seconds that the busiest resource needs for the bytes through it."""
        through = np.repeat(self.bytes, self.used.shape[1])
        load = np.bincount(self.used.ravel(), through, minlength=len(self.bandwidth) + 1)
        return float((load[:-1] / self.bandwidth).max(initial=0.0))

    @property
    def fair_seconds(self) -> float:
        """Seconds until all bytes are moved at max-min fair rates."""
        left, used = self.bytes[self.bytes > 0], self.used[self.bytes > 0]
        seconds = 0.0
        while len(left):
            rates = fair_rates(used, self.bandwidth)
            ends = left / rates
            step = float(ends.min())
            seconds += step
            moving = ends > step * (1 + _SAME)
            left, used = (left - rates * step)[moving], used[moving]
        return seconds


def fair_rates(used: NDArray[np.int64], bandwidth: Floats) -> Floats:
    """The max-min fair rates of flows that use these resources, [F].

    A resource whose flows could get no more anywhere else is full before any other of theirs: so
    all such resources are filled at once.
    """
    count = len(bandwidth) + 1
    left = np.append(bandwidth, np.inf)
    rates = np.zeros(len(used))
    open_flows = np.arange(len(used))
    while len(open_flows):
        through = used[open_flows]
        users = np.bincount(through.ravel(), minlength=count)
        share = np.where(users > 0, left / np.maximum(users, 1), np.inf)
        offered = share[through]
        least = offered.min(axis=1, keepdims=True)
        elsewhere = (offered > least * (1 + _SAME)).ravel()
        held_back = np.bincount(through.ravel(), elsewhere, minlength=count) > 0
        full = (users > 0) & ~held_back & np.isfinite(share)
        fixed = full[through].any(axis=1)
        rates[open_flows[fixed]] = least[fixed, 0]
        taken = np.repeat(least[fixed, 0], used.shape[1])
        load = np.bincount(through[fixed].ravel(), taken, minlength=count)
        left = np.maximum(left - load, 0.0)
        open_flows = open_flows[~fixed]
    return rates
