"""The lookup alone: rows per second of one core from one table.

`rows`: dim 64, bags of one access. Uniform ids beside a probe in C++ that copies the same random
rows and does nothing else; Zipf ids beside FBGEMM's table-batched embeddings on the CPU. The lookup
reads addresses that were translated before (translate.py has the rate of that), and once more with
the translation. The probe's distance is the best of several.

`bags`: bags of 1, 2, 8 and 32 accesses at three dims, beside FBGEMM.

The table is planned for two ranks and lies in their shared memory, allocated as the runtime's heap
is; FBGEMM's lies where its constructor puts it. FBGEMM's output is new in each call: above 32 MB
the allocator takes it from the system, and its pages fault in as they are written, unless it
happens to have a free block of that size. Therefore FBGEMM has two sides: `warm`, with such a
block, and `cold`, before which the allocator gives all that is free back to the system.

All sides take turns, each with ids that none of the last calls read, and after a call that is not
timed; all but `cold` are called until one faults no memory in. Medians are shown, and half the
distance of the quartiles in percent of them.

    python -m benchmarks.runtime.lookup [rows bags] [--scale 1] [--rounds 24] [--json]
"""

import argparse
import ctypes
import itertools
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group

from benchmarks.common import parser, publish
from oper.base import native
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.address_map import AddressMap, unpack
from oper.plan.layout import LOCAL
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.runtime.comm.shared_segment import Segment
from oper.runtime.tables.kernel_structs import FEATURE, as_words
from oper.synth.profile_writer import synthesize_counts
from oper.synth.recipes import Law, Recipe, load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.topology.topology import Topology

PARTS = ("rows", "bags")
ROWS, DIM, ZIPF = 5_200_000, 64, 1.05
LOOKUPS = 26 * 8192  # of one call: those of a batch of Criteo-Kaggle
AHEAD = (8, 16, 24, 32, 48)
DIMS, LENGTHS = (16, 64, 128), (1, 2, 8, 32)
LAWS = ("uniform", "zipf")
ROUNDS = 24  # at least twice as many as there are sides, or two would share their ids
COLD = "fbgemm, cold"
TRIES, FEW_FAULTS = 10, 100
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)


def one_table(rows: int, dim: int) -> Recipe:
    """A recipe of one table."""
    recipe = load_recipe("criteo-kaggle", dim=dim)
    feature = recipe.features[0]
    table = replace(feature.table, rows=rows, dtype="fp32")
    return replace(recipe, features=(replace(feature, table=table, law=Law(rows, ZIPF)),))


class Memory:
    """The arenas of a plan's ranks, as rank 0 sees them."""

    def __init__(self, plan: Plan, dim: int) -> None:
        self.row_bytes = dim * 4
        bytes_of_rank = plan.layout.slots[0] * self.row_bytes
        self._segments = [Segment.create(int(b), int(b), "rows") for b in bytes_of_rank]
        for segment, size in zip(self._segments, bytes_of_rank, strict=True):
            segment.use_huge_pages(0, segment.bytes)
            segment.tensor(0, (int(size) // 4,), torch.float32).uniform_(-1, 1)
        self.bases = torch.tensor([[*(s.pointer for s in self._segments), 0]])

    def pointers(self, addresses: torch.Tensor) -> torch.Tensor:
        """Where rows lie, int64 [N]."""
        field, slot = unpack(addresses)
        return self.bases[0][torch.where(field == LOCAL, 0, field)] + slot * self.row_bytes


@dataclass
class Ids:
    """The ids of a batch, their addresses, and where their rows lie."""

    ids: torch.Tensor
    addresses: torch.Tensor
    pointers: torch.Tensor


Side = Callable[[Ids], object]


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


def fbgemm(rows: int, dim: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Its lookup of ids and offsets in a table of its own."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        pooling_mode=PoolingMode.SUM,
        device=torch.device("cpu"),
    )
    tables.init_embedding_weights_uniform(-1, 1)
    return tables


class Allocator:
    """glibc's, told to keep what is freed, whatever its size, until it is given back."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.mallopt(M_MMAP_MAX, 0)
        self._libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

    def give_back(self) -> None:
        """The system takes every free page."""
        self._libc.malloc_trim(0)


def timed(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds and page faults of this thread, which all sides work on alone; what is returned is
    given up."""
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    start = time.thread_time()
    call()
    seconds = time.thread_time() - start
    return seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults


def settled(calls: Sequence[Callable[[], object]]) -> tuple[float, int]:
    """The first run that faults no memory in, or the last."""
    for call in calls:
        run = timed(call)
        if run[1] < FEW_FAULTS:
            break
    return run


class Workplace:
    """One table in both libraries, and batches of ids."""

    def __init__(self, rows: int, dim: int, rounds: int, folder: Path) -> None:
        self.rows, self.dim, self.rounds = rows, dim, rounds
        synthesizer = Synthesizer(one_table(rows, dim), LOOKUPS * rounds)
        profile = synthesize_counts(synthesizer)
        workload = Workload("inference", "raw", 2 * LOOKUPS)
        place = folder / f"plan-{dim}"
        make_plan(profile, Topology.load("cpu:2"), workload, PlanSettings(extra_memory=0.05)).save(
            place
        )
        plan = Plan.load(place)
        self.address_map, self.memory = AddressMap.of(plan, 0), Memory(plan, dim)
        self.fbgemm, self.ops, self.allocator = fbgemm(rows, dim), native.ops(), Allocator()
        drawn = torch.cat(
            [
                torch.from_numpy(next(iter(b.features.values())).values)
                for b in synthesizer.batches()
            ]
        )
        generator = torch.Generator().manual_seed(0)
        uniform = [torch.randint(rows, (LOOKUPS,), generator=generator) for _ in range(rounds)]
        self.batches = {
            "uniform": [self.prepared(ids) for ids in uniform],
            "zipf": [self.prepared(ids) for ids in list(drawn.split(LOOKUPS))[:rounds]],
        }

    def prepared(self, ids: torch.Tensor) -> Ids:
        """Translated for rank 0."""
        addresses = self.address_map.translate(0, ids)
        return Ids(ids, addresses, self.memory.pointers(addresses))

    def lookup(self, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Addresses to sums of bags of `length`."""
        feature = np.zeros(1, dtype=FEATURE)
        feature["dim"] = feature["out_stride"] = self.dim
        feature["row_bytes"], feature["bags"] = self.memory.row_bytes, LOOKUPS // length
        features, elements = as_words(feature), LOOKUPS // length * self.dim
        offsets = None if length == 1 else torch.arange(0, LOOKUPS + 1, length)

        def call(addresses: torch.Tensor) -> torch.Tensor:
            return self.ops.pooled_rows(
                addresses, offsets, None, features, self.memory.bases, 0, elements, torch.float32
            )

        return call

    def sides(self, length: int) -> dict[str, Side]:
        """OPER's and FBGEMM's lookups of bags of `length`."""
        lookup, offsets = self.lookup(length), torch.arange(0, LOOKUPS + 1, length)

        def peer(ids: Ids) -> torch.Tensor:
            return self.fbgemm(ids.ids, offsets)

        return {
            "oper": lambda ids: lookup(ids.addresses),
            "oper, ids": lambda ids: lookup(self.address_map.translate(0, ids.ids)),
            COLD: peer,
            "fbgemm, warm": peer,
        }

    def probes(self, folder: Path) -> dict[str, Side]:
        """The probe at every distance; it writes to memory such as the lookup writes to."""
        probe, lookup = build_probe(folder), self.lookup(1)
        first = self.batches["zipf"][0]
        copied = lookup(first.addresses)
        out = copied.clone()
        probe(first.pointers, AHEAD[0], copied)
        assert torch.equal(copied, out)

        def side(ahead: int) -> Side:
            return lambda ids: probe(ids.pointers, ahead, copied)

        return {f"probe {ahead}": side(ahead) for ahead in AHEAD}

    def measure(self, sides: dict[str, Side], law: str) -> dict[str, dict[str, float]]:
        """Of each side: million rows per second, their spread in percent, page faults a call."""
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}
        batches = self.batches[law]
        for n in range(self.rounds):
            # Each side reads other ids than those before it: their rows are still in the caches.
            for k, (name, side) in enumerate(sides.items()):
                calls = [
                    partial(side, batches[(n + 2 * k + i) % self.rounds]) for i in range(TRIES)
                ]
                timed(calls[0])
                if name == COLD:
                    self.allocator.give_back()
                    runs[name].append(timed(calls[1]))
                else:
                    runs[name].append(settled(calls[1:]))
        found = {}
        for name, of_side in runs.items():
            seconds, faults = np.array(of_side).T
            rates = 1e-6 * LOOKUPS / np.quantile(seconds, (0.75, 0.5, 0.25))
            found[name] = {
                "million_rows_per_second": rates[1],
                "spread_percent": 50 * (rates[2] - rates[0]) / rates[1],
                "page_faults": float(np.median(faults)),
            }
        return found


def rate(side: dict[str, float]) -> float:
    """Million rows per second."""
    return side["million_rows_per_second"]


@torch.no_grad()
def measure_rows(scale: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Bags of one at dim 64, beside the probe as well."""
    place = Workplace(int(ROWS * scale), DIM, rounds, folder)
    sides = {**place.sides(1), **place.probes(folder)}
    found = []
    for law in LAWS:
        of_law = place.measure(sides, law)
        probes = [of_law.pop(f"probe {a}") for a in AHEAD]
        of_law["probe"] = max(probes, key=rate)
        found.append({"ids": law, "rows": place.rows, "dim": DIM, "sides": of_law})
    return found


@torch.no_grad()
def measure_bags(scale: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Every dim, length and law."""
    found = []
    for dim in DIMS:
        place = Workplace(int(ROWS * scale), dim, rounds, folder)
        for length, law in itertools.product(LENGTHS, LAWS):
            of_law = place.measure(place.sides(length), law)
            cell = {"ids": law, "rows": place.rows, "dim": dim, "bags_of": length}
            found.append({**cell, "sides": of_law})
    return found


def shown(side: dict[str, float]) -> str:
    """The median and its spread."""
    return f"{rate(side):.1f} ±{side['spread_percent']:.0f}%"


def timings(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return OPER's rate over FBGEMM's for bags of one Zipf id, with its output allocated anew
    (cold) and reused (warm)."""
    of = {entry["ids"]: entry["sides"] for entry in found.get("rows", ())}
    names = {"cold": COLD, "warm": "fbgemm, warm"} if of else {}
    return {
        f"lookup-over-fbgemm-{short}": rate(of["zipf"]["oper"]) / rate(of["zipf"][name])
        for short, name in names.items()
    }


def rows_table(found: list[dict[str, Any]]) -> Any:
    """A line for each law."""
    head = ("ids", "probe", "oper", "of probe", "with ids", "fbgemm", "warm", "oper/fbgemm")
    title = f"one core, {found[0]['rows']:,} rows of dim {DIM}, million rows/s"
    made = new_table(*head, title=title)
    for entry in found:
        of = entry["sides"]
        of_probe = f"{rate(of['oper']) / rate(of['probe']):.0%}"
        made.add_row(
            entry["ids"], shown(of["probe"]), shown(of["oper"]), of_probe, *beside_fbgemm(of)
        )
    return made


def bags_table(found: list[dict[str, Any]]) -> Any:
    """A line for each cell."""
    head = ("ids", "dim", "bags of", "oper", "with ids", "fbgemm", "warm", "oper/fbgemm")
    made = new_table(*head, title=f"one core, {found[0]['rows']:,} rows, million rows/s")
    for entry in found:
        of, cell = entry["sides"], [str(entry[name]) for name in ("ids", "dim", "bags_of")]
        made.add_row(*cell, shown(of["oper"]), *beside_fbgemm(of))
    return made


def beside_fbgemm(of: dict[str, dict[str, float]]) -> list[str]:
    """OPER's rate from ids, FBGEMM's cold and warm, and OPER's over either."""
    names = (COLD, "fbgemm, warm")
    ratios = " ".join(f"{rate(of['oper']) / rate(of[name]):.2f}" for name in names)
    return [*(shown(of[name]) for name in ("oper, ids", *names)), ratios]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    given: argparse.Namespace = options.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        options.error(f"{min(unknown)}: there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    measured = {"rows": measure_rows, "bags": measure_bags}
    tables = {"rows": rows_table, "bags": bags_table}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if part in (given.parts or PARTS):
                found[part] = measured[part](given.scale, given.rounds, Path(folder))
    publish(
        given,
        found,
        lambda: Group(*(tables[part](of) for part, of in found.items())),
        timings=timings(found),
    )


if __name__ == "__main__":
    main()
