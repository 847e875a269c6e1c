"""A batch that is ready to be looked up: addresses, and which accesses are of which row."""

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from oper.runtime.memory.sorted_accesses import BatchRows


@dataclass(frozen=True)
class PreparedBatch:
    """N accesses of F features, and the rows they read (sort.py) if anything needs those.

    `offsets` are those of what is pooled: None where every access is put out by itself, be it that
    each sample has one, or that the module pools nothing. Which accesses are whose sample's say
    `bags`, None where each sample has one of every feature. A graph's batch has no samples.
    """

    addresses: torch.Tensor  # int64 [N]
    segment_offset: torch.Tensor  # int64 [F + 1]
    offsets: torch.Tensor | None  # [F · samples + 1]
    weights: torch.Tensor | None  # float32 [N]
    features: torch.Tensor  # int64 [F, FEATURE_WORDS]
    out_elements: int
    sort: BatchRows | Future[BatchRows] | None = None
    samples: int = 0
    bags: torch.Tensor | None = None  # [F · samples + 1]
    keys: tuple[str, ...] = ()  # of the features, in the order of the values
    trains: bool = False  # whether there may be a backward

    @property
    def lengths(self) -> torch.Tensor:
        """How many accesses of each feature each sample has, [F, samples]."""
        assert self.keys, "a graph's batch has no samples"
        shape = (len(self.features), self.samples)
        if self.bags is None:
            return torch.ones(1, 1, dtype=torch.int64).expand(shape)
        return self.bags.diff().view(shape)

    @property
    def rows(self) -> BatchRows | None:
        """The rows that are read, if they were asked for; waits until they are found."""
        return self.sort.result() if isinstance(self.sort, Future) else self.sort

    @property
    def sorting(self) -> bool:
        """Whether asking for the rows would wait."""
        return isinstance(self.sort, Future) and not self.sort.done()
