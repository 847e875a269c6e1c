"""Choice of the iterations to count: one of every N, at random, and the same on all ranks.

Iterations are in blocks of N, and of block b the one is counted whose number follows from b by a
seeded generator: ranks choose the same ones without messages, and a script's periodic iterations
are neither always counted nor never. A row that was counted c times was read about N·c times. The
relative standard error of that is √((1 − 1/N) / c) if reads of a row are independent, and more if
they come together in an iteration.
"""

import numpy as np

from oper.base.errors import OperError
from oper.base.units import whole_number

MOST_ITERATIONS = 1 << 40  # of a block or a period: messages have them in 8 bytes


class SampledIterations:
    """One of every `every` iterations, numbered from 0."""

    def __init__(self, every: int) -> None:
        self.every = whole_number(every, "sample_every")
        if not 1 <= self.every <= MOST_ITERATIONS:
            raise OperError(
                f"sample_every: expected 1, which counts all, to {MOST_ITERATIONS:,}, got "
                f"{self.every}"
            )
        self._block, self._place = -1, 0

    def __contains__(self, iteration: int) -> bool:
        block, place = divmod(iteration, self.every)
        if block != self._block:
            chosen = np.random.default_rng(block).integers(self.every)
            self._block, self._place = block, int(chosen)
        return place == self._place
