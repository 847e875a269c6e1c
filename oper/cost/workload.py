"""What one iteration is: training or inference, how rows are fetched, and the global batch."""

from dataclasses import dataclass
from typing import Literal

from oper.base.errors import OperError
from oper.base.units import whole_number

MOST_SAMPLES = 2**40  # of a batch; more than a log has, and products with counts stay finite


def usual_fetch(nodes: int) -> Literal["raw", "distinct"]:
    """How rows are fetched unless it is said: ranks of one node read every access through a
    pointer, and between nodes each row travels once a batch."""
    return "raw" if nodes == 1 else "distinct"


@dataclass(frozen=True)
class Workload:
    """What one iteration is: mode, how rows are fetched, and the global batch in samples."""

    mode: Literal["training", "inference"]
    fetch: Literal["raw", "distinct"]
    batch_size: int

    def __post_init__(self) -> None:
        if self.mode not in ("training", "inference"):
            raise OperError(f"mode {self.mode!r}: 'training' or 'inference' was needed")
        if self.fetch not in ("raw", "distinct"):
            raise OperError(f"fetch {self.fetch!r}: 'raw' or 'distinct' was needed")
        size = whole_number(self.batch_size, "batch size")
        object.__setattr__(self, "batch_size", size)
        if not 1 <= size <= MOST_SAMPLES:
            raise OperError(f"batch size {size:,}: from 1 to {MOST_SAMPLES:,} samples were needed")

    @property
    def training(self) -> bool:
        return self.mode == "training"
