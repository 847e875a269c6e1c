"""Ranges of a topology's numbers, far wider than those of any machine.

Within them the sums and linear programmes of the planner stay finite: with costs of 1e150 seconds
per byte they overflow, and with a hop of 1e12 seconds a solver's tolerance exceeds all reads.
"""

from typing import NamedTuple

from oper.base.units import MOST_BYTES


class Range(NamedTuple):
    """Numbers from `least` to `most`, both included, with their unit as errors name it."""

    least: float
    most: float
    unit: str

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        """Return the range as errors name it."""
        return f"a positive number of {self.unit}, {self.least:g} to {self.most:g}"


LINK_COST = Range(1e-18, 1e3, "seconds per byte")
BANDWIDTH = Range(1e-3, 1e18, "bytes per second, such as 240e9 or 240GB/s")
LATENCY = Range(1e-12, 10.0, "seconds")
MEMORY = Range(1, MOST_BYTES, "bytes")
