"""Swaps of rows of equal width between holder sets, which lower the largest T (beyond §4.2).

In: rows of each class in each holder set, T of each rank. Out: both after the swaps. A row with one
owner, or with given holders at inference, adds to every rank's T in proportion to its traffic w:
column[g] seconds per byte for holder set g (read_charges.py). Swapping k rows of class a in set g
with k of class b, equal in width, in set h moves x = k·(w_a - w_b) bytes of traffic,
T += x·(column[h] - column[g]), and leaves the number of every set's rows, and so all memory,
unchanged. If reads and gradients are charged apart (traffic.py), T is the sum over both; pairs and
amounts are then chosen by the one direction that comes nearest.

Swaps lower a smooth maximum, (1/β)·log Σ exp(β·T), β sharpening as T evens out: the plain maximum
has plateaus as soon as two ranks share it. Each round takes the pair of holder sets that lowers it
most and moves its x by swapping rows.

A round looks at the pairs of the holder sets under the most and under the least pressure, of which
there are `_SETS_TRIED` at most, so that it takes no longer on a thousand ranks; figures of pairs
alone are computed once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot, exp, log
from oper.cost.traffic import Direction, main_direction
from oper.planner.class_placement.class_placement import MANY_RANKS

ROUNDS = 400  # of 174 searches half took 20 or fewer, and the longest 184
# Swaps that lower T by less than this share are left out: they are below the certificate's digits.
LEAST_GAIN = 1e-9
# So many rounds that lower T by less than this share in all are the last.
_PATIENCE, _LEAST_PROGRESS = 25, 1e-7
# Many ranks, with 20 ms per round: on 128x8-h100 the first 50 rounds lowered T by 2e-4, and the 350
# after them by 2e-5 of it.
_LEAST_PROGRESS_OF_MANY = 5e-6
_PAIRS_TRIED = 16
_SETS_TRIED = 256
_BISECTIONS = 24
# β over the spread of T: the ranks well above the mean dominate, without plateaus.
_SHARPNESS = 3.0
_COPIED_CLASSES = 64  # at a time, so that a processor's cache holds them
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


def set_by_set(counts: Ints) -> Ints:
    """Return a copy of `counts` [C, G] as the search reads it, the rows of a holder set one after
    the other."""
    by_set = np.empty(counts.shape, dtype=np.int64, order="F")
    for first in range(0, len(counts), _COPIED_CLASSES):
        part = slice(first, first + _COPIED_CLASSES)
        by_set[part] = counts[part]
    return by_set


@dataclass
class SwapSearch:
    """Rounds of swaps on `counts` [C, G], changed in place."""

    counts: Ints
    directions: tuple[Direction, ...]  # bytes [C] and seconds per byte [G, M]
    width: Ints  # [C]
    seconds: Floats  # [M], T of the ranks; changed in place
    # [W, G, G] seconds that a row of g must gain to be swapped with one of h; None: nothing
    price: Floats | None = None
    rounds_made: int = 0

    def __post_init__(self) -> None:
        self.traffic_bytes, self.columns = main_direction(self.directions)
        # Products with a vector take a fraction of the time if the terms are rows of the matrix.
        self._columns_by_rank = np.ascontiguousarray(self.columns.T)
        self._order = [
            order[np.argsort(self.traffic_bytes[order], kind="stable")]
            for w in np.unique(self.width)
            for order in [np.flatnonzero(self.width == w)]
        ]
        sets = len(self.columns)
        # The most that a byte moved between two sets changes a rank's time by, [G, G]; negative
        # if no round has looked at the two.
        self._reach = np.full((sets, sets), -1.0)
        # Most and least traffic of a row of each width in each set, [W, G]; not of stale sets.
        self._heaviest, self._lightest = np.zeros((2, len(self._order), sets))
        self._stale = np.ones(sets, dtype=bool)

    def run(self) -> None:
        """Swap until no pair lowers the smooth maximum, or ROUNDS are made; end with the
        counts of the least maximum seen."""
        best, before = float(self.seconds.max()), np.inf
        best_seconds = self.seconds.copy()
        since_best: list[tuple[int, int, list[Swap]]] = []
        many = len(self.seconds) > MANY_RANKS
        least_progress = _LEAST_PROGRESS_OF_MANY if many else _LEAST_PROGRESS
        for turn in range(ROUNDS):
            if turn % _PATIENCE == 0:
                if best > before * (1 - least_progress):
                    break
                before = best
            made = self._round()
            if made is None:
                break
            self.rounds_made += 1
            since_best.append(made)
            if self.seconds.max() < best:
                best, best_seconds = float(self.seconds.max()), self.seconds.copy()
                since_best.clear()
        for g, h, swaps in reversed(since_best):
            self._swap(h, g, swaps)
        self.seconds[:] = best_seconds

    def move(self, source: int, target: int, traffic_bytes: float) -> float:
        """Move about `traffic_bytes` from one set to another by swaps; return the bytes moved."""
        swaps = self._best_swaps(source, target, traffic_bytes)
        moved = sum(k * float(self.traffic_bytes[a] - self.traffic_bytes[b]) for a, b, k in swaps)
        self._swap(source, target, swaps)
        self.seconds += self._change(source, target, swaps)
        return moved

    def _round(self) -> tuple[int, int, list[Swap]] | None:
        """Swap rows of the best pair that lowers the smooth maximum; None if none does."""
        spread = float(self.seconds.max() - self.seconds.mean())
        if spread <= LEAST_GAIN * self.seconds.max():
            return None
        sharpness = _SHARPNESS / spread
        now = _smooth_maximum(self.seconds, sharpness)
        for g, h, amount in self._pairs(sharpness):
            swaps = self._best_swaps(g, h, amount)
            after = self.seconds + self._change(g, h, swaps)
            least = LEAST_GAIN * spread
            if self.price is not None:
                least += sum(k * float(self.price[self.width[a], g, h]) for a, _, k in swaps)
            if _smooth_maximum(after, sharpness) >= now - least:
                continue
            self._swap(g, h, swaps)
            self.seconds[:] = after
            return g, h, swaps
        return None

    def _change(self, g: int, h: int, swaps: list[Swap]) -> Floats:
        """Return the change of T of the ranks, [M]."""
        change: Floats = np.zeros(len(self.seconds))
        for bytes, columns in self.directions:
            moved = sum(k * float(bytes[a] - bytes[b]) for a, b, k in swaps)
            change += moved * (columns[h] - columns[g])
        return change

    def _swap(self, g: int, h: int, swaps: list[Swap]) -> None:
        """Give rows of g to h, and take as many of h; with g and h the other way round, undo it."""
        for a, b, k in swaps:
            self.counts[a, g] -= k
            self.counts[a, h] += k
            self.counts[b, h] -= k
            self.counts[b, g] += k
        self._stale[[g, h]] = True

    def _pairs(self, sharpness: float) -> list[_Pair]:
        """Return pairs of holder sets, largest gain first, with the traffic to move: at the least
        of the smooth maximum along the pair, which is convex in x, by bisection of its slope."""
        pressure = _pressure(self.seconds, sharpness)
        along = dot(pressure, self._columns_by_rank)
        source, target = _ends(along)
        reach = self._reach_between(source, target)
        falls = (along[source, None] - along[None, target]) / np.where(reach > 0, reach, 1.0)
        steep = np.where(self._swappable(source, target), falls, 0.0)
        pairs = _largest(steep.ravel(), _PAIRS_TRIED)
        pairs = pairs[steep.flat[pairs] > 0]
        source, target = source[pairs // len(target)], target[pairs % len(target)]
        change = self.columns[target] - self.columns[source]
        low = np.zeros(len(pairs))
        high = np.ptp(self.seconds) / self._reach[source, target]
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            after = self.seconds + middle[:, None] * change
            down = (_pressure(after, sharpness) * change).sum(axis=1) < 0
            low, high = np.where(down, middle, low), np.where(down, high, middle)
        after = self.seconds + low[:, None] * change
        order = np.argsort(_smooth_maximum(after, sharpness), kind="stable")
        return [_Pair(int(source[n]), int(target[n]), float(low[n])) for n in order]

    def _swappable(self, source: Ints, target: Ints) -> NDArray[np.bool_]:
        """Return a mask of the pairs in which some row of the source has more traffic than a row of
        equal width of the target, [sources, targets]."""
        looked_at = np.union1d(source, target)
        for g in looked_at[self._stale[looked_at]]:
            self._note_extremes(g)
        heaviest, lightest = self._heaviest[:, source], self._lightest[:, target]
        return np.asarray((heaviest[:, :, None] > lightest[:, None, :]).any(axis=0))

    def _reach_between(self, source: Ints, target: Ints) -> Floats:
        """Return the largest change of a rank's time by a byte moved from a source to a target."""
        pairs = np.ix_(source, target)
        new = self._reach[pairs] < 0
        of, to = source[new.any(axis=1)], target[new.any(axis=0)]
        if len(of):
            reach = cdist(self.columns[of], self.columns[to], "chebyshev")
            self._reach[np.ix_(of, to)], self._reach[np.ix_(to, of)] = reach, reach.T
        return self._reach[pairs]

    def _note_extremes(self, g: int) -> None:
        """Note the most and the least traffic of a row of each width in set g."""
        self._stale[g] = False
        for w, order in enumerate(self._order):
            held = order[self.counts[order, g] > 0]  # traffic ascends
            self._heaviest[w, g] = self.traffic_bytes[held[-1]] if len(held) else -np.inf
            self._lightest[w, g] = self.traffic_bytes[held[0]] if len(held) else np.inf

    def _best_swaps(self, g: int, h: int, amount: float) -> list[Swap]:
        """Return the swaps of rows of g for rows of h that move about `amount` of traffic.

        One that comes near it if there is one, else the rows of g with most traffic that do not
        exceed it for the rows of h with least.
        """
        best, swap = amount * (1 - 1e-6), None
        given_rows, taken_rows = self.counts[:, g], self.counts[:, h]
        left = [(order, order) for order in self._order]
        for k in _SWAP_ROWS:
            # Classes with fewer rows than k have too few for every later k.
            left = [
                (give[given_rows[give] >= k], take[taken_rows[take] >= k])
                for give, take in left
                if len(give) and len(take)
            ]
            if not left:
                break
            for give, take in left:
                if not len(give) or not len(take):
                    continue
                taken = self.traffic_bytes[take]
                wanted = self.traffic_bytes[give] - amount / k
                right = np.minimum(np.searchsorted(taken, wanted), len(take) - 1)
                for index in (right, np.maximum(right - 1, 0)):
                    moved = k * (self.traffic_bytes[give] - taken[index])
                    error = np.abs(moved - amount)
                    at = int(error.argmin())
                    if error[at] < best:
                        best = float(error[at])
                        swap = Swap(int(give[at]), int(take[index[at]]), k)
            # Swaps of more rows only while fewer have too little traffic to move the amount.
            if swap is not None and best <= 0.02 * amount:
                break
        if swap is not None and best <= 0.5 * amount:
            return [swap]
        return self._many_swaps(g, h, amount)

    def _many_swaps(self, g: int, h: int, amount: float) -> list[Swap]:
        """Return the rows of g with most traffic for those of h with least, width by width, up to
        `amount` in all."""
        swaps: list[Swap] = []
        for order in self._order:
            heavy = order[self.counts[order, g] > 0][::-1].tolist()
            light = order[self.counts[order, h] > 0].tolist()
            at, left = 0, int(self.counts[light[0], h]) if light else 0
            for a in heavy:
                rows = int(self.counts[a, g])
                while rows and at < len(light):
                    b = light[at]
                    row_bytes = float(self.traffic_bytes[a] - self.traffic_bytes[b])
                    k = min(rows, left, int(amount // row_bytes) if row_bytes > 0 else 0)
                    if not k:
                        break
                    swaps.append(Swap(a, b, k))
                    amount -= k * row_bytes
                    rows -= k
                    left -= k
                    if not left:
                        at += 1
                        left = int(self.counts[light[at], h]) if at < len(light) else 0
                if at == len(light):
                    break
        return swaps


def _largest(values: Floats, most: int) -> Ints:
    """Return the indices of the largest `values`, at most so many, the first of equals first,
    without sorting all of them."""
    least = -np.inf if len(values) <= most else float(np.partition(values, -most)[-most])
    large = np.flatnonzero(values >= least)
    return large[np.argsort(-values[large], kind="stable")[:most]]


def _ends(along: Floats) -> tuple[Ints, Ints]:
    """Return the numbers of the sets that traffic should leave, and of the sets it should go to."""
    if len(along) <= _SETS_TRIED:
        return np.arange(len(along)), np.arange(len(along))
    order = np.argsort(-along, kind="stable")
    return np.sort(order[:_SETS_TRIED]), np.sort(order[-_SETS_TRIED:])


def _pressure(seconds: Floats, sharpness: float) -> Floats:
    """Return the gradient of the smooth maximum over the last axis."""
    raised = exp(sharpness * (seconds - seconds.max(axis=-1, keepdims=True)))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def _smooth_maximum(seconds: Floats, sharpness: float) -> Floats:
    top = seconds.max(axis=-1, keepdims=True)
    raised = exp(sharpness * (seconds - top)).sum(axis=-1)
    return np.asarray(top[..., 0] + log(raised) / sharpness)
