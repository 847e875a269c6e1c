"""Process that `measure_local` starts: one rank, which ends with the process that started it.

This module imports torch only when the rank runs: during the seconds of an earlier import, nothing
would end the process.
"""

import json
import multiprocessing
import os
import socket
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from oper.base import process_signals
from oper.base.errors import OperError

if TYPE_CHECKING:
    from oper.measure.link_timer import Amounts

Store = Any  # a torch.distributed store, whose types torch does not export

_LOOPBACK = "127.0.0.1"


def run_local_rank(
    rank: int,
    ranks: int,
    port: int,
    deadline_seconds: float,
    amounts: "Amounts | None",
    row_bytes: int,
    on_devices: bool,
) -> None:
    """Measure as this rank, and write the result or the failure to the store."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it is started as a process of its own"
    process_signals.end_with(parent.pid)
    from oper.measure.measure_ranks import measure_ranks

    # gloo's own variable: without it gloo resolves the host's name, which containers may not know.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = local_store(port, deadline_seconds, is_master=False)
    try:
        device = f"cuda:{rank}" if on_devices else "cpu"
        measured = measure_ranks(
            store, rank, ranks, 0, deadline_seconds, amounts, row_bytes, device
        )
    except OperError as error:
        store.set(f"failure {rank}", str(error))
        sys.exit(1)
    if rank == 0:
        store.set("measurement", json.dumps(asdict(measured)))


def local_store(port: int, deadline_seconds: float, is_master: bool) -> Store:
    """Return the store of local ranks: the parent's, on a free port if `port` is 0.

    It listens on the loopback interface alone; by default torch listens on all interfaces.
    """
    import torch.distributed as dist

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
