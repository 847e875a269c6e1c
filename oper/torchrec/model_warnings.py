"""The warnings of one model: each of them once, and on one rank, however many collections it has.

All ranks and collections find the same: a script on 64 ranks should read it once.
"""

import logging
import warnings
from collections.abc import Hashable

import torch.distributed as dist

from oper.base.formatting import printable


class ModelWarnings:
    """Logs the warnings of one model, if this rank is the one that does."""

    def __init__(self, speaks: bool = True) -> None:
        self._speaks, self._said = speaks, set[Hashable]()

    @classmethod
    def of_ranks(cls, ranks: int) -> "ModelWarnings":
        """The warnings of a model for so many ranks. The first of all ranks speaks; where these are
        not all, it may not be one of them, and everyone does."""
        all_ranks = dist.is_initialized() and dist.get_world_size() == ranks
        return cls(not all_ranks or dist.get_rank() == 0)

    def warn(self, log: logging.Logger, about: Hashable, text: str) -> None:
        """Log a warning, unless one about the same was logged."""
        if about not in self._said and self._speaks:
            log.warning("%s", printable(text))
        self._said.add(about)

    def warn_of_script(self, text: str) -> None:
        """Issue a UserWarning about the calling script, unless the same was issued: a script may
        have its loggers off, and go on with another result than it was written for."""
        if text not in self._said and self._speaks:
            warnings.warn(printable(text), UserWarning, stacklevel=2)
        self._said.add(text)
