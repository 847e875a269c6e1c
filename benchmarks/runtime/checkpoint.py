"""Saving and loading the tables of a model: rates, compared with the disk's, and memory.

8 tables of 1 million rows, dim 64, with row-wise Adagrad (2.08 GB), on ranks of one process each.
`disk` is what the same ranks reach together in the same run with as many bytes from memory and one
fsync: in writes of 16 MB left in the page cache; `uncached`, passed on to the disk every 64 MB and
dropped; and `direct`, past the page cache in writes of 2 MB, as `oper.save` does. `oper` is
`oper.save` and `oper.load`, which hash or compare what they write and read; `torch` is
torch.distributed.checkpoint with the model's state dicts. All sides write anew while the last files
are there, and remove these when the time is taken, but for `oper, over the last`, which is
`oper.save(…, overwrite=True)`. They take turns; medians are shown.
Memory is the most that a rank's anonymous memory grew by, looked at every 2 ms; tables lie in
shared memory and do not count.

    python -m benchmarks.runtime.checkpoint [--ranks 2] [--rounds 5] [--folder .] [--scale 1]
"""

import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper
from benchmarks.common import parser, publish
from benchmarks.runtime.ranks import run
from oper.base.formatting import format_bytes
from oper.cli.shared.console import new_table
from oper.tables.table import tables_of

TABLES, ROWS, DIM = 8, 1_000_000, 64
WRITE_BYTES, DIRECT_BYTES = 1 << 24, 1 << 21
SAMPLE_SECONDS = 0.002


def main() -> None:
    """Measure, and print a table."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured")
    asked = made.parse_args()
    rows = max(round(ROWS * asked.scale), 1)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        measured = run(measure, asked.ranks, rows, asked.rounds, Path(folder))
    size = TABLES * rows * (4 * DIM + 4)
    content: dict[str, Any] = {"ranks": asked.ranks, "bytes": size, "sides": {}}
    table = new_table("what", "side", "rate", "of the disk's best", "memory a rank", left=2)
    # The slowest rank's time in each round; the largest growth of any.
    sides = {
        key: (
            statistics.median(
                map(max, zip(*(of_rank[key][0] for of_rank in measured), strict=True))
            ),
            max(of_rank[key][1] for of_rank in measured),
        )
        for key in measured[0]
    }
    disk = min(seconds for (_, side), (seconds, _) in sides.items() if side.startswith("disk"))
    for (what, side), (seconds, grown) in sides.items():
        content["sides"][f"{what} {side}"] = {"seconds": seconds, "grown_bytes": grown}
        share = f"{disk / seconds:.0%}" if what == "save" else ""
        table.add_row(what, side, f"{format_bytes(size / seconds)}/s", share, format_bytes(grown))
    publish(asked, content, lambda: table)


def measure(
    rank: int, rows: int, rounds: int, folder: Path
) -> dict[tuple[str, str], tuple[list[float], int]]:
    """Seconds of every round and the most memory, of each thing that is done and each side."""
    model = make_model(rows)
    group = dist.group.WORLD
    share = TABLES * rows * (4 * DIM + 4) // dist.get_world_size()
    data, aligned = os.urandom(WRITE_BYTES), mmap.mmap(-1, DIRECT_BYTES)  # of whole pages
    aligned.write(data[:DIRECT_BYTES])

    def cached(passes_on: bool) -> None:
        with open(folder / f"disk-{rank}.new", "wb") as file:
            for number in range(-(-share // WRITE_BYTES)):
                file.write(data)
                if passes_on and number % 4 == 3:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.fsync(file.fileno())

    def direct() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        file = os.open(folder / f"disk-{rank}.new", flags)
        for number in range(-(-share // DIRECT_BYTES)):
            os.pwrite(file, aligned, number * DIRECT_BYTES)
        os.fsync(file)
        os.close(file)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}

    def load_state() -> None:
        held = state()
        load_by_torch(held, checkpoint_id=folder / "torch", process_group=group)
        model.load_state_dict(held["model"])
        model.fused_optimizer.load_state_dict(held["optimizer"])

    def save_state() -> None:
        save_by_torch(state(), checkpoint_id=folder / "torch.new", process_group=group)

    def replace_last() -> None:
        dist.barrier()
        for new in folder.glob("*.new") if rank == 0 else ():
            last = new.with_suffix("")
            if last.is_dir():
                shutil.rmtree(last)
            new.rename(last)
        dist.barrier()

    sides: dict[tuple[str, str], Callable[[], object]] = {
        ("save", "disk"): lambda: cached(False),
        ("save", "disk, uncached"): lambda: cached(True),
        ("save", "disk, direct"): direct,
        ("save", "oper"): lambda: oper.save(model, folder / "oper.new"),
        ("save", "oper, over the last"): lambda: oper.save(model, folder / "oper", overwrite=True),
        ("save", "torch"): save_state,
        ("load", "oper"): lambda: oper.load(model, folder / "oper"),
        ("load", "torch"): load_state,
    }
    found: dict[tuple[str, str], tuple[list[float], int]] = {key: ([], 0) for key in sides}
    for _ in range(rounds):
        for key, do in sides.items():
            os.sync()
            dist.barrier()
            with Growth() as growth:
                begin = time.perf_counter()
                do()
                seconds = time.perf_counter() - begin
            replace_last()
            times, most = found[key]
            found[key] = ([*times, seconds], max(most, growth.bytes))
    return found


class Growth:
    """How much the anonymous memory of this process grew at the most, inside."""

    def __enter__(self) -> "Growth":
        self._ended = threading.Event()
        self._begin = self._most = _anonymous_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self._most - self._begin

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._most = max(self._most, _anonymous_bytes())


def _anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        (kilobytes,) = (line.split()[1] for line in file if line.startswith("RssAnon:"))
    return 1024 * int(kilobytes)


def make_model(rows: int) -> Any:
    """The tables, sharded over all ranks, with initial values."""
    configs = [
        EmbeddingBagConfig(rows, DIM, name=f"t{n}", feature_names=[f"f{n}"]) for n in range(TABLES)
    ]
    bags = EmbeddingBagCollection(configs, device=torch.device("meta"))
    _apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    module = nn.Sequential(bags)
    return oper.shard(module, _plan(tables_of(module)))


def _plan(tables: Sequence[oper.Table]) -> oper.Plan:
    """A plan for Zipf-like counts, with some rows on every rank."""
    random = np.random.default_rng(0)
    counts = (random.zipf(1.05, sum(table.rows for table in tables)) % 4000).astype(np.uint32)
    bagged = (False,) * len(tables)
    profile = oper.Profile(tuple(tables), 1_000_000, counts, np.zeros(0, np.uint32), bagged)
    settings = oper.PlanSettings(extra_memory=0.01)
    workload = oper.Workload("training", batch_size=1024)
    return oper.make_plan(profile, f"cpu:{dist.get_world_size()}", workload, settings)


if __name__ == "__main__":
    main()
