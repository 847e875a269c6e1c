"""The linear programme over buckets of classes and patterns of holders, for any link matrix.

    minimise T   over x[b, p] ≥ 0, Σ_p x[b, p] = 1 for each bucket b of rows, subject to
    time         Σ x[b, p] · seconds[b, p, r]  ≤ T                    rank r          (price λ_r)
    capacity     Σ x[b, p] · bytes[b] · [j holds p]  ≤ capacity_j     rank j          (price μ_j)
    budget       Σ x[b, p] · bytes[b] · (copies_p - 1)  ≤ budget                      (price ν)

With the aim "link" the largest fetch time Z of an ordered pair (equation 3; price π_ij) comes
first and T second, by a small weight. The patterns of inference are all holder sets: columns are
generated from the envelope of `patterns.py` at the programme's own prices, until no set is
cheaper. In training the M + 1 patterns are all there from the start.

Buckets put classes of one width and nearly one density together, by their averages, so the value
is no bound by itself; its prices, evaluated on the exact classes, give one (`bound.py`).
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from oper.cost import Floats, Groups, Method, Workload, everywhere_group, holder_groups, node_groups, single_groups
from oper.errors import OperError
from oper.planner.classes import Classes
from oper.planner.patterns import (
    ENUMERABLE_RANKS,
    Demand,
    Envelope,
    Prices,
    demand,
    everywhere_cost,
    subset_holders,
    subset_lines,
)
from oper.topology import Topology

Objective = Literal["time", "link"]
HOT_CLASSES = 60  # each a bucket of its own: they decide how evenly the ranks can be loaded
BUCKET_RATIO = 1.2  # of the densities in one bucket
ROUNDS = 60  # of column generation
TOLERANCE = 1e-6  # of the value, to the best bound on it
TIME_WEIGHT = 1e-3  # of T beside the largest link, both relative


@dataclass(frozen=True)
class Programme:
    """The fractional plan: `fraction[b, g]` of bucket b's rows go to group g; `bucket[c]` is the
    bucket of class c. `seconds` is its largest rank time, with the AllReduce's latency."""

    bucket: NDArray[np.int64]
    groups: Groups
    fraction: Floats
    prices: Prices
    seconds: float


def solve(
    classes: Classes,
    topology: Topology,
    workload: Workload,
    method: Method,
    capacity_bytes: Floats,
    budget_bytes: float,
    objective: Objective = "time",
) -> Programme:
    """The least time of a fractional placement of `classes` whose replicas use `method`.

    `capacity_bytes` [M] and `budget_bytes` (of extra copies) are the limits. Raises OperError
    where the capacities cannot hold the tables.
    """
    rows = demand(classes, topology, workload, method)
    return solve_demand(rows, topology, capacity_bytes, budget_bytes, objective)
