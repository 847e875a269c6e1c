"""Ranks for a measurement or a test: spawned processes in one gloo group, with a deadline.

    results = run(body, ranks, argument, …)   # body(rank, argument, …) in each, at module level

Every rank has one thread, so that ranks and not threads share the cores. The first rank that fails
ends the others; a rank whose parent is gone ends itself.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_SECONDS = 600.0


class RankError(RuntimeError):
    """A rank failed, or did not end in time; the message has its traceback."""


def run(
    body: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> list[Any]:
    """What `body(rank, *arguments)` returns on each of `ranks` processes, by rank."""
    # The parent keeps the store, so that a rank that ends takes no other with it.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(
            target=_rank,
            args=(rank, ranks, store.port, deadline_seconds, answer, body, arguments),
            name=f"rank {rank}",
            daemon=True,
        )
        for rank, (_, answer) in enumerate(pipes)
    ]
    end = time.monotonic() + deadline_seconds
    try:
        _start(processes)
        for _, answer in pipes:
            answer.close()  # the children's, so that a dead one is seen as the end of its pipe
        return _collect([reading for reading, _ in pipes], end)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _start(processes: list[Any]) -> None:
    # Ctrl-C is for this process, which ends the others; OMP's threads are counted before Python's.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def _collect(readers: list[Any], end: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        waiting = {reader: rank for rank, reader in enumerate(readers) if rank not in results}
        ready: list[Any] = multiprocessing.connection.wait(
            list(waiting), timeout=end - time.monotonic()
        )
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} were not done in time")
        for reader in ready:
            rank = waiting[reader]
            try:
                failure, results[rank] = reader.recv()
            except EOFError:
                failure = "it ended without a word; was it killed?"
            if failure:
                raise RankError(f"rank {rank} failed: {failure}")
    return [results[rank] for rank in range(len(readers))]


def _rank(
    rank: int,
    ranks: int,
    port: int,
    deadline_seconds: float,
    answer: Any,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # gloo's own variable: without it gloo asks for the host's name, which containers may not know.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=deadline_seconds)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=False, timeout=limit
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        result = body(rank, *arguments)
        dist.barrier()  # a peer may still need this rank
        dist.destroy_process_group()
        answer.send((None, result))
    except BaseException:
        answer.send((traceback.format_exc(), None))
        raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
