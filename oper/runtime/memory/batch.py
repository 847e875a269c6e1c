"""A batch that is ready to be looked up: addresses, and which accesses are of which row."""

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from oper.runtime.memory.sorted_accesses import BatchRows


@dataclass(frozen=True)
class PreparedBatch:
    """N accesses of F features, and the rows they read (sort.py) if anything needs those.

    `offsets` is None where every bag holds one access.
    """

    addresses: torch.Tensor  # int64 [N]
    segment_offset: torch.Tensor  # int64 [F + 1]
    offsets: torch.Tensor | None  # [bags + 1]
    weights: torch.Tensor | None  # float32 [N]
    features: torch.Tensor  # int64 [F, FEATURE_WORDS]
    out_elements: int
    sort: BatchRows | Future[BatchRows] | None = None
    samples: int = 0
    keys: tuple[str, ...] = ()  # of the features, in the order of the values
    trains: bool = False  # whether there may be a backward

    @property
    def rows(self) -> BatchRows | None:
        """The rows that are read, if they were asked for; waits until they are found."""
        return self.sort.result() if isinstance(self.sort, Future) else self.sort

    @property
    def sorting(self) -> bool:
        """Whether asking for the rows would wait."""
        return isinstance(self.sort, Future) and not self.sort.done()
