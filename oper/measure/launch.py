"""Start of the ranks that measure links: local processes, or those that torchrun started."""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from oper.base.errors import OperError
from oper.base.formatting import plural
from oper.measure.link_timer import Amounts
from oper.measure.local_rank import Store, local_store, run_local_rank
from oper.measure.measure_ranks import DEADLINE_SECONDS, ROW_BYTES, measure_ranks
from oper.measure.measurement import Measurement
from oper.topology.latency import Latency

_MOST_A_CORE = 8  # ranks: with more, the measurement is dominated by their waits for each other
START_SECONDS = 10.0  # for each rank to import torch, on cores that all ranks share


def measure_local(
    ranks: int,
    deadline_seconds: float = DEADLINE_SECONDS,
    amounts: Amounts | None = None,
    row_bytes: int = ROW_BYTES,
    on_devices: bool = False,
) -> Measurement:
    """Start `ranks` processes on this host and measure them, on the CPU or each on one of the first
    CUDA devices.

    Raise OperError if there are more ranks than this machine's cores can run at once, or, after all
    ranks have ended, if one fails or is not ready in time.
    """
    cores = len(os.sched_getaffinity(0))
    if not on_devices and ranks > _MOST_A_CORE * cores:
        raise OperError(
            f"measuring: expected at most {_MOST_A_CORE * cores:,} ranks, {_MOST_A_CORE} for each "
            f"of {plural(cores, 'core')}, got {ranks:,}; measure fewer, because more would wait "
            "for each other"
        )
    store = local_store(0, deadline_seconds, is_master=True)
    arguments = (ranks, store.port, deadline_seconds, amounts, row_bytes, on_devices)
    # A fresh interpreter each, because a fork would share torch's threads and locks.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=run_local_rank, args=(rank, *arguments), name=f"rank {rank}", daemon=True
        )
        for rank in range(ranks)
    ]
    # Each wait inside has its deadline; this one is for a rank that never stops computing.
    end = time.monotonic() + 4 * deadline_seconds + START_SECONDS * ranks
    try:
        _start(processes)
        while any(process.exitcode != 0 for process in processes):
            if failed := [(p.exitcode, rank) for rank, p in enumerate(processes) if p.exitcode]:
                # The least exit code is a signal's, if there is one: the cause of the others'
                # failures.
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
    content = json.loads(store.get("measurement"))
    return Measurement(**content | {"latency": Latency(**content["latency"])})


def measure_under_torchrun(
    row_bytes: int = ROW_BYTES,
    deadline_seconds: float = DEADLINE_SECONDS,
    on_devices: bool = False,
) -> Measurement | None:
    """Measure the ranks that torchrun started, on the CPU or each on the CUDA device with its
    number on its host; return the result on rank 0, None on the others."""
    limit = timedelta(seconds=deadline_seconds)
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=limit))
        # torchrun's number of the host among its hosts.
        node = int(os.environ["GROUP_RANK"])
        device = f"cuda:{os.environ['LOCAL_RANK']}" if on_devices else "cpu"
        measured = measure_ranks(
            store, rank, ranks, node, deadline_seconds, row_bytes=row_bytes, device=device
        )
    except RuntimeError as error:
        raise OperError(f"measuring: the ranks could not connect ({error})") from error
    return measured if rank == 0 else None


def _start(processes: Sequence[Any]) -> None:
    # Only this process handles Ctrl-C and ends the others, which inherit that it is ignored.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)


def _failure(store: Store, rank: int, exit_code: int) -> str:
    if store.check([f"failure {rank}"]):
        return str(store.get(f"failure {rank}").decode())
    reason = f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"
    return f"rank {rank} ended by {reason}; was there memory enough?"
