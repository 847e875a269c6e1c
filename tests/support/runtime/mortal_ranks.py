"""Ranks that may die, stop or raise: processes of one test, and what became of each."""

import datetime
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from tests.support.runtime.forkserver import context

DEADLINE_SECONDS = 300.0  # after which a rank hangs, on the busiest machine too


def run(
    ranks: int, function: Callable[..., Any], *arguments: Any, silent: Collection[int] = ()
) -> list[Any]:
    """What function(rank, group, *arguments) returned on each rank, or the OperError it raised, or
    None if it died or is one of `silent`, which are not waited for. All are killed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve,
                args=(rank, ranks, str(Path(folder) / "store"), there, function, arguments),
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _outcomes(pipes, processes, silent)
        finally:
            for process in processes:
                process.kill()
                process.join()


class EndsBy(BaseException):
    """Raised by a rank's function to end its process by an error, as a script without a handler
    ends, or by SystemExit."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def lose_this_process(kind: int) -> None:
    """Send this process SIGKILL or SIGSTOP; one that is stopped stays so if it is continued."""
    while True:
        os.kill(os.getpid(), kind)


def _outcomes(pipes: list[Any], processes: list[Any], silent: Collection[int]) -> list[Any]:
    outcomes: list[Any] = [None] * len(pipes)
    awaited: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in silent}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while awaited:
        ready: list[Any] = multiprocessing.connection.wait(
            list(awaited), deadline - time.monotonic()
        )
        assert ready, f"ranks {list(awaited.values())} gave no result in {DEADLINE_SECONDS:g} s"
        for pipe in ready:
            rank = awaited.pop(pipe)
            try:
                outcomes[rank], failure = pipe.recv()
            except EOFError:  # it died, or is about to: what it says last is waited for
                processes[rank].join(deadline - time.monotonic())
                continue
            assert failure is None, f"rank {rank}: {failure}"
    return outcomes


def _serve(
    rank: int, ranks: int, store: str, pipe: Any, function: Callable[..., Any], arguments: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=DEADLINE_SECONDS),
    )
    # A rank that died before all others are connected to it would end their init_process_group.
    store_of_all = dist.distributed_c10d._get_default_store()
    store_of_all.set(f"connected/{rank}", "")
    store_of_all.wait([f"connected/{each}" for each in range(ranks)])
    try:
        pipe.send((function(rank, dist.group.WORLD, *arguments), None))
    except EndsBy as end:
        raise end.error from None
    except OperError as error:
        pipe.send((error, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    # A rank that has an outcome is not yet one that has died: it is killed when all have one.
    time.sleep(DEADLINE_SECONDS)
