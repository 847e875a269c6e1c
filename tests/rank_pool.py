"""Ranks for tests: processes with a gloo group that live for a whole run, as starting them and
importing torchrec takes seconds.

    shared(2).run(function, argument)      # [function(rank, ranks, argument) of each rank]
"""

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 120.0
GRACE_SECONDS = 3.0  # of the other ranks, after one failed


class RankPool:
    """`ranks` processes, each with one thread, that do what they are told."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._links, self._processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(rank, ranks, store, there), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function, one of a module that can be imported, returns on each rank."""
        for link in self._links:
            link.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + DEADLINE_SECONDS
        while len(answers) < self.ranks:
            waiting = [link for rank, link in enumerate(self._links) if rank not in answers]
            ready = multiprocessing.connection.wait(waiting, max(end - time.monotonic(), 0))
            if not ready:
                break
            for link in ready:
                with contextlib.suppress(EOFError):
                    answers[self._links.index(link)] = link.recv()
                    continue
                answers[self._links.index(link)] = (False, "the process died")
            if not all(fine for fine, _ in answers.values()):
                end = min(end, time.monotonic() + GRACE_SECONDS)
        failed = {rank: text for rank, (fine, text) in answers.items() if not fine}
        late = sorted(set(range(self.ranks)) - set(answers))
        if failed or late:
            self.close()
            shared.cache_clear()
            texts = [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
            raise AssertionError("\n".join([*texts, *(f"rank {r}: did not answer" for r in late)]))
        return [answers[rank][1] for rank in range(self.ranks)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


@functools.cache
def shared(ranks: int) -> RankPool:
    """The pool that all tests of a run share."""
    pool = RankPool(ranks)
    atexit.register(pool.close)
    return pool


def _serve(rank: int, ranks: int, store: str, link: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch's, of what TorchRec uses
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, arguments = link.recv()
        except EOFError:
            return
        try:
            link.send((True, function(rank, ranks, *arguments)))
        except BaseException:  # as torch.distributed.checkpoint raises
            link.send((False, traceback.format_exc()))
