"""A class placement: the number of rows of each class in each holder set, before rows are named.

On homogeneous ranks a knapsack decides the copies of rows (`homogeneous_replicas.py`), and greedy
placement with backtracking the ranks of rows with one owner (`greedy.py`). If ranks differ in links
or capacities, a linear programme (`lp/restricted_master.py`) says which share of each class belongs
to which holders, and rows are split by those shares.
"""

from dataclasses import dataclass

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets
from oper.planner.class_placement.greedy import Greedy
from oper.planner.class_placement.partitions import Partitions
from oper.planner.problem.classes import Classes

# Hot rows are placed by nodes above so many ranks, and those too hot for one rank have a few copies
# in inference. With fewer, row_placement/swaps.py tries every pair of ranks in the time there is,
# and finds as good a place for them.
MANY_RANKS = 32


@dataclass(frozen=True)
class ClassPlacement:
    """Rows of C classes in G holder sets, of which the first M are the single owners."""

    step: str  # the step that made it, as `oper plan` names it
    holder_sets: HolderSets
    counts: Ints  # [C, G] rows that are listed one by one
    striped: Ints  # [C] rows that are striped over the ranks
    shares: Floats  # [M] the share of all memory that each rank should hold
    partitions: Partitions
    greedy: Greedy | None = None


def replica_bytes(classes: Classes, sets: HolderSets, replicas: Ints) -> Floats:
    """Return the memory on each rank, [M], of the `replicas` [C, G - M] rows with several
    holders."""
    copies: Floats = dot(sets.holds[len(sets) - replicas.shape[1] :].T, classes.memory_of(replicas))
    return copies
