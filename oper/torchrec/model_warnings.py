"""Warnings of one model: each is issued once, on one rank, for any number of collections.

All ranks and collections find the same faults: a script on 64 ranks should show each once.
"""

import logging
import warnings
from collections.abc import Hashable

import torch.distributed as dist

from oper.base.formatting import printable


class ModelWarnings:
    """Logger of the warnings of one model, on the rank that is to log them."""

    def __init__(self, speaks: bool = True) -> None:
        self._speaks, self._said = speaks, set[Hashable]()

    @classmethod
    def of_ranks(cls, ranks: int) -> "ModelWarnings":
        """Return the warnings of a model for `ranks` ranks. Rank 0 of all ranks logs them; if there
        are more ranks than these, rank 0 may be absent, and every rank logs."""
        all_ranks = dist.is_initialized() and dist.get_world_size() == ranks
        return cls(not all_ranks or dist.get_rank() == 0)

    def warn(self, log: logging.Logger, about: Hashable, text: str) -> None:
        """Log a warning, unless one about the same was logged."""
        if about not in self._said and self._speaks:
            log.warning("%s", printable(text))
        self._said.add(about)

    def warn_of_script(self, text: str) -> None:
        """Issue a UserWarning about the calling script, unless the same was issued: a script
        without loggers would otherwise continue with a result that it does not expect."""
        if text not in self._said and self._speaks:
            warnings.warn(printable(text), UserWarning, stacklevel=2)
        self._said.add(text)
