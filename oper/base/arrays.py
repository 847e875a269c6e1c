"""The array types that all packages share."""

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = NDArray[np.uint32] | NDArray[np.uint64]  # counters of rows, as wide as the largest needs


class OverRanks(NamedTuple):
    """Marks the type of an array of which each of so many axes is over the ranks."""

    axes: int


PerRank = Annotated[Floats, OverRanks(1)]  # [M]
PerPair = Annotated[Floats, OverRanks(2)]  # [M, M]
WholePerRank = Annotated[Ints, OverRanks(1)]  # [M]
