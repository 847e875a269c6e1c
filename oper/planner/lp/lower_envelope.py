"""The lower envelope of lines: for each density of a row, the cheapest of many holder sets.

In: slopes and intercepts. Out: `Envelope`, which finds the cheapest line at each density.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats

# Lines from which ruling some out is tried. Without and with it an envelope takes 45 and 75 µs for
# 1,024 random lines, 129 and 93 for 2,048, 38,000 and 1,240 for 65,536 (2026-11-28, two busy
# cores).
_MANY_LINES = 1024
# Exponent of two of the greatest density at which a line rules others out, from the middle one: of
# 65,536 random lines 12 leave 17, and 8 leave 32.
_PIVOTS = 12


@dataclass(frozen=True)
class Envelope:
    """The lower envelope of lines slope·ρ + intercept over ρ ≥ 0, from the first line (least
    intercept) to the last (least slope). `line[n]` is the cheapest up to ρ = `until[n]`."""

    line: NDArray[np.int64]
    slope: Floats
    intercept: Floats
    until: Floats

    @staticmethod
    def of(slope: Floats, intercept: Floats) -> "Envelope":
        kept = _undominated(slope, intercept)
        order = kept[np.lexsort((slope[kept], intercept[kept]))]
        least = np.minimum.accumulate(slope[order])
        useful = np.ones(len(order), dtype=bool)
        useful[1:] = slope[order][1:] < least[:-1]
        hull: list[int] = []
        until: list[float] = []
        for n in order[useful].tolist():
            crossing = 0.0
            while hull:
                last = hull[-1]
                crossing = (intercept[n] - intercept[last]) / (slope[last] - slope[n])
                if not until or crossing > until[-1]:
                    break
                hull.pop()
                until.pop()
            if hull:
                until.append(crossing)
            hull.append(n)
        line = np.array(hull, dtype=np.int64)
        return Envelope(line, slope[line], intercept[line], np.array(until))

    def find(self, density: Floats) -> NDArray[np.int64]:
        """Return the index of the envelope's cheapest line at each density."""
        return np.searchsorted(self.until, density)

    def value(self, density: Floats) -> Floats:
        n = self.find(density)
        return np.asarray(self.slope[n] * density + self.intercept[n])


def _undominated(slope: Floats, intercept: Floats) -> NDArray[np.int64]:
    """Return the lines that may be on the envelope, in order. Sorting takes most of the time of an
    envelope of many lines, and a few of its own lines rule nearly all others out."""
    kept = np.arange(len(slope))
    if len(slope) < _MANY_LINES:
        return kept
    density = np.ptp(intercept) / (np.ptp(slope) or 1.0)
    for power in range(-_PIVOTS, _PIVOTS + 1, 2):
        m, b = slope[kept], intercept[kept]
        pivot = (m * (density * 2.0**power) + b).argmin()
        kept = kept[(b <= b[pivot]) | (m < m[pivot])]
    return kept
