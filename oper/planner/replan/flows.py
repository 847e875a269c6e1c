"""Flows: the fewest rows of each class that change holders between two placements."""

from dataclasses import dataclass

import numpy as np

from oper.base.arrays import Ints
from oper.planner.replan.migration_cost import MigrationCost


@dataclass(frozen=True)
class Flows:
    """`rows` [F] rows of class `row_class` go from column `before` to column `after`."""

    row_class: Ints
    before: Ints
    after: Ints
    rows: Ints


def net_flows(old: Ints, new: Ints, carriage: MigrationCost) -> Flows:
    """The least changes that lead from counts `old` to `new`, both [C, K]: as many rows of each
    class as can stay do, and the others take the cheapest ways first."""
    changed = np.flatnonzero((old != new).any(axis=1))
    delta = new[changed] - old[changed]
    surplus, lack = np.clip(-delta, 0, None), np.clip(delta, 0, None)
    found: list[tuple[Ints, int, int, Ints]] = []
    for pair in np.argsort(carriage.seconds, axis=None, kind="stable").tolist():
        g, k = divmod(pair, carriage.seconds.shape[1])
        rows = np.minimum(surplus[:, g], lack[:, k])
        some = np.flatnonzero(rows)
        if g == k or not len(some):
            continue
        surplus[some, g] -= rows[some]
        lack[some, k] -= rows[some]
        found.append((changed[some], g, k, rows[some]))
    size = [len(rows) for *_, rows in found]
    none = np.zeros(0, dtype=np.int64)
    return Flows(
        np.concatenate([none, *(c for c, *_ in found)]),
        np.repeat(np.array([g for _, g, *_ in found], dtype=np.int64), size),
        np.repeat(np.array([k for _, _, k, _ in found], dtype=np.int64), size),
        np.concatenate([none, *(rows for *_, rows in found)]),
    )
