"""Moves: which rows a new plan holds elsewhere, row by row, as part of its folder.

`moves.npy` has one entry for each changed row and each rank that holds it in the new plan: the
slot it gets there and the rank and slot it is copied from, by the old plan's numbers, with the
bytes of the copy (row and optimizer state; 0 where it already lies there). Rows that are not in it
have the holders and the slots they had. All sources are to be read before any slot is written.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oper import storage
from oper.errors import OperError
from oper.planner.classes import Ints
from oper.planner.places import Carriage

FILE = "moves.npy"
ENTRY = np.dtype(
    [
        ("row", "<i8"),  # global row id
        ("slot", "<i8"),
        ("source_slot", "<i8"),
        ("bytes", "<i8"),
        ("rank", "<i4"),
        ("source_rank", "<i4"),
    ]
)


@dataclass(frozen=True)
class Moves:
    """Entries of dtype `ENTRY`, by row and then rank."""

    entries: NDArray[np.void]

    @staticmethod
    def none() -> "Moves":
        """Nothing moves."""
        return Moves(np.zeros(0, ENTRY))

    def bytes_by_link(self, ranks: int) -> Ints:
        """Bytes copied, [M, M], reader by source; on the diagonal from slot to slot of a rank."""
        matrix = np.zeros((ranks, ranks), dtype=np.int64)
        entries = self.entries
        np.add.at(matrix, (entries["rank"], entries["source_rank"]), entries["bytes"])
        return matrix

    @property
    def travelling_rows(self) -> int:
        """Rows that some rank gets from another."""
        away = self.entries["rank"] != self.entries["source_rank"]
        return len(np.unique(self.entries["row"][away]))

    @property
    def changed_rows(self) -> int:
        """Rows whose holders or slots change at all."""
        return len(np.unique(self.entries["row"]))

    def save(self, folder: Path) -> None:
        """Write them into a plan's folder that is being made."""
        storage.save_array(folder / FILE, self.entries)

    @staticmethod
    def load(folder: Path | str) -> "Moves":
        """The moves that lead to a plan made by `oper replan`."""
        path = Path(folder) / FILE
        if not path.exists():
            raise OperError(f"{folder}: has no {FILE}; only plans made by `oper replan` have moves")
        entries = storage.load_array(path)
        if entries.dtype != ENTRY or entries.ndim != 1:
            raise OperError(f"{path}: holds no moves ({entries.dtype}); make the plan again")
        return Moves(entries)


@dataclass(frozen=True)
class Flows:
    """`rows` [F] rows of class `row_class` go from column `before` to column `after`."""

    row_class: Ints
    before: Ints
    after: Ints
    rows: Ints


def net_flows(old: Ints, new: Ints, carriage: Carriage) -> Flows:
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
