"""The class of any row of a profile, found by its counts."""

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.tensors import as_int64, as_tensor
from oper.plan.row_locator import Chunk
from oper.planner.problem.classes import Classes
from oper.profiling.profile import Profile


class ClassFinder:
    """The class of any row of a profile."""

    def __init__(self, profile: Profile, classes: Classes) -> None:
        self._profile = profile
        self.classes = len(classes)
        tables = len(profile.tables)
        order = np.argsort(classes.entry_table, kind="stable")
        entries = classes.entry_class[order]
        per_table = np.bincount(classes.entry_table, minlength=tables)
        self._entries = (
            as_int64(np.concatenate([[0], np.cumsum(per_table)])),
            as_int64(classes.accesses[entries]),
            as_int64(classes.containing[entries]),
            as_int64(entries),
        )

    def find(self, chunk: Chunk) -> NDArray[np.int32]:
        """The class of each row of a chunk, int32 [n]."""
        rows = slice(chunk.first, chunk.first + len(chunk.extent))
        offsets = np.zeros(len(self._profile.tables) + 1, dtype=np.int64)
        offsets[chunk.table + 1 :] = len(chunk.extent)
        found: NDArray[np.int32] = (
            native.ops()
            .find_classes(
                as_tensor(self._profile.table_accesses(chunk.table)[rows]),
                as_tensor(self._profile.table_containing(chunk.table)[rows]),
                as_int64(offsets),
                *self._entries,
            )
            .numpy()
        )
        return found
