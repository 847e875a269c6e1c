"""Swaps of rows of equal width between holder sets, which lower the largest T (beyond §4.2).

In: rows of each class in each holder set, T of each rank. Out: both after the swaps. A row with one
owner, or with given holders at inference, adds to every rank's T in proportion to its traffic w:
column[g] seconds per byte for holder set g (read_charges.py). Swapping k rows of class a in set g
with k of class b, equal in width, in set h moves x = k·(w_a - w_b) bytes of traffic,
T += x·(column[h] - column[g]), and leaves every set's rows, and so all memory, as they were.
What falls is a smooth maximum, (1/β)·log Σ exp(β·T), β sharpening as T evens out: the plain maximum
has plateaus as soon as two ranks share it. Each round takes the pair of holder sets that lowers it
most and moves its x by swapping rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints

ROUNDS = 400  # of 174 searches half took 20 or fewer, and the longest 184
# Swaps that lower T by less than this share are left out: they are below the certificate's digits.
LEAST_GAIN = 1e-9
# So many rounds that lower T by less than this share in all are the last.
_PATIENCE, _LEAST_PROGRESS = 25, 1e-7
_PAIRS_TRIED = 16
_BISECTIONS = 24
# β over the spread of T: the ranks well above the mean dominate, without plateaus.
_SHARPNESS = 3.0
_SWAP_ROWS = [1] + [4**k for k in range(1, 16)]


class Swap(NamedTuple):
    """`rows` rows of class `give` for as many of class `take`, equal in width."""

    give: int
    take: int
    rows: int


class _Pair(NamedTuple):
    """Bytes of traffic to move from one holder set to another."""

    source: int
    target: int
    traffic_bytes: float


@dataclass
class SwapSearch:
    """Rounds of swaps on `counts` [C, G], changed in place."""

    counts: Ints
    traffic_bytes: Floats  # [C]
    width: Ints  # [C]
    columns: Floats  # [G, M], seconds per byte of traffic
    seconds: Floats  # [M], T of the ranks; changed in place
    # [W, G, G] seconds that a row of g must gain to be swapped with one of h; None: nothing
    price: Floats | None = None
    rounds_made: int = 0

    def __post_init__(self) -> None:
        self._order = [
            order[np.argsort(self.traffic_bytes[order], kind="stable")]
            for w in np.unique(self.width)
            for order in [np.flatnonzero(self.width == w)]
        ]

    def run(self) -> None:
        """Swap until no pair lowers the smooth maximum, or ROUNDS are made; end with the
        counts of the least maximum seen."""
        best, best_counts = float(self.seconds.max()), self.counts.copy()
        best_seconds, before = self.seconds.copy(), np.inf
        for turn in range(ROUNDS):
            if turn % _PATIENCE == 0:
                if best > before * (1 - _LEAST_PROGRESS):
                    break
                before = best
            if not self._round():
                break
            self.rounds_made += 1
            if self.seconds.max() < best:
                best, best_seconds = float(self.seconds.max()), self.seconds.copy()
                best_counts = self.counts.copy()
        self.counts[:] = best_counts
        self.seconds[:] = best_seconds

    def _round(self) -> bool:
        spread = float(self.seconds.max() - self.seconds.mean())
        if spread <= LEAST_GAIN * self.seconds.max():
            return False
        sharpness = _SHARPNESS / spread
        now = _smooth_maximum(self.seconds, sharpness)
        for g, h, amount in self._pairs(sharpness):
            swaps = self._best_swaps(g, h, amount)
            moved = sum(k * (self.traffic_bytes[a] - self.traffic_bytes[b]) for a, b, k in swaps)
            after = self.seconds + moved * (self.columns[h] - self.columns[g])
            least = LEAST_GAIN * spread
            if self.price is not None:
                least += sum(k * float(self.price[self.width[a], g, h]) for a, _, k in swaps)
            if _smooth_maximum(after, sharpness) >= now - least:
                continue
            for a, b, k in swaps:
                self.counts[a, g] -= k
                self.counts[a, h] += k
                self.counts[b, h] -= k
                self.counts[b, g] += k
            self.seconds[:] = after
            return True
        return False

    def _pairs(self, sharpness: float) -> list[_Pair]:
        """Pairs of holder sets, most gain first, with the traffic to move: at the least of the
        smooth maximum along the pair, which is convex in x, by bisection of its slope."""
        pressure = _pressure(self.seconds, sharpness)
        along = self.columns @ pressure
        change = self.columns[None, :, :] - self.columns[:, None, :]  # [g, h, M]
        reach = np.abs(change).max(axis=2)
        falls = (along[:, None] - along[None, :]) / np.where(reach > 0, reach, 1.0)
        steep = np.where(self._swappable(), falls, 0.0)
        pairs = np.argsort(-steep, axis=None, kind="stable")[:_PAIRS_TRIED]
        pairs = pairs[steep.flat[pairs] > 0]
        change = change.reshape(-1, change.shape[2])[pairs]
        low = np.zeros(len(pairs))
        high = np.ptp(self.seconds) / reach.flat[pairs]
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            after = self.seconds + middle[:, None] * change
            down = (_pressure(after, sharpness) * change).sum(axis=1) < 0
            low, high = np.where(down, middle, low), np.where(down, high, middle)
        after = self.seconds + low[:, None] * change
        order = np.argsort(_smooth_maximum(after, sharpness), kind="stable")
        sets = len(self.columns)
        return [_Pair(int(pairs[n] // sets), int(pairs[n] % sets), float(low[n])) for n in order]

    def _swappable(self) -> NDArray[np.bool_]:
        """Whether some row of set g has more traffic than some of h, equal in width, [G, G]."""
        able = np.zeros((len(self.columns), len(self.columns)), dtype=bool)
        for order in self._order:
            held = self.counts[order] > 0
            some = held.any(axis=0)
            heaviest = self.traffic_bytes[order[len(order) - 1 - held[::-1].argmax(axis=0)]]
            lightest = self.traffic_bytes[order[held.argmax(axis=0)]]
            heaviest = np.where(some, heaviest, -np.inf)
            lightest = np.where(some, lightest, np.inf)
            able |= heaviest[:, None] > lightest[None, :]
        return able

    def _best_swaps(self, g: int, h: int, amount: float) -> list[Swap]:
        """Swaps of rows of g for rows of h that move about `amount` of traffic.

        One that comes near it if there is one, else the rows of g with most traffic that do not
        exceed it for the rows of h with least.
        """
        best, found = amount * (1 - 1e-6), None
        for k in _SWAP_ROWS:
            for order in self._order:
                give = order[self.counts[order, g] >= k]
                take = order[self.counts[order, h] >= k]
                if not len(give) or not len(take):
                    continue
                taken = self.traffic_bytes[take]
                wanted = self.traffic_bytes[give] - amount / k
                right = np.clip(np.searchsorted(taken, wanted), 0, len(take) - 1)
                for index in (right, np.maximum(right - 1, 0)):
                    moved = k * (self.traffic_bytes[give] - taken[index])
                    error = np.abs(moved - amount)
                    at = int(error.argmin())
                    if error[at] < best:
                        best = float(error[at])
                        found = Swap(int(give[at]), int(take[index[at]]), k)
            # Swaps of more rows only while fewer have too little traffic to move the amount.
            if found is not None and best <= 0.02 * amount:
                break
        if found is not None and best <= 0.5 * amount:
            return [found]
        return self._many_swaps(g, h, amount)

    def _many_swaps(self, g: int, h: int, amount: float) -> list[Swap]:
        """The rows of g with most traffic for those of h with least, width by width, up to `amount`
        in all."""
        swaps: list[Swap] = []
        for order in self._order:
            heavy = order[self.counts[order, g] > 0][::-1].tolist()
            light = order[self.counts[order, h] > 0].tolist()
            left = {b: int(self.counts[b, h]) for b in light}
            at = 0
            for a in heavy:
                rows = int(self.counts[a, g])
                while rows and at < len(light):
                    b = light[at]
                    each = float(self.traffic_bytes[a] - self.traffic_bytes[b])
                    k = min(rows, left[b], int(amount // each) if each > 0 else 0)
                    if not k:
                        break
                    swaps.append(Swap(a, b, k))
                    amount -= k * each
                    rows -= k
                    left[b] -= k
                    at += not left[b]
        return swaps


def _pressure(seconds: Floats, sharpness: float) -> Floats:
    """The gradient of the smooth maximum over the last axis."""
    raised = np.exp(sharpness * (seconds - seconds.max(axis=-1, keepdims=True)))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def _smooth_maximum(seconds: Floats, sharpness: float) -> Floats:
    top = seconds.max(axis=-1, keepdims=True)
    raised = np.exp(sharpness * (seconds - top)).sum(axis=-1)
    return np.asarray(top[..., 0] + np.log(raised) / sharpness)
