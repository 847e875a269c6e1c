"""Sums over the rows of each holder set: all that the cost depends on."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats


@dataclass
class Sums:
    """Sums over the rows of each group, shapes [G]: all that cost depends on."""

    rows: Floats
    memory_bytes: Floats  # Σ m
    row_bytes: Floats  # Σ S
    accesses: Floats  # Σ accesses in the log
    read_rows: Floats  # Σ R
    read_bytes: Floats  # Σ S·R
    gradient_bytes: Floats  # Σ S·D
    union_bytes: Floats  # Σ S·U
    gather_bytes: Floats  # Σ (S + 4)·D, what an allgather of (id, row) carries

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Sums)))

    def append(self, other: "Sums") -> "Sums":
        """The groups of `other` after one's own."""
        return Sums(
            *(np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(Sums))
        )

    def total(self, which: NDArray[np.bool_]) -> "Sums":
        """The sums over some of the groups, [G], as one entry without a dimension."""
        return Sums(*(np.asarray(getattr(self, f.name)[which].sum()) for f in fields(Sums)))

    @staticmethod
    def of_rows(
        row_bytes: Floats, memory_bytes: Floats, accesses: Floats, R: Floats, D: Floats, U: Floats
    ) -> "Sums":
        """One entry a row: rows of S = `row_bytes` that are read R times by a rank per iteration
        and touched with chance D by it and U by any."""
        return Sums(
            rows=np.ones(len(row_bytes)),
            memory_bytes=memory_bytes,
            row_bytes=row_bytes,
            accesses=accesses,
            read_rows=R,
            read_bytes=row_bytes * R,
            gradient_bytes=row_bytes * D,
            union_bytes=row_bytes * U,
            gather_bytes=(row_bytes + 4) * D,
        )

    @staticmethod
    def zeros(groups: int) -> "Sums":
        return Sums(*(np.zeros(groups) for _ in fields(Sums)))
