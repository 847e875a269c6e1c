"""The array types that all packages share."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = NDArray[np.uint32] | NDArray[np.uint64]  # counters of rows, as wide as the largest needs
