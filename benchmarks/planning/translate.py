"""Translating row ids to addresses: ids per second of one core, by the compact and the plain map.

Each workload is generated in counts, planned for 8 ranks with each extra memory (a share of the
tables' bytes; 7 is a copy of every row on every rank) and written; then batches that the same
generator draws are translated, feature after feature as in a KeyedJaggedTensor, on one thread.
Every round has other ids; the median over rounds is shown. All addresses are compared between the
two maps.

    python -m benchmarks.planning.translate [WORKLOAD …] [--scale 1] [--rounds 20] [--json]
        [--mode training] [--extra-memory 0.05 …]
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.common import parser, publish
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.address_map import AddressMap
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.profiling.profile import Profile
from oper.synth.profile_writer import synthesize_counts
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.topology.topology import Topology

Mode = Literal["training", "inference"]
WORKLOADS = ("criteo-kaggle", "avazu", "criteo-terabyte-40m")
SAMPLES = 45_840_617  # of the log whose counts are planned for: those of Criteo-Kaggle
BATCH_IDS = 400_000
RANKS = 8


def measure(
    synthesizer: Synthesizer, profile: Profile, mode: Mode, extra_memory: float, rounds: int
) -> dict[str, Any]:
    """A line of the table, without its workload."""
    with tempfile.TemporaryDirectory() as folder:
        make_plan(
            profile,
            Topology.load("dgx-a100"),
            Workload(mode, "raw", 16_384 * RANKS),
            PlanSettings(extra_memory=extra_memory),
        ).save(Path(folder) / "plan")
        in_folder = sum(file.stat().st_size for file in (Path(folder) / "plan").iterdir())
        compact = AddressMap.load(Path(folder) / "plan", 0)
        flat = compact.flattened()
        torch.set_num_threads(1)
        rates: dict[str, list[float]] = {"compact": [], "flat": []}
        for values, offsets, tables in batches(synthesizer, rounds):
            seconds, found = {}, {}
            for name, address_map in (("compact", compact), ("flat", flat)):
                start = time.thread_time()
                found[name] = address_map.translate_features(values, offsets, tables)
                seconds[name] = time.thread_time() - start
                rates[name].append(len(values) / seconds[name])
            assert torch.equal(found["compact"], found["flat"])
        rows = profile.rows
        return {
            "mode": mode,
            "extra_memory": extra_memory,
            "rows": rows,
            "folder_bytes_per_row": in_folder / rows,
            "compact_bytes_per_row": compact.nbytes / rows,
            "flat_bytes_per_row": (flat.nbytes - compact.nbytes) / rows,
            **{f"{name}_ids_per_second": statistics.median(r) for name, r in rates.items()},
        }


def batches(
    synthesizer: Synthesizer, rounds: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Values, offsets and tables of `rounds` batches of the workload, all features in each."""
    for batch in islice(synthesizer.batches(), rounds):
        features = list(batch.features.values())
        samples = max(1, BATCH_IDS * batch.samples // sum(len(f.values) for f in features))
        ids = [torch.from_numpy(f.slice(0, min(samples, batch.samples)).values) for f in features]
        ends = torch.tensor([0, *(len(i) for i in ids)]).cumsum(0)
        yield torch.cat(ids), ends, torch.arange(len(ids))


def table(found: list[dict[str, Any]]) -> Any:
    """Return a table with a line for each workload and extra memory."""
    head = ("workload", "rows", "memory", "compact", "B/row", "plain", "B/row", "folder")
    made = new_table(*head)
    for line in found:
        made.add_row(
            line["workload"],
            f"{line['rows']:,}",
            f"{line['extra_memory']:.0%}",
            f"{line['compact_ids_per_second'] / 1e6:.1f}",
            f"{line['compact_bytes_per_row']:.3f}",
            f"{line['flat_ids_per_second'] / 1e6:.1f}",
            f"{line['flat_bytes_per_row']:.3f}",
            f"{line['folder_bytes_per_row']:.3f}",
        )
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", default=WORKLOADS)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--mode", choices=("training", "inference"), default="training")
    options.add_argument("--extra-memory", type=float, nargs="+", default=[0.05])
    given = options.parse_args()
    threads = torch.get_num_threads()
    found = []
    for workload in given.workloads:
        synthesizer = Synthesizer(load_recipe(workload, scale=given.scale), SAMPLES)
        profile = synthesize_counts(synthesizer)
        for extra_memory in given.extra_memory:
            torch.set_num_threads(threads)
            line = measure(synthesizer, profile, given.mode, extra_memory, given.rounds)
            found.append({"workload": workload, **line})
    names = {f"translate-{e['workload']}-{e['extra_memory']:.0%}": e for e in found}
    publish(
        given,
        {"workloads": found},
        lambda: table(found),
        "million ids/s on one core",
        figures={f"{name}-bytes-per-row": e["compact_bytes_per_row"] for name, e in names.items()},
        timings={
            f"{name}-million-per-second": e["compact_ids_per_second"] / 1e6
            for name, e in names.items()
        },
    )


if __name__ == "__main__":
    main()
