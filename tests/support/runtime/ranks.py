"""Processes that act as ranks: started once, they run one function after another, in groups.
After a function that failed they are started anew, as it may have left the ranks out of step, and
after one that made more process groups on some ranks than on others: torch names groups by how many
there were, and the next would be named unlike on its ranks, which would wait for each other. Where
one gives no result in time, the failure says where the threads of all are.

with Ranks(4) as ranks:
    results = ranks.run(2, function, *arguments)  # function(rank, group, *arguments) on 0 and 1
"""

import datetime
import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.runtime.forkserver import context

DEADLINE_SECONDS = 300.0  # after which a rank hangs, on the busiest machine too
# Functions after which processes are started anew: process groups that functions made stay, each
# with three threads and five open files.
_FUNCTIONS = 50


class RankFailedError(AssertionError):
    """A function raised on a rank; the message is its traceback."""


class Ranks:
    """`most` processes with a gloo group of each size from 1 to `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._ended = ExitStack()
        self._pipes: list[Any] = []
        self._functions = 0  # that the running processes were given
        self._groups = [(0, 0)] * most  # that each rank made, and has, beyond those of all
        self._where: dict[int, Path] = {}  # by process, what it writes about its threads

    def _start(self) -> None:
        self._groups = [(0, 0)] * self.most
        folder = self._ended.enter_context(tempfile.TemporaryDirectory())
        store = str(Path(folder) / "store")
        for rank in range(self.most):
            here, there = context.Pipe()
            where = Path(folder) / f"threads of {rank}"
            process = context.Process(
                target=_serve, args=(rank, self.most, store, where, there), daemon=True
            )
            process.start()
            self._ended.callback(process.join)
            self._ended.callback(process.kill)
            there.close()
            self._pipes.append(here)
            assert process.pid is not None
            self._where[process.pid] = where

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        lost: tuple[int, ...] = (),
        new_group: bool = False,
        **options: Any,
    ) -> list[Any]:
        """The results of function(rank, group, *arguments, **options), by rank; None for ranks
        that are `lost` on the way. A function whose ranks may give up waiting, after which their
        group cannot be used, gets a `new_group` where it runs on all `most`."""
        if self._functions >= _FUNCTIONS:
            self.close()
        if not self._pipes:
            self._start()
        self._functions += 1
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, new_group, function, arguments, options))
        results: list[Any] = []
        failures = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if rank in lost:
                results.append(None)
                continue
            if not pipe.poll(DEADLINE_SECONDS):
                threads = self._threads()
                self.close()
                raise RankFailedError(
                    f"rank {rank} gave no result within {DEADLINE_SECONDS:.0f} s\n{threads}"
                )
            result, failure, self._groups[rank] = pipe.recv()
            results.append(result)
            if failure:
                failures.append(f"rank {rank}: {failure}")
        if failures or lost or len({*self._groups}) > 1:
            self.close()
        if failures:
            raise RankFailedError("\n".join(failures))
        return results

    def _threads(self) -> str:
        """Where the threads of all ranks are."""
        for process in self._where:
            os.kill(process, signal.SIGUSR1)
        time.sleep(1.0)  # which writing takes them
        found = (f"rank {r}: {f.read_text()}" for r, f in enumerate(self._where.values()))
        return "\n".join(found)

    def close(self) -> None:
        """End the processes."""
        self._pipes.clear()
        self._functions = 0
        self._where.clear()
        self._ended.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(rank: int, most: int, store: str, where: Path, pipe: Any) -> None:
    faulthandler.register(signal.SIGUSR1, file=where.open("w"))

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # which mypy finds only here

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=DEADLINE_SECONDS)
    dist.init_process_group(
        "gloo",
        store=FileStore(store, most),
        rank=rank,
        world_size=most,
        timeout=limit,
    )
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, most + 1)}
    world = dist.distributed_c10d._world
    first = world.group_count, len(world.pg_names)
    while True:
        try:
            ranks, new_group, function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            group = groups[ranks]
            if new_group and ranks == most:
                group = dist.new_group(timeout=limit)
            result, failure = function(rank, group, *arguments, **options), None
        except BaseException:
            result, failure = None, traceback.format_exc()
        made = world.group_count - first[0], len(world.pg_names) - first[1]
        pipe.send((result, failure, made))
