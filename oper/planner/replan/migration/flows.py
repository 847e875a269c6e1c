"""Flows: the fewest rows of each class that change holders between two placements.

In: rows of each class by holder set, before and after. Out: `Flows`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.planner.replan.migration.migration_cost import MigrationCost


@dataclass(frozen=True)
class Flows:
    """`rows` [F] rows of class `row_class` go from column `before` to column `after`."""

    row_class: Ints
    before: Ints
    after: Ints
    rows: Ints

    def link_bytes(self, row_bytes: Floats, copies: Ints) -> float:
        """Return the bytes over links of rows of `row_bytes` [C]; `copies[k, l]` ranks copy a row
        that goes from column k to column l."""
        return float(dot(self.rows * row_bytes[self.row_class], copies[self.before, self.after]))


class _Flow(NamedTuple):
    """The flows of all classes between one pair of columns."""

    row_class: Ints
    before: int
    after: int
    rows: Ints


def net_flows(old: Ints, new: Ints, cost: MigrationCost) -> Flows:
    """Return the least changes that lead from rows `old` to `new`, both [C, K]: as many rows of
    each class as can stay do, and the others go the cheapest ways first."""
    changed = np.flatnonzero((old != new).any(axis=1))
    delta = new[changed] - old[changed]
    surplus, lack = np.clip(-delta, 0, None), np.clip(delta, 0, None)
    flows: list[_Flow] = []
    # Rows can go between few of all pairs of columns.
    givers, takers = np.nonzero(np.outer(surplus.any(axis=0), lack.any(axis=0)))
    order = np.argsort(cost.seconds[givers, takers], kind="stable")
    for g, k in zip(givers[order].tolist(), takers[order].tolist(), strict=True):
        rows = np.minimum(surplus[:, g], lack[:, k])
        some = np.flatnonzero(rows)
        if g == k or not len(some):
            continue
        surplus[some, g] -= rows[some]
        lack[some, k] -= rows[some]
        flows.append(_Flow(changed[some], g, k, rows[some]))
    size = [len(flow.rows) for flow in flows]
    none = np.zeros(0, dtype=np.int64)
    return Flows(
        np.concatenate([none, *(flow.row_class for flow in flows)]),
        np.repeat(np.array([flow.before for flow in flows], dtype=np.int64), size),
        np.repeat(np.array([flow.after for flow in flows], dtype=np.int64), size),
        np.concatenate([none, *(flow.rows for flow in flows)]),
    )
