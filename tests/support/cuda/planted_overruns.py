"""Calls of emulated kernels with a tensor that is an element too short, each in a process of its
own: `python -m tests.support.cuda.planted_overruns LIBRARY` prints, as JSON, the signal or exit
status of each and what it said. To be run with AddressSanitizer, which must end all but the one
that is right."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oper.base import native
from oper.runtime.tables.optimizers import Optimizer
from tests.support.cuda.devices import Emulated
from tests.support.cuda.emulator import Emulator
from tests.support.cuda.gradient_batches import Arena, Batch

SLOTS = 101


def nothing_short(device: Emulated) -> None:
    _sum(device)
    _update(device)


def run_start_of_sums(device: Emulated) -> None:
    _sum(device, run_start=-1)


def sums(device: Emulated) -> None:
    _sum(device, values=-1)


def slots_of_updates(device: Emulated) -> None:
    _update(device, slots=-1)


def state_of_updates(device: Emulated) -> None:
    _update(device, state=-1)


CASES: dict[str, Callable[[Emulated], None]] = {
    case.__name__: case
    for case in (nothing_short, run_start_of_sums, sums, slots_of_updates, state_of_updates)
}


def _short(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A copy without the last `-by` elements, in memory of exactly its size."""
    return tensor[: len(tensor) + by].clone()


def _batch() -> Batch:
    return Batch(1, [90], [8], ranks=1, slots=10**9, arena=SLOTS)


def _sum(device: Emulated, run_start: int = 0, values: int = 0) -> None:
    batch = _batch()
    of_batch = (batch.offsets, batch.weights, batch.features, batch.segment_offset)
    out = torch.zeros(int(batch.groups[1, -1]) + values)
    start = _short(batch.run_start, run_start)
    device.start(
        "sum_gradients", batch.grad, batch.positions, start, batch.groups, 0, 0, 2, *of_batch, 8,
        1.0, out, False, 0,
    )  # fmt: skip


def _update(device: Emulated, slots: int = 0, state: int = 0) -> None:
    batch = _batch()
    of_batch = (batch.offsets, batch.weights, batch.features, batch.segment_offset)
    last = int(batch.slots[batch.before[1] :].max()) + 1
    arena = Arena(Optimizer("adagrad"), "fp32", torch.zeros(last, 8), (0, 0))
    whole = arena.state
    if state:  # the operator looks at shapes: memory that is shorter than the tensor says
        flat = torch.zeros(whole.numel() + 4 * state, dtype=torch.uint8)
        whole = _beyond(flat, whole.shape)
    device.start(
        "update_runs", batch.grad, batch.positions, batch.run_start, _short(batch.slots, slots),
        batch.groups[0].contiguous(), 1, *of_batch, 1.0, False, arena.rows, whole,
        *arena.arguments(1), torch.zeros(1, dtype=torch.int64), 0,
    )  # fmt: skip


def _beyond(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A tensor of more elements than its memory has."""
    seen = np.lib.stride_tricks.as_strided(flat.numpy(), shape, (shape[1], 1))
    return torch.from_numpy(seen)


def _outcome(case: Callable[[Emulated], None], device: Emulated) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            case(device)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return {"status": os.waitstatus_to_exitcode(status), "said": said.read()}


def main(library: Path) -> None:
    native.ops().load_device_library(str(library))
    device = Emulated(Emulator(library))
    print(json.dumps({name: _outcome(case, device) for name, case in CASES.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
