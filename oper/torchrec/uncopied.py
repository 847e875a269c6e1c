"""Parts of a model whose memory all ranks share, which cannot be copied or pickled."""

from abc import abstractmethod
from typing import Any, Self

import torch

from oper.base.errors import OperError


class Uncopied:
    """Part that stays itself in DistributedModelParallel.copy, and refuses all other copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # DistributedModelParallel.copy copies models but shares their tensors.
        probe = torch.empty(0)
        if probe.__deepcopy__({}) is probe:
            return self
        raise self._cannot_be("copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._cannot_be("pickled")

    @abstractmethod
    def _cannot_be(self, done: str) -> OperError:
        """Return the error for an attempt to copy or pickle the part."""
