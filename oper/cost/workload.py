"""What one iteration is: training or inference, how rows are fetched, and the global batch."""

from dataclasses import dataclass
from typing import Literal

from oper.base.errors import OperError


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
        if self.batch_size < 1:
            raise OperError(f"batch size {self.batch_size}: at least 1 sample was needed")

    @property
    def training(self) -> bool:
        return self.mode == "training"
