"""The mixed integer programme over classes: which holder sets get how many whole rows.

In: `PricingItems`, the items to keep whole, holder sets, the limits. Out: `WholeRows`.

    minimise T   over n[b, g] rows of item b in holder set g, Σ_g n[b, g] = rows_b, subject to
    time         Σ n[b, g] · seconds[b, g, r] ≤ T                     rank r
    capacity     Σ n[b, g] · m_b · [j holds g] ≤ capacity_j           rank j
    budget       Σ n[b, g] · m_b · (copies_g - 1) ≤ budget

n is whole for the items asked for, which decide the ranks' loads, and any number for the others,
which even the loads out. Solved to a limit of nodes, so that it is the same in every run, but for
the root, which may take minutes: what is not solved within a limit of seconds, far above what it
mostly takes, is not used.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array, csr_array, vstack

from oper.base import standard_streams
from oper.base.arrays import Floats
from oper.cost.holder_sets import HolderSets
from oper.planner.lp.pricing import PricingItems, everywhere_seconds
from oper.topology.topology import Topology

_MOST_SECONDS = 60.0  # most take less than 3 s, so that a busy machine makes the same plans
_OUT_OF_TIME = 1  # scipy's status


@dataclass(frozen=True)
class WholeRows:
    """Rows of each item in each holder set, [B, G]; the largest rank time with the AllReduce's
    latency; and the solver's bound on that over all placements in these holder sets."""

    rows: Floats
    seconds: float
    bound_seconds: float


def place_whole(
    items: PricingItems,
    whole: NDArray[np.bool_],
    sets: HolderSets,
    usable: NDArray[np.bool_],
    topology: Topology,
    capacity_bytes: Floats,
    budget_bytes: float,
    nodes: int,
    relative_gap: float,
    scale_seconds: float,
) -> WholeRows | None:
    """Place the items, those of `whole` [B] in whole rows, in the `usable` [B, G] of the sets.

    The solver stops at `relative_gap`; `scale_seconds` is about what T will be, as its tolerances
    are absolute. None where it finds no placement within that many nodes.
    """
    ranks = topology.ranks
    b, g = np.nonzero(usable)
    second = scale_seconds or 1.0
    byte = items.total_bytes / ranks or 1.0
    # A whole item counts rows; of the others the variable is the share.
    unit = np.where(whole, 1.0, items.rows)[b]
    seconds = items.traffic(topology).set_seconds(b, sets, g, read_by_read=True)
    if items.training:
        everywhere = (sets.copies == ranks)[g] & (ranks > 1)
        seconds[everywhere] = everywhere_seconds(items, topology)[b[everywhere]]
    memory = items.memory_bytes[b, None]
    uses = np.concatenate(
        [
            seconds / second,
            memory / byte * sets.holds[g],
            memory / byte * (sets.copies[g, None] - 1),
        ],
        axis=1,
    )
    limit = np.concatenate([np.zeros(ranks), capacity_bytes / byte, [budget_bytes / byte]])
    largest = np.concatenate([-np.ones(ranks), np.zeros(ranks + 1)])[:, None]
    total = np.where(whole, items.rows, 1.0)
    each = csr_array((np.ones(len(b)), (b, np.arange(len(b)))), shape=(len(items), len(b) + 1))
    rows_below = csc_array(np.concatenate([(uses * unit[:, None]).T, largest], axis=1))
    with standard_streams.native_output_dropped():
        found = milp(
            np.concatenate([np.zeros(len(b)), [1.0]]),
            integrality=np.concatenate([whole[b], [False]]).astype(np.int64),
            bounds=Bounds(0.0, np.concatenate([total[b], [np.inf]])),
            constraints=LinearConstraint(
                vstack([rows_below, each]),
                np.concatenate([np.full(len(limit), -np.inf), total]),
                np.concatenate([limit, total]),
            ),
            options={
                "node_limit": nodes,
                "mip_rel_gap": relative_gap,
                "time_limit": _MOST_SECONDS,
            },
        )
    if found.x is None or found.status == _OUT_OF_TIME:
        return None
    placed = np.zeros(usable.shape)
    placed[b, g] = np.where(whole[b], np.rint(found.x[:-1]), np.maximum(found.x[:-1], 0.0)) * unit
    bound = max(float(found.mip_dual_bound), 0.0)
    return WholeRows(placed, found.x[-1] * second + items.latency, bound * second + items.latency)
