"""What the benchmarks share: options, profiles of the workloads and of the real logs, printing.

Every script prints one table of at most 100 columns, or one JSON object with `--json`, and
`--scale` makes it small enough to try.
"""

import argparse
import datetime
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oper.cli.shared.console import emit, new_console
from oper.cost.objective import Cost
from oper.files.json_file import write_json
from oper.logs import LogKeywords
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile
from oper.synth.profile_writer import synthesize_counts
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Order, Synthesizer
from oper.topology.latency import Latency
from oper.topology.topology import Topology

SAMPLES_PER_RANK = 16_384  # the paper's: its Table 2 at 0 % follows from it exactly
PRESETS = ("dgx-a100", "dgx-h100", "2x4-a100", "4x4-a100", "cpu:2", "cpu:8")
REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "benchmarks" / "data"
LOGS = REPOSITORY.parent / "shared" / "data"

_BAGS: LogKeywords = {"values": "item", "lengths": "lengths"}
REAL_LOGS: dict[str, tuple[str, LogKeywords]] = {
    "criteo-80k": ("criteo_kaggle_80k/data.parquet", {"columns": "C*", "missing": "-1"}),
    "diginetica": ("sessions5/diginetica.npz", _BAGS),
    "nowplaying": ("sessions5/nowplaying.npz", _BAGS),
    "retailrocket": ("sessions5/retailrocket.npz", _BAGS),
    "tmall": ("sessions5/tmall.npz", _BAGS),
    "yoochoose1_64": ("sessions5/yoochoose1_64.npz", _BAGS),
}


def parser(doc: str | None, scale: float = 1.0) -> argparse.ArgumentParser:
    """The options of every benchmark; `doc` is its docstring."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--scale", type=float, default=scale, help="factor on rows and samples")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--save", type=Path, help="write the JSON object to a file as well")
    return made


def synthetic(
    workload: str, scale: float, zipf: float | None = None, order: Order = "scattered"
) -> Profile:
    """The profile of a published workload, in memory."""
    recipe = load_recipe(workload, scale=scale, zipf=zipf)
    return synthesize_counts(Synthesizer(recipe, recipe.samples, order=order))


def real_profiles() -> Iterator[tuple[str, Profile]]:
    """The real logs that are there, each with its profile, in memory."""
    for name, (path, reading) in REAL_LOGS.items():
        if (LOGS / path).exists():
            yield name, profile(LOGS / path, **reading)


def unequal(ranks: int, seed: int) -> Topology:
    """Links and capacities that differ: each link up to four times the cost of the cheapest; on
    one node, on two, or each rank on its own, there with 0.8 to 1.6 of the mean capacity."""
    random = np.random.default_rng([ranks, seed])
    cost = random.uniform(1.0, 4.0, (ranks, ranks)) / 80e9
    np.fill_diagonal(cost, random.uniform(1.0, 2.0, ranks) / 1_244e9)
    node_of = (np.arange(ranks) * (1, 2, ranks)[seed] // ranks).tolist()
    capacity = None
    if seed == 2:
        factor = random.uniform(0.8, 1.6, ranks)
        capacity = tuple((1.25 * factor / factor.mean()).tolist())
    name = f"random-{ranks}"
    return Topology(name, tuple(node_of), cost, 72e9, Latency.of_hops(5e-6), capacity=capacity)


def pair_bytes(cost: Cost) -> float:
    """Forward fetch bytes over one ordered pair of ranks, on average."""
    ranks = len(cost.memory_bytes)
    return float(cost.link_bytes.sum()) / max(ranks * (ranks - 1), 1)


def machine() -> dict[str, Any]:
    """Where and when."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def publish(
    given: argparse.Namespace, content: dict[str, Any], table: Callable[[], Any], *notes: str
) -> None:
    """Print one table with where it was measured and `notes` below, or `content` as JSON."""
    where = machine()
    content = {"machine": where, **content}
    if given.save is not None:
        write_json(given.save, content)

    def text() -> None:
        out = new_console()
        out.print(table())
        for note in notes:
            out.print(note)
        out.print(
            f"{where['machine']}, {where['cores']} cores, {where['memory_bytes'] / 2**30:.0f} GiB, "
            f"load {where['load']:.1f}, {where['date']}"
        )

    emit(given.json, content, text)


def with_interval(shares: Sequence[float]) -> str:
    """A share in percent, with the ends of its interval."""
    return "{:.2f}% ({:.2f} to {:.2f})".format(*(100 * share for share in shares))


def percent(share: float | None, digits: int = 3) -> str:
    """A share in percent: few digits, and an exponent where it is tiny."""
    if share is None:
        return "-"
    value = 100 * share
    return f"{value:.0e}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"
