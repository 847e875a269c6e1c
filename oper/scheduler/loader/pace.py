"""Pace: how much work the scores may take, so that batches are ready when training needs them.

Rank 0 measures how long a batch takes to train and how long to dispatch. Where dispatching takes
longer, it lowers α of esd, or K of laia:K; where there is time, it raises them again, up to what
was asked for. Its word is in its header, and holds on all ranks from two batches later on.
"""

from collections import deque
from dataclasses import replace

from oper.scheduler.dispatch import Policy

_DELAY = 2  # batches
_SMOOTHING = 0.25  # weight of the last batch
_SLACK = 0.8  # of the time of training, below which there is time for more
_STEP = 1 / 16  # of α


class Pace:
    """The policy of each batch, from `asked` and rank 0's words; always `asked` if `fixed`."""

    def __init__(self, asked: Policy, fixed: bool) -> None:
        self._asked = asked
        self.follows = not fixed and (asked.kind == "esd" or asked.tables is not None)
        self._alpha, self._tables = asked.alpha, asked.tables or 0
        self._coming: deque[Policy] = deque([asked] * _DELAY)
        self._training = self._dispatching = 0.0

    @property
    def word(self) -> tuple[float, int]:
        """α and K for two batches later, by what this rank has measured."""
        return self._alpha, self._tables

    def hear(self, alpha: float, tables: int) -> Policy:
        """Take rank 0's word, and return the policy of this batch."""
        if not self.follows:
            return self._asked
        given = None if self._asked.tables is None else tables
        self._coming.append(replace(self._asked, alpha=alpha, tables=given))
        return self._coming.popleft()

    def note(self, training: float, dispatching: float) -> None:
        """Take the seconds of a batch; `training` is 0 where none was trained yet."""
        if not self.follows or training <= 0:
            return
        first = self._training == 0
        weight = 1.0 if first else _SMOOTHING
        self._training += weight * (training - self._training)
        self._dispatching += weight * (dispatching - self._dispatching)
        if self._dispatching > self._training:
            self._alpha = max(self._alpha - _STEP, 0.0)
            self._tables = max(self._tables - 1, 1)
        elif self._dispatching < _SLACK * self._training:
            self._alpha = min(self._alpha + _STEP, self._asked.alpha)
            self._tables = min(self._tables + 1, self._asked.tables or 0)
