"""Moves of rows to their places in a new plan, as a file in its folder.

`moves.npy` has one entry for each changed row and each rank that holds it in the new plan: its slot
there, and the rank and slot to copy it from, as numbered in the old plan, with the bytes of the
copy (row and optimizer state; 0 if it is there already). All other rows keep their holders and
slots. All sources must be read before any slot is written.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.files import storage

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
class RowMoves:
    """Moves as entries of dtype `ENTRY`, sorted by row and then rank."""

    entries: NDArray[np.void]

    @staticmethod
    def none() -> "RowMoves":
        """Return no moves."""
        return RowMoves(np.zeros(0, ENTRY))

    def bytes_by_link(self, ranks: int, old_ranks: int = 0) -> Ints:
        """Return the bytes copied, int64, reader by source: [M, M], or more columns if the old plan
        had more ranks; on the diagonal are copies between slots of a rank."""
        sources = max(ranks, old_ranks)
        matrix = np.zeros((ranks, sources), dtype=np.int64)
        entries = self.entries
        for name, number in (("rank", ranks), ("source_rank", sources)):
            beyond = (entries[name] < 0) | (entries[name] >= number)
            if beyond.any():
                raise OperError(
                    f"{FILE}: a row is copied with {name} {entries[name][beyond][0]}, and there "
                    f"are {number} ranks; make the plan again"
                )
        np.add.at(matrix, (entries["rank"], entries["source_rank"]), entries["bytes"])
        return matrix

    @property
    def travelling_rows(self) -> int:
        """The number of rows that some rank copies from another."""
        away = self.entries["rank"] != self.entries["source_rank"]
        return len(np.unique(self.entries["row"][away]))

    @property
    def changed_rows(self) -> int:
        """The number of rows whose holders or slots change."""
        return len(np.unique(self.entries["row"]))

    def save(self, folder: Path) -> None:
        """Write the moves into a plan's folder that is being written."""
        storage.save_array(folder / FILE, self.entries)

    @staticmethod
    def load(folder: Path | str) -> "RowMoves":
        """Load the moves from the old plan to one made by `oper replan`; raise OperError if it has
        none."""
        path = Path(folder) / FILE
        if not path.exists():
            raise OperError(f"{folder}: has no {FILE}; only plans made by `oper replan` have moves")
        entries = storage.load_array(path)
        if entries.dtype != ENTRY or entries.ndim != 1:
            raise OperError(f"{path}: has {entries.dtype} instead of moves; make the plan again")
        if any((entries[name] < 0).any() for name in ENTRY.names or ()):
            raise OperError(f"{path}: has moves with negative numbers; make the plan again")
        return RowMoves(entries)
