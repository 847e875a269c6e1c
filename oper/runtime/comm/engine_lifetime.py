"""The guard of an engine: the engine may not be used in a forked child or once it is closed, and an
error on one rank makes the other ranks raise too.

A rank that raised no longer takes part in the steps of any engine of its process group, such as
those of a model's other collections. So the failure is posted to the signals of all of them.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals

_guards: "weakref.WeakSet[EngineGuard]" = weakref.WeakSet()  # of the engines of this process


class EngineGuard:
    """The guard of one engine. `waiting` says whether ranks wait for each other in every step, as
    in training."""

    def __init__(
        self, node: Node, signals: Signals, group: dist.ProcessGroup | None, waiting: bool
    ) -> None:
        self._node, self._signals, self._group, self._waiting = node, signals, group, waiting
        self._process, self._closed = os.getpid(), False
        _guards.add(self)

    def check(self) -> None:
        """Raise OperError if the engine cannot be used here, or no longer."""
        if os.getpid() != self._process:
            raise OperError(
                f"process {os.getpid()} was forked from {self._process} after the tables were "
                "sharded, and cannot use them; start workers first, or use spawn"
            )
        if self._closed:
            raise OperError("the tables were released by close(), and cannot be used any more")

    @contextmanager
    def failing_together(self, everywhere: bool = False) -> Iterator[None]:
        """Make an error inside fail all ranks, at their next wait.

        If ranks do not wait for each other, as in inference, that holds only for calls that all of
        them make together (`everywhere`): a bad request fails alone. With one rank nothing is
        posted: its tables can still be saved after a bad batch.
        """
        try:
            yield
        except BaseException as error:
            if self._node.ranks > 1 and (self._waiting or everywhere):
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Make all ranks that wait for this one, now or later, raise for this error: also in the
        group's other engines."""
        for guard in list(_guards):
            if guard is self or (self._group is not None and guard._group is self._group):
                guard._signals.fail(error)

    def close(self) -> None:
        """Leave the other ranks; the engine cannot be used after that."""
        self._closed = True
        self._node.close()
