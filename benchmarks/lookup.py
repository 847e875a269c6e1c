"""The lookup alone: rows per second of one core, one table of dim 64, bags of one access.

Uniform ids, beside a probe in C++ that copies the same random rows and does nothing else; Zipf ids,
beside FBGEMM's table-batched embeddings on the CPU. The table is planned for two ranks and lies in
their shared memory; the lookup reads addresses that were translated before (translate.py has the
rate of that), and once more with the translation. All sides take turns, with other ids in every
round; medians are shown. The probe's distance is the best of several.

    python -m benchmarks.lookup [--scale 1] [--rounds 15] [--json]
"""

import argparse
import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table as Printed

from benchmarks.common import parser, publish
from oper import native
from oper.address_map import AddressMap, unpack
from oper.cost import Workload
from oper.layout import LOCAL
from oper.logs.synth import Synthesizer
from oper.logs.synth_counts import synthesize_counts
from oper.logs.workloads import Law, Recipe, load_recipe
from oper.plan import Plan, load_plan
from oper.planner.assemble import plan_and_save
from oper.planner.planner import Settings
from oper.runtime.features import FEATURE, as_words
from oper.runtime.segment import Segment
from oper.topology import Topology

ROWS, DIM, ZIPF = 5_200_000, 64, 1.05
LOOKUPS = 26 * 8192  # of one call: those of a batch of Criteo-Kaggle
AHEAD = (8, 16, 24, 32, 48)
ROUNDS = 15


def one_table(rows: int) -> Recipe:
    """A recipe of one table."""
    recipe = load_recipe("criteo-kaggle", dim=DIM)
    feature = recipe.features[0]
    table = replace(feature.table, rows=rows, dtype="fp32")
    return replace(recipe, features=(replace(feature, table=table, law=Law(rows, ZIPF)),))


class Memory:
    """The arenas of a plan's ranks, as rank 0 sees them."""

    def __init__(self, plan: Plan) -> None:
        bytes_of_rank = plan.layout.slots[0] * DIM * 4
        self._segments = [Segment.create(int(b), int(b), "rows") for b in bytes_of_rank]
        for segment, size in zip(self._segments, bytes_of_rank, strict=True):
            segment.tensor(0, (int(size) // 4,), torch.float32).uniform_(-1, 1)
        self.bases = torch.tensor([[*(s.pointer for s in self._segments), 0]])

    def pointers(self, addresses: torch.Tensor) -> torch.Tensor:
        """Where rows lie, int64 [N]."""
        field, slot = unpack(addresses)
        return self.bases[0][torch.where(field == LOCAL, 0, field)] + slot * DIM * 4


def build_probe(folder: Path) -> Callable[[torch.Tensor, int, torch.Tensor], None]:
    """probe(pointers, ahead, out), compiled for this machine."""
    source = Path(__file__).parent / "csrc" / "probe.cpp"
    library = folder / "probe.so"
    compiler = shutil.which("c++") or "g++"
    flags = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).probe

    def probe(pointers: torch.Tensor, ahead: int, out: torch.Tensor) -> None:
        function(
            ctypes.c_void_p(pointers.data_ptr()),
            ctypes.c_int64(len(pointers)),
            ctypes.c_int64(ahead),
            ctypes.c_void_p(out.data_ptr()),
        )

    return probe


def fbgemm(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its lookup of bags of one id in a table of its own."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        pooling_mode=PoolingMode.SUM,
        device=torch.device("cpu"),
    )
    tables.init_embedding_weights_uniform(-1, 1)
    offsets = torch.arange(LOOKUPS + 1)
    return lambda ids: tables(ids, offsets)


def timed(call: Callable[[], object]) -> float:
    """Seconds of this thread, which all sides work on alone; what is returned is given up."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


@torch.no_grad()
def measure(rows: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Rows per second of every side, medians, and what the bars are about."""
    recipe = one_table(rows)
    synthesizer = Synthesizer(recipe, LOOKUPS * rounds)
    profile = synthesize_counts(synthesizer)
    workload = Workload("inference", "raw", 2 * LOOKUPS)
    plan_and_save(profile, Topology.load("cpu:2"), workload, Settings(), folder / "plan")
    plan = load_plan(folder / "plan")
    address_map, memory = AddressMap.of(plan, 0), Memory(plan)
    probe, peer, ops = build_probe(folder), fbgemm(rows), native.ops()
    feature = np.zeros(1, dtype=FEATURE)
    feature["dim"], feature["row_bytes"], feature["out_stride"] = DIM, DIM * 4, DIM
    feature["bags"] = LOOKUPS
    words = as_words(feature)

    def lookup(addresses: torch.Tensor) -> torch.Tensor:
        shape = (LOOKUPS * DIM, torch.float32)
        return ops.pooled_rows(addresses, None, None, words, memory.bases, 0, *shape)

    drawn = torch.cat(
        [torch.from_numpy(next(iter(b.features.values())).values) for b in synthesizer.batches()]
    )
    zipf = list(drawn.split(LOOKUPS))[:rounds]
    generator = torch.Generator().manual_seed(0)
    uniform = [torch.randint(rows, (LOOKUPS,), generator=generator) for _ in range(rounds)]
    out = lookup(address_map.translate(0, zipf[0])).clone()
    copied = lookup(address_map.translate(0, zipf[0]))  # memory of the kind the lookup writes to
    probe(memory.pointers(address_map.translate(0, zipf[0])), 16, copied)
    assert torch.equal(copied, out)

    def translated(ids: torch.Tensor) -> object:
        return lookup(address_map.translate(0, ids))

    seconds: dict[tuple[str, str], list[float]] = {}
    torch.set_num_threads(1)
    for n in range(rounds):
        for law, ids in (("uniform", uniform[n]), ("zipf", zipf[n])):
            addresses = address_map.translate(0, ids)
            pointers = memory.pointers(addresses)
            sides: dict[str, Callable[[], object]] = {
                "oper": partial(lookup, addresses),
                "oper, ids": partial(translated, ids),
                "fbgemm": partial(peer, ids),
                **{f"probe {a}": partial(probe, pointers, a, copied) for a in AHEAD},
            }
            for side, call in sides.items():
                seconds.setdefault((law, side), []).append(timed(call))
    rates = {law: rates_of(seconds, law) for law in ("uniform", "zipf")}
    return {
        "rows": rows,
        "dim": DIM,
        "lookups": LOOKUPS,
        "rows_per_second": rates,
        "share_of_probe": {law: r["oper"] / r["probe"] for law, r in rates.items()},
        "times_fbgemm": {law: r["oper"] / r["fbgemm"] for law, r in rates.items()},
    }


def rates_of(seconds: dict[tuple[str, str], list[float]], law: str) -> dict[str, float]:
    """Rows per second of each side; of the probe, at its best distance."""
    rates = {side: LOOKUPS / statistics.median(s) for (of, side), s in seconds.items() if of == law}
    probes = [rates.pop(f"probe {a}") for a in AHEAD]
    return {**rates, "probe": max(probes)}


def table_of(found: dict[str, Any]) -> Printed:
    """Million rows a second."""
    table = Printed(title=f"lookup, one core: {found['rows']:,} rows of dim {DIM}, million rows/s")
    for column in ("ids", "probe", "oper", "of probe", "with translation", "fbgemm", "oper/fbgemm"):
        table.add_column(column, justify="left" if column == "ids" else "right")
    for law, rates in found["rows_per_second"].items():
        table.add_row(
            law,
            f"{rates['probe'] / 1e6:.1f}",
            f"{rates['oper'] / 1e6:.1f}",
            f"{found['share_of_probe'][law]:.0%}",
            f"{rates['oper, ids'] / 1e6:.1f}",
            f"{rates['fbgemm'] / 1e6:.1f}",
            f"{found['times_fbgemm'][law]:.1f}",
        )
    return table


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    given: argparse.Namespace = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(int(ROWS * given.scale), given.rounds, Path(folder))
    publish(given, found, lambda: table_of(found))


if __name__ == "__main__":
    main()
