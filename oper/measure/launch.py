"""Starting the ranks that measure links: local processes, or those that torchrun started."""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from oper.base.errors import OperError
from oper.measure.measure_ranks import ARENA_BYTES, DEADLINE_SECONDS, ROW_BYTES, measure_ranks
from oper.measure.measurement import Measurement

Store = Any  # a torch.distributed store, whose types torch does not export

_LOOPBACK = "127.0.0.1"
START_SECONDS = 10.0  # for each rank to import torch, on cores that all ranks share


def measure_local(
    ranks: int,
    deadline_seconds: float = DEADLINE_SECONDS,
    arena_bytes: int = ARENA_BYTES,
    row_bytes: int = ROW_BYTES,
) -> Measurement:
    """Measure `ranks` processes that are started here for it, on this host.

    Raises OperError, with all ranks ended, where one fails or does not come in time.
    """
    store = _local_store(0, deadline_seconds, is_master=True)
    arguments = (ranks, store.port, deadline_seconds, arena_bytes, row_bytes)
    # A fresh interpreter each, as a fork would share torch's threads and locks.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_run_local_rank, args=(rank, *arguments), name=f"rank {rank}", daemon=True
        )
        for rank in range(ranks)
    ]
    # Each wait inside has its deadline; this one is for a rank that never stops computing.
    end = time.monotonic() + 4 * deadline_seconds + START_SECONDS * ranks
    try:
        _start(processes)
        while any(process.exitcode != 0 for process in processes):
            if failed := [(p.exitcode, rank) for rank, p in enumerate(processes) if p.exitcode]:
                # The least is a signal's, if there is one: the cause of what the others miss.
                exit_code, rank = min(failed)
                raise OperError(f"measuring: {_failure(store, rank, exit_code)}")
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
            if time.monotonic() > end:
                raise OperError(f"measuring: ranks {late} were not done in time; try fewer ranks")
            multiprocessing.connection.wait([processes[rank].sentinel for rank in late], timeout=1)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(timeout=deadline_seconds)
    return Measurement(**json.loads(store.get("measurement")))


def measure_under_torchrun(
    row_bytes: int = ROW_BYTES, deadline_seconds: float = DEADLINE_SECONDS
) -> Measurement | None:
    """Measure the ranks that torchrun started; the result on rank 0, None on the others."""
    limit = timedelta(seconds=deadline_seconds)
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=limit))
        # torchrun's number of the host among its hosts.
        node = int(os.environ["GROUP_RANK"])
        measured = measure_ranks(store, rank, ranks, node, deadline_seconds, row_bytes=row_bytes)
    except RuntimeError as error:
        raise OperError(f"measuring: the ranks could not connect ({error})") from error
    return measured if rank == 0 else None


def _start(processes: Sequence[Any]) -> None:
    # Ctrl-C is for this process alone, which ends the others: they inherit that it is ignored.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)


def _run_local_rank(
    rank: int, ranks: int, port: int, deadline_seconds: float, arena_bytes: int, row_bytes: int
) -> None:
    """One rank that `measure_local` starts; it says in the store what it found, or what failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # gloo's own variable: without it gloo asks for the host's name, which containers may not know.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _local_store(port, deadline_seconds, is_master=False)
    try:
        measured = measure_ranks(store, rank, ranks, 0, deadline_seconds, arena_bytes, row_bytes)
    except OperError as error:
        store.set(f"failure {rank}", str(error))
        sys.exit(1)
    if rank == 0:
        store.set("measurement", json.dumps(asdict(measured)))


def _end_with_parent() -> None:
    """End this rank at once where the process that started it is gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _local_store(port: int, deadline_seconds: float, is_master: bool) -> Store:
    """The store of local ranks: the parent's, on a free port if `port` is 0.

    It is on the loopback interface alone: left to itself torch listens on all of them.
    """
    listening = None
    if is_master:
        listening = socket.create_server((_LOOPBACK, port))
        port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_seconds),
        # The store closes it.
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _failure(store: Store, rank: int, exit_code: int) -> str:
    if store.check([f"failure {rank}"]):
        return str(store.get(f"failure {rank}").decode())
    reason = f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"
    return f"rank {rank} ended by {reason}; was there memory enough?"
