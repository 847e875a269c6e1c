"""The mixed integer programme over classes: the number of whole rows in each holder set.

In: `ItemsToPlace` of one memory or of several: the items to keep whole, holder sets, the limits.
Out: `WholeRows` of each.

    minimise T   over n[b, g] rows of item b in holder set g, Σ_g n[b, g] = rows_b, subject to
    time         Σ n[b, g] · seconds[b, g, r] ≤ T                     rank r
    capacity     Σ n[b, g] · m_b · [j holds g] ≤ capacity_j           rank j of each memory
    budget       Σ n[b, g] · m_b · (copies_g - 1) ≤ budget            of each memory

n is whole for the items asked for, which decide the ranks' loads, and any number for the others,
which even the loads out. The solver stops after a number of nodes, never after a time: a plan does
not depend on the clock. Callers bound the size of the programme instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_diag, csc_array, csr_array, hstack, vstack

from oper.base import standard_streams
from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets
from oper.planner.lp.pricing import everywhere_seconds
from oper.planner.lp.restricted_master import MemoryItems


@dataclass(frozen=True)
class ItemsToPlace:
    """The items of one memory, those of `whole` [B] in whole rows, and the `usable` [B, G] of the
    holder sets."""

    memory: MemoryItems
    whole: NDArray[np.bool_]
    sets: HolderSets
    usable: NDArray[np.bool_]

    @property
    def columns(self) -> tuple[Ints, Ints]:
        """Item and holder set of each variable, [N] each."""
        b, g = np.nonzero(self.usable)
        return b, g

    @property
    def unit(self) -> Floats:
        """Rows that a variable is 1 for, [N]: a whole item counts rows, of the others the variable
        is the share."""
        return np.where(self.whole, 1.0, self.memory.rows.rows)[self.columns[0]]

    @property
    def total(self) -> Floats:
        """Sum of each item's variables, [B]."""
        return np.where(self.whole, self.memory.rows.rows, 1.0)

    @property
    def byte(self) -> float:
        """The scale of its bytes."""
        return self.memory.rows.total_bytes / self.memory.topology.ranks or 1.0

    def seconds(self) -> Floats:
        """Return each rank's seconds for one row of each variable, [N, M]."""
        items, topology, _, _ = self.memory
        ranks, (b, g) = topology.ranks, self.columns
        seconds = items.traffic(topology).set_seconds(b, self.sets, g, read_by_read=True)
        if items.training:
            everywhere = (self.sets.copies == ranks)[g] & (ranks > 1)
            seconds[everywhere] = everywhere_seconds(items, topology)[b[everywhere]]
        return seconds

    def memory_uses(self) -> Floats:
        """Return the use of the capacities and the budget, [N, M + 1], by one row of each
        variable."""
        b, g = self.columns
        memory = self.memory.rows.memory_bytes[b, None]
        copies = self.sets.copies[g, None] - 1
        held = [memory / self.byte * self.sets.holds[g], memory / self.byte * copies]
        return np.concatenate(held, axis=1)


@dataclass(frozen=True)
class WholeRows:
    """Rows of each item in each holder set, [B, G] of each memory; the largest rank time with the
    AllReduce's latency; and the solver's bound on that over all placements in these holder sets."""

    rows: tuple[Floats, ...]
    seconds: float
    bound_seconds: float


def place_whole(
    placed: Sequence[ItemsToPlace], nodes: int, relative_gap: float, scale_seconds: float
) -> WholeRows | None:
    """Place the items of all memories.

    The solver stops at `relative_gap`; `scale_seconds` is about T, because the solver's tolerances
    are absolute. None if it finds no placement within that many nodes.
    """
    ranks = placed[0].memory.topology.ranks
    second = scale_seconds or 1.0
    columns = [len(of.columns[0]) for of in placed]
    unit = [of.unit[:, None] for of in placed]
    seconds = [(of.seconds() / second * u).T for of, u in zip(placed, unit, strict=True)]
    memory = [(of.memory_uses() * u).T for of, u in zip(placed, unit, strict=True)]
    times = csc_array(np.concatenate([*seconds, -np.ones((ranks, 1))], axis=1))
    nothing = csr_array((sum(len(uses) for uses in memory), 1))  # of T
    limits = [[*of.memory.capacity_bytes, of.memory.budget_bytes] for of in placed]
    limit = np.concatenate(
        [np.zeros(ranks), *(np.array(n) / of.byte for n, of in zip(limits, placed, strict=True))]
    )
    all_placed = block_diag(
        [
            csr_array((np.ones(n), (of.columns[0], np.arange(n))), shape=(len(of.total), n))
            for n, of in zip(columns, placed, strict=True)
        ]
    )
    total = np.concatenate([of.total for of in placed])
    whole = np.concatenate([of.whole[of.columns[0]] for of in placed])
    most = np.concatenate([of.total[of.columns[0]] for of in placed])
    with standard_streams.native_output_dropped():
        solution = milp(
            np.concatenate([np.zeros(sum(columns)), [1.0]]),
            integrality=np.concatenate([whole, [False]]).astype(np.int64),
            bounds=Bounds(0.0, np.concatenate([most, [np.inf]])),
            constraints=LinearConstraint(
                vstack(
                    [
                        times,
                        hstack([block_diag(memory), nothing]),
                        hstack([all_placed, csr_array((all_placed.shape[0], 1))]),
                    ]
                ),
                np.concatenate([np.full(len(limit), -np.inf), total]),
                np.concatenate([limit, total]),
            ),
            options={"node_limit": nodes, "mip_rel_gap": relative_gap},
        )
    if solution.x is None:
        return None
    rows = []
    for n, of in enumerate(placed):
        x = solution.x[sum(columns[:n]) : sum(columns[: n + 1])]
        whole_rows = of.whole[of.columns[0]]
        in_sets = np.zeros(of.usable.shape)
        in_sets[of.columns] = np.where(whole_rows, np.rint(x), np.maximum(x, 0.0)) * of.unit
        rows.append(in_sets)
    latency = sum(of.memory.rows.latency for of in placed)
    bound = max(float(solution.mip_dual_bound), 0.0)
    return WholeRows(tuple(rows), solution.x[-1] * second + latency, bound * second + latency)
