"""The ranks that tests of a run share: worlds of several sizes, started when they are first needed.

A test whose ranks die or stop starts its own (`mortal_ranks`, or `Ranks` in a `with`).
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.support.runtime.ranks import Ranks


class Worlds(ExitStack):
    """Worlds of two ranks and more. A function runs in a world of just its ranks, as new groups of
    processes, such as TorchRec's ShardingEnv has, are made by all ranks that there are."""

    def __init__(self) -> None:
        super().__init__()
        self._started: dict[int, Ranks] = {}

    def run(
        self, ranks: int, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> list[Any]:
        """The results of function(rank, group, *arguments, **options), by rank."""
        world = max(ranks, 2)  # one rank is one of two, for which TorchRec needs no other
        if world not in self._started:
            self._started[world] = self.enter_context(Ranks(world))
        return self._started[world].run(ranks, function, *arguments, **options)
