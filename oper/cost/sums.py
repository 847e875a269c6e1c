"""Sums over the rows of each holder set: all that the cost depends on."""

from dataclasses import dataclass, fields

import numpy as np

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

    @staticmethod
    def zeros(groups: int) -> "Sums":
        return Sums(*(np.zeros(groups) for _ in fields(Sums)))
