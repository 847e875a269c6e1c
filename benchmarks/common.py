"""Options, profiles of the workloads and of the real logs, printing and published figures.

Every script prints one table of at most 100 columns, or one JSON object with `--json`, and
`--scale` makes it small enough to try. `--figures FILE` keeps the figures that pages state
(figures.py) with the conditions of the run.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    made.add_argument("--figures", type=Path, help="keep published figures in this JSON file")
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


def commit() -> str:
    """Return the commit of the code that is measured, marked if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "oper", "benchmarks")
    return (git("rev-parse", "--short=8", "HEAD") or "unknown") + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    """Return the conditions of a measurement: command, commit, date, machine and load."""
    hidden = {"--json", "--save", "--figures"}
    given = [each for n, each in enumerate(sys.argv) if not {each, *sys.argv[n - 1 : n]} & hidden]
    return {
        "command": shlex.join([Path(given[0]).stem, *given[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 1),
    }


def publish(
    given: argparse.Namespace,
    content: dict[str, Any],
    table: Callable[[], Any],
    *notes: str,
    figures: Mapping[str, float] | None = None,
    timings: Mapping[str, float] | None = None,
) -> None:
    """Print one table with where it was measured and `notes` below, or `content` as JSON.

    figures: published numbers that any machine computes alike. timings: those that a run on a quiet
    machine measures. `--figures` keeps both.
    """
    where = machine()
    content = {"machine": where, **content}
    if given.save is not None:
        write_json(given.save, content)
    if given.figures is not None:
        keep(given.figures, figures or {}, timings or {}, where)

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


def keep(
    path: Path, figures: Mapping[str, float], timings: Mapping[str, float], where: dict[str, Any]
) -> None:
    """Write figures and timings with the conditions of their run into a file, in order of names;
    others that the file has stay."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for found, timed in ((figures, False), (timings, True)):
        kept |= {name: {"value": value, "timed": timed, **where} for name, value in found.items()}
    write_json(path, dict(sorted(kept.items())))


def with_interval(shares: Sequence[float]) -> str:
    """A share in percent, with the ends of its interval."""
    return "{:.2f}% ({:.2f} to {:.2f})".format(*(100 * share for share in shares))


def percent(share: float | None, digits: int = 3) -> str:
    """A share in percent: few digits, and an exponent where it is tiny."""
    if share is None:
        return "-"
    value = 100 * share
    return f"{value:.0e}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"
