"""Refining: exchanges of equal-byte runs that lower the largest T (beyond §4.2).

A row with one owner, or with given holders at inference, adds to every rank's T in proportion to
its weight w: column[g] seconds per byte for group g (charges.py). Exchanging k rows of class a in
group g with k of class b, equal in width, in group h moves x = k·(w_a - w_b) bytes of traffic,
T += x·(column[h] - column[g]), and leaves every group's rows, and so all memory, as they were.
What falls is a smooth maximum, (1/β)·log Σ exp(β·T), β sharpening as T evens out: the plain maximum
has plateaus as soon as two ranks share it. Each round takes the pair of groups that lowers it
most and realises its x by one run.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints

ROUNDS = 400
# Exchanges that lower T by less than this share are left: they are below the certificate's digits.
LEAST_GAIN = 1e-9
# So many rounds that lower T by less than this share in all are the last.
_PATIENCE, _LEAST_PROGRESS = 25, 1e-7
_PAIRS_TRIED = 16
_BISECTIONS = 24
# β over the spread of T: the ranks well above the mean dominate, without plateaus.
_SHARPNESS = 3.0
_RUN_LENGTHS = [1] + [4**k for k in range(1, 16)]


@dataclass
class SwapSearch:
    """Rounds of exchanges on `counts` [C, G], changed in place."""

    counts: Ints
    weight: Floats  # [C]
    width: Ints  # [C]
    columns: Floats  # [G, M], seconds per byte of weight
    seconds: Floats  # [M], T of the ranks; changed in place
    # [W, G, G] seconds that a row of g must gain to change places with one of h; None: nothing
    price: Floats | None = None
    rounds_made: int = 0

    def __post_init__(self) -> None:
        self._order = [
            order[np.argsort(self.weight[order], kind="stable")]
            for w in np.unique(self.width)
            for order in [np.flatnonzero(self.width == w)]
        ]

    def run(self, rounds: int = ROUNDS) -> None:
        """Exchange until no pair lowers the smooth maximum, or `rounds` are made; end with the
        counts of the least maximum seen."""
        best, best_counts = float(self.seconds.max()), self.counts.copy()
        best_seconds, before = self.seconds.copy(), np.inf
        for turn in range(rounds):
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
            runs = self._best_run(g, h, amount)
            moved = sum(k * (self.weight[a] - self.weight[b]) for a, b, k in runs)
            after = self.seconds + moved * (self.columns[h] - self.columns[g])
            least = LEAST_GAIN * spread
            if self.price is not None:
                least += sum(k * float(self.price[self.width[a], g, h]) for a, _, k in runs)
            if _smooth_maximum(after, sharpness) >= now - least:
                continue
            for a, b, k in runs:
                self.counts[a, g] -= k
                self.counts[a, h] += k
                self.counts[b, h] -= k
                self.counts[b, g] += k
            self.seconds[:] = after
            return True
        return False

    def _pairs(self, sharpness: float) -> list[tuple[int, int, float]]:
        """Pairs of groups (from, to), most gain first, with the weight x to move: the least of
        the smooth maximum along the pair, which is convex in x, by bisection of its slope."""
        pressure = _pressure(self.seconds, sharpness)
        along = self.columns @ pressure
        change = self.columns[None, :, :] - self.columns[:, None, :]  # [g, h, M]
        reach = np.abs(change).max(axis=2)
        falls = (along[:, None] - along[None, :]) / np.where(reach > 0, reach, 1.0)
        steep = np.where(self._exchangeable(), falls, 0.0)
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
        groups = len(self.columns)
        return [(int(pairs[n] // groups), int(pairs[n] % groups), float(low[n])) for n in order]

    def _exchangeable(self) -> NDArray[np.bool_]:
        """Whether some row of group g is heavier than some of h, equal in width, [G, G]."""
        able = np.zeros((len(self.columns), len(self.columns)), dtype=bool)
        for order in self._order:
            held = self.counts[order] > 0
            some = held.any(axis=0)
            heaviest = self.weight[order[len(order) - 1 - held[::-1].argmax(axis=0)]]
            lightest = self.weight[order[held.argmax(axis=0)]]
            heaviest = np.where(some, heaviest, -np.inf)
            lightest = np.where(some, lightest, np.inf)
            able |= heaviest[:, None] > lightest[None, :]
        return able

    def _best_run(self, g: int, h: int, amount: float) -> list[tuple[int, int, int]]:
        """Runs (a, b, k), k rows of class a in g for as many of b in h, that move about `amount`.

        One run that comes near it if there is one, else the heaviest rows of g that do not
        overshoot for the lightest of h.
        """
        best, found = amount * (1 - 1e-6), None
        for k in _RUN_LENGTHS:
            for order in self._order:
                give = order[self.counts[order, g] >= k]
                take = order[self.counts[order, h] >= k]
                if not len(give) or not len(take):
                    continue
                weights = self.weight[take]
                wanted = self.weight[give] - amount / k
                right = np.clip(np.searchsorted(weights, wanted), 0, len(take) - 1)
                for index in (right, np.maximum(right - 1, 0)):
                    moved = k * (self.weight[give] - weights[index])
                    error = np.abs(moved - amount)
                    at = int(error.argmin())
                    if error[at] < best:
                        best, found = float(error[at]), (int(give[at]), int(take[index[at]]), k)
            # Longer runs only while single rows are too light to move the amount.
            if found is not None and best <= 0.02 * amount:
                break
        if found is not None and best <= 0.5 * amount:
            return [found]
        return self._many_runs(g, h, amount)

    def _many_runs(self, g: int, h: int, amount: float) -> list[tuple[int, int, int]]:
        """The heaviest rows of g for the lightest of h, width by width, up to `amount` in all."""
        runs: list[tuple[int, int, int]] = []
        for order in self._order:
            heavy = order[self.counts[order, g] > 0][::-1].tolist()
            light = order[self.counts[order, h] > 0].tolist()
            left = {b: int(self.counts[b, h]) for b in light}
            at = 0
            for a in heavy:
                rows = int(self.counts[a, g])
                while rows and at < len(light):
                    b = light[at]
                    each = float(self.weight[a] - self.weight[b])
                    k = min(rows, left[b], int(amount // each) if each > 0 else 0)
                    if not k:
                        break
                    runs.append((a, b, k))
                    amount -= k * each
                    rows -= k
                    left[b] -= k
                    at += not left[b]
        return runs


def _pressure(seconds: Floats, sharpness: float) -> Floats:
    """The gradient of the smooth maximum over the last axis."""
    raised = np.exp(sharpness * (seconds - seconds.max(axis=-1, keepdims=True)))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def _smooth_maximum(seconds: Floats, sharpness: float) -> Floats:
    top = seconds.max(axis=-1, keepdims=True)
    raised = np.exp(sharpness * (seconds - top)).sum(axis=-1)
    return np.asarray(top[..., 0] + np.log(raised) / sharpness)
