"""One rank of two hosts joined by a cable: the training step of OPER's, and what the cable carries.

The functions run in the ranks of `rate_limited_nodes.py`, in network namespaces of their own.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.runtime.step_inputs import Cell
from oper.tables.table import Table

WARM_UP = 2  # steps, in which buffers grow and connections are made
PROBES = 50
EXCHANGES = 20
EXCHANGED_BYTES = 1_500_000  # of each rank, what a step of 4,096 samples sends at once


def hop_seconds(rank: int, group: dist.ProcessGroup) -> float:
    """Seconds of an exchange of a few bytes between all ranks: a hop, with what starts it."""
    sent, received = torch.zeros(dist.get_world_size()), torch.zeros(dist.get_world_size())
    seconds = []
    for _ in range(PROBES):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(received, sent)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def bytes_a_second(rank: int, group: dist.ProcessGroup) -> float:
    """What this rank sends a second, while as much comes to it and both ranks of its host do so:
    the median of exchanges with the rank at the same place of the other host."""
    sizes = [0] * dist.get_world_size()
    sizes[(rank + len(sizes) // 2) % len(sizes)] = EXCHANGED_BYTES
    sent, received = (torch.zeros(EXCHANGED_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(EXCHANGES):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(received, sent, sizes, sizes)
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
    return EXCHANGED_BYTES / statistics.median(seconds)


def step_seconds(
    rank: int,
    group: dist.ProcessGroup,
    cell: Cell,
    tables: Sequence[Table],
    plan: Path,
    batches: Path,
    steps: int,
) -> dict[str, Any]:
    """Seconds of a step of this rank, the mean of each block of so many `steps`; CPU seconds of its
    process and bytes that its host's end of the cable sent, headers included, the means of all.
    `batches` has `ids_N_R` and `lengths_N_R` of batch N of rank R."""
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    model = sides.oper_model(sides.make_module(tables, cell.what), plan)
    step = sides.step_of(model, cell, sides.fixed_gradient(tables, cell))
    given = read_batches(rank, tables, batches)
    for batch in sides.fresh(given, 0, WARM_UP):
        step(batch)
    dist.barrier()
    before, busy, seconds = sent_bytes(), time.process_time(), []
    for first in range(0, len(given), steps):
        block = sides.fresh(given, first, steps)
        dist.barrier()
        start = time.perf_counter()
        for batch in block:
            step(batch)
        seconds.append((time.perf_counter() - start) / steps)
    busy = time.process_time() - busy
    dist.barrier()
    return {
        "seconds": seconds,
        "cpu_seconds": busy / len(given),
        "sent_bytes": (sent_bytes() - before) / len(given),
    }


def read_batches(rank: int, tables: Sequence[Table], path: Path) -> list[Any]:
    """A rank's batches."""
    from torchrec import KeyedJaggedTensor

    keys = [table.columns[0] for table in tables]
    with np.load(path) as arrays:
        count = sum(name.startswith("ids_") and name.endswith(f"_{rank}") for name in arrays)
        return [
            KeyedJaggedTensor(
                keys,
                torch.from_numpy(arrays[f"ids_{n}_{rank}"]),
                lengths=torch.from_numpy(arrays[f"lengths_{n}_{rank}"]),
            )
            for n in range(count)
        ]


def sent_bytes() -> int:
    """Bytes that this host's end of the cable has sent, of all packets with their headers."""
    said = subprocess.run(["tc", "-s", "-j", "qdisc"], capture_output=True, text=True, check=True)
    return sum(queue["bytes"] for queue in json.loads(said.stdout) if queue["kind"] == "tbf")
