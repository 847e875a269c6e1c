"""The class of rows by their counts, for the listed rows of a plan or a scan.

In: accesses and samples with the row, of rows table by table. Out: the class of each row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Counts, Floats, Ints, as_int64, as_tensor
from oper.plan.row_locator import Chunk
from oper.planner.problem.classes import Classes
from oper.profiling.profile import Profile


@dataclass(frozen=True)
class TableEntries:
    """The entries of `Classes` sorted by table, then by samples with the row; E entries."""

    first: Ints  # [T + 1] offset of each table's entries
    accesses: Ints  # [E]
    samples_with_row: Ints  # [E]
    D: Floats  # [E]
    D_of_node: Floats  # [E, K]
    weight: Floats  # [E] expected accesses of a row over its accesses; of one without any, of it
    class_index: Ints  # [E]

    @staticmethod
    def of(classes: Classes, tables: int) -> "TableEntries":
        """Return the entries of all classes, for `tables` tables."""
        samples_with_row = classes.samples_with_row[classes.entry_class]
        order = np.lexsort((samples_with_row, classes.entry_table))
        first = np.zeros(tables + 1, dtype=np.int64)
        np.cumsum(np.bincount(classes.entry_table, minlength=tables), out=first[1:])
        class_index = classes.entry_class[order]
        return TableEntries(
            first,
            classes.accesses[class_index],
            samples_with_row[order],
            classes.D[class_index],
            classes.D_of_node[class_index],
            classes.expected[class_index] / np.maximum(classes.accesses[class_index], 1),
            class_index,
        )

    def find(
        self, accesses: Counts, samples_with_row: Counts, first_row: Ints
    ) -> NDArray[np.int32]:
        """Return the class of each row, int32 [n]; `first_row[t]`, [T + 1], is the first row of
        table t.

        Raises ValueError if a row has counts that no class of its table has.
        """
        tensor: Any = native.ops().find_classes(
            as_tensor(accesses),
            as_tensor(samples_with_row),
            as_int64(first_row),
            as_int64(self.first),
            as_int64(self.accesses),
            as_int64(self.samples_with_row),
            as_int64(self.class_index),
        )
        classes: NDArray[np.int32] = tensor.numpy()
        return classes


class ClassFinder:
    """The class of any row of a profile."""

    def __init__(self, profile: Profile, classes: Classes) -> None:
        self.classes = len(classes)
        self._profile = profile
        self._entries = TableEntries.of(classes, len(profile.tables))

    def find(self, chunk: Chunk) -> NDArray[np.int32]:
        """Return the class of each row of a chunk, int32 [n]."""
        rows = slice(chunk.first, chunk.first + len(chunk))
        first_row = np.zeros(len(self._profile.tables) + 1, dtype=np.int64)
        first_row[chunk.table + 1 :] = len(chunk)
        return self._entries.find(
            self._profile.table_accesses(chunk.table)[rows],
            self._profile.table_samples_with_row(chunk.table)[rows],
            first_row,
        )
