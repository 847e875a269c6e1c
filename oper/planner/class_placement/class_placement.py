"""Drafts: how many rows of each class go to each group of ranks, before rows are named.

On ranks that look alike the levels of replication follow from a knapsack (`replication.py`) and
single rows from greedy placement with backtracking (`greedy.py`), split by classes. Where
ranks differ in links or capacities, the linear programme (`restricted_master.py`) says which share
of each class belongs to which holders, and classes are dealt by those shares.
"""

from dataclasses import dataclass

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import (
    HolderSets,
)
from oper.planner.class_placement.greedy import Greedy
from oper.planner.class_placement.partition import Partitions
from oper.planner.problem.classes import Classes


@dataclass(frozen=True)
class ClassPlacement:
    """Rows of each class in each group; the first M groups are the single owners."""

    step: str  # which step produced it
    groups: HolderSets
    counts: Ints  # [C, G] rows listed one by one
    striped: Ints  # [C] rows left to the stripes
    shares: Floats  # [M] the part of all memory that each rank should hold
    partitions: Partitions
    greedy: Greedy | None = None


def replica_bytes(classes: Classes, groups: HolderSets, counts: Ints, ranks: int) -> Floats:
    """Memory on each rank, [M], of the groups after the single owners'."""
    copies: Floats = groups.holds[ranks:].T @ (counts[:, ranks:].T @ classes.m)
    return copies
