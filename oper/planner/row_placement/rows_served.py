"""Rows that ranks serve, evened out as far as that leaves T as it is (ranks of one memory).

In: rows of each class in each holder set. Out: the same after swaps. Where a read costs its reader
the same wherever the row is, T depends on gradients alone, in inference on nothing. Rows of equal
width and equal gradients are then interchangeable, and are swapped while that evens out the reads
that ranks serve: a tie that the objective leaves open. In inference all ranks come to serve equally
many. In training a rank may own too few rows whose gradients are alike, such as those touched in
every batch, and serve several times as many reads as another, or a fraction.
"""

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets
from oper.cost.traffic import Direction
from oper.planner.problem.classes import Classes
from oper.planner.row_placement.swaps import SwapSearch

_ROUNDING = 1e-12  # of sums of seconds
_ALIKE = 1e-9  # gradients that differ by less of the largest are alike


def even_rows_served(
    classes: Classes,
    sets: HolderSets,
    directions: tuple[Direction, ...],
    counts: Ints,
    rows_served: Floats,
) -> int:
    """Swap rows of `counts` [C, G], in place; the number of rounds. `directions` are those of reads
    and, in training, of gradients; `rows_served` [M] is by each rank, changed in place."""
    reads, *gradients = directions
    if (np.ptp(reads.columns, axis=0) > _ROUNDING * reads.columns.max(axis=0)).any():
        return 0
    alike = [np.rint(bytes / (bytes.max() or 1.0) / _ALIKE) for bytes, _ in gradients]
    _, kind = np.unique(np.stack([classes.width, *alike]), axis=1, return_inverse=True)
    kind = kind.ravel()
    some = np.flatnonzero(np.bincount(kind)[kind] > 1)
    if not len(some):
        return 0
    served = Direction(classes.R[some], sets.readers.astype(np.float64))
    part = np.asfortranarray(counts[some])
    search = SwapSearch(part, (served,), kind[some], rows_served)
    search.run()
    counts[some] = part
    return search.rounds_made
