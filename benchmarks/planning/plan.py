"""Planning time and memory, from the profile in memory to plan and address maps on disk.

The profile is opened and every counter read once before the clock starts; then `make_plan`
(classes, draft, rows, bound, layout), and `Plan.save`: the folder, with checksums and fsync. Every
run is a process of its own, so that its peak resident memory (the profile's pages among it) is its
own; medians over runs are shown. What has to be moved at the least: the counters are read twice
(classes, rows), 4 bytes a row each time, and a bit and a little a row is written.

Balance is min/max over ranks (links: ordered pairs), memory max/min; "greedy" is before refining,
as partitions were first placed. Profiles are drawn once into `--data` (3.5 GB for Terabyte sizes,
10 GB for syn-large).

    python -m benchmarks.planning.plan [CASE …] [--runs 5] [--data FOLDER] [--scale 0.01] [--json]
"""

import multiprocessing
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import DATA, SAMPLES_PER_RANK, parser, percent, publish
from oper.base import native
from oper.base.formatting import format_bytes
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import plan_and_placement
from oper.profiling.distinct_rows import Distinct
from oper.profiling.profile import Profile
from oper.synth.profile_writer import write_profile
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.topology.topology import Topology

PHASES = ("classes", "draft", "rows", "bound", "baselines", "layout", "writing")


@dataclass(frozen=True)
class Case:
    """What is planned; the target is of this project, on 2 cores."""

    workload: str
    topology: str
    mode: str
    runs: int
    target: str
    samples_per_rank: int = SAMPLES_PER_RANK
    extra_memory: float | None = 0.05
    many_classes: bool = False  # bags, and distinct rows measured: few rows are alike


CASES = {
    "kaggle-training": Case("criteo-kaggle", "dgx-a100", "training", 7, "1 s"),
    "kaggle-inference": Case("criteo-kaggle", "dgx-a100", "inference", 7, "1 s"),
    "kaggle-training-default": Case(
        "criteo-kaggle", "dgx-a100", "training", 7, "1 s", extra_memory=None
    ),
    "kaggle-inference-default": Case(
        "criteo-kaggle", "dgx-a100", "inference", 7, "1 s", extra_memory=None
    ),
    "128-ranks-training": Case("criteo-kaggle", "16x8-a100", "training", 1, "3 s", 1024, 0.01),
    "128-ranks-inference": Case("criteo-kaggle", "16x8-a100", "inference", 1, "3 s", 1024, 0.01),
    "1024-ranks-training": Case(
        "criteo-kaggle", "128x8-a100", "training", 1, "20 s, 4 GB", 1024, 0.01
    ),
    "1024-ranks-inference": Case(
        "criteo-kaggle", "128x8-a100", "inference", 1, "20 s, 4 GB", 1024, 0.01
    ),
    "many-classes": Case(
        "criteo-kaggle", "2x4-a100", "training", 5, "2 s", 1024, 0.05, many_classes=True
    ),
    "many-classes-inference": Case(
        "criteo-kaggle", "2x4-a100", "inference", 5, "2 s", 1024, 0.05, many_classes=True
    ),
    "terabyte": Case("criteo-terabyte", "dgx-a100", "training", 3, "20 s, 6 GB"),
    "syn-large": Case("syn-large", "4x4-a100", "training", 1, "90 s, 16 GB"),
}


def profile_folder(workload: str, scale: float, data: Path) -> Path:
    """The workload's profile on disk, drawn if it is not there."""
    folder = data / f"{workload}-{scale:g}"
    if not folder.exists():
        data.mkdir(parents=True, exist_ok=True)
        recipe = load_recipe(workload, scale=scale)
        write_profile(Synthesizer(recipe, recipe.samples), folder)
    return folder


def with_many_classes(profile: Profile) -> Profile:
    """The profile as if its samples had bags, and each table its own share of distinct rows."""
    rng = np.random.default_rng(0)
    tables = len(profile.tables)
    in_samples: Any = np.array(profile.accesses)
    often = in_samples > 20
    in_samples[often] -= rng.integers(0, 10, int(often.sum()), dtype=in_samples.dtype)
    ratios, rows = tuple(rng.uniform(0.8, 1, tables).tolist()), (1.0,) * tables
    return replace(
        profile,
        samples_with_row=in_samples,
        bagged=(True,) * tables,
        distinct=Distinct(1024, 8, ratios, ratios, 10, rows, rows),
    )


def plan_once(folder: Path, case: Case) -> dict[str, Any]:
    """One run, in a process of its own."""
    profile = Profile.load(folder)
    if case.many_classes:
        profile = with_many_classes(profile)
    int(profile.accesses.max())  # touches every page
    native.ops()
    topology = Topology.load(case.topology)
    workload = Workload(case.mode, "raw", topology.ranks * case.samples_per_rank)  # type: ignore[arg-type]
    settings = PlanSettings(extra_memory=case.extra_memory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.process_time()
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        plan, planned = plan_and_placement(profile, topology, workload, settings)
        since = time.perf_counter()
        plan.save(Path(place) / "plan")
        writing = time.perf_counter() - since
        cpu_seconds = time.process_time() - began
        written = sum(file.stat().st_size for file in (Path(place) / "plan").rglob("*"))
    cost, greedy = plan.cost, planned.record.greedy_dob
    return {
        "rows": profile.rows,
        "classes": len(planned.problem.classes),
        "seconds": plan.seconds | {"writing": writing, "total": plan.seconds["total"] + writing},
        "cpu_seconds": cpu_seconds,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "resident_bytes_before": before,
        "written_bytes": written,
        "dob": asdict(cost.dob),
        "greedy_dob": greedy and asdict(greedy),
        "memory_max_over_min": float(cost.memory_bytes.max() / cost.memory_bytes.min()),
        "certified_gap": planned.certificate.certified_gap,
        "step": planned.step,
        "feasible": cost.feasible,
    }


def measure(case: Case, runs: int, scale: float, data: Path) -> dict[str, Any]:
    """All runs of a case; the figures of the plan are the same in each."""
    folder = profile_folder(case.workload, scale, data)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        found = [pool.submit(plan_once, folder, case).result() for _ in range(runs)]
    seconds = {
        phase: statistics.median(run["seconds"].get(phase, 0.0) for run in found)
        for phase in (*PHASES, "total")
    }
    return {
        **found[0],
        "seconds": seconds,
        "totals": sorted(run["seconds"]["total"] for run in found),
        "resident_bytes": max(run["resident_bytes"] for run in found),
        "target": case.target,
    }


def figures(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return balance in percent and memory in GB of each case."""
    made: dict[str, float] = {}
    for case, entry in found.items():
        dob = entry["dob"]
        made |= {
            f"plan-{case}-lookups-percent": 100 * dob["lookups"],
            f"plan-{case}-links-percent": 100 * dob["link_cost"],
            f"plan-{case}-memory-max-over-min": entry["memory_max_over_min"],
            f"plan-{case}-resident-gb": entry["resident_bytes"] / 1e9,
        }
    return made


def timings(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each case, and the processor time of its first run."""
    made: dict[str, float] = {}
    for case, entry in found.items():
        made |= {
            f"plan-{case}-seconds": entry["seconds"]["total"],
            f"plan-{case}-cpu-seconds": entry["cpu_seconds"],
        }
    return made


def table(found: dict[str, dict[str, Any]]) -> Any:
    """A column for each case."""
    made = new_table("", *found)
    entries = list(found.values())
    lines = {
        "rows": [f"{e['rows']:,}" for e in entries],
        "classes": [f"{e['classes']:,}" for e in entries],
        "target": [e["target"] for e in entries],
        "seconds, median": [f"{e['seconds']['total']:.2f}" for e in entries],
        "fastest, slowest": [f"{e['totals'][0]:.2f}, {e['totals'][-1]:.2f}" for e in entries],
        **{f"  {p}": [f"{e['seconds'][p]:.2f}" for e in entries] for p in PHASES},
        "CPU seconds, first run": [f"{e['cpu_seconds']:.2f}" for e in entries],
        "peak resident": [format_bytes(e["resident_bytes"]) for e in entries],
        "  before planning": [format_bytes(e["resident_bytes_before"]) for e in entries],
        "written": [format_bytes(e["written_bytes"]) for e in entries],
        "lookups, %": [percent(e["dob"]["lookups"]) for e in entries],
        "  greedy": [percent((e["greedy_dob"] or {}).get("lookups")) for e in entries],
        "links, %": [percent(e["dob"]["link_cost"]) for e in entries],
        "memory max/min": [f"{e['memory_max_over_min']:.5f}" for e in entries],
        "  greedy ": [
            f"{1 / e['greedy_dob']['memory']:.5f}" if e["greedy_dob"] else "-" for e in entries
        ],
        "certified gap, %": [percent(e["certified_gap"], 5) for e in entries],
        "step": [e["step"] for e in entries],
    }
    for name, cells in lines.items():
        made.add_row(name, *cells)
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    options.add_argument("--runs", type=int, help="processes a case")
    options.add_argument("--data", type=Path, default=DATA, help="folder of drawn profiles")
    given = options.parse_args()
    found = {
        name: measure(CASES[name], given.runs or CASES[name].runs, given.scale, given.data)
        for name in given.cases
    }
    publish(
        given,
        {"cases": found},
        lambda: table(found),
        figures=figures(found),
        timings=timings(found),
    )


if __name__ == "__main__":
    main()
