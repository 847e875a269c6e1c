"""Translating row ids to addresses: ids per second of one core, by the compact and the plain map.

Each workload is generated in counts, planned for 8 ranks with each extra memory (a share of the
tables' bytes; 7 is a copy of every row on every rank) and written; then batches that the same
generator draws are translated, feature after feature as in a KeyedJaggedTensor, on one thread.
Every round has other ids; the median over rounds is shown. All addresses are compared between the
two maps.

    python benchmarks/planning/translate.py [WORKLOAD …] [--scale 1] [--rounds 20] [--json]
        [--mode training] [--extra-memory 0.05 …]
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

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
) -> dict:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mode", choices=("training", "inference"), default="training")
    parser.add_argument("--extra-memory", type=float, nargs="+", default=[0.05])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    threads = torch.get_num_threads()
    found = []
    for workload in given.workloads:
        synthesizer = Synthesizer(load_recipe(workload, scale=given.scale), SAMPLES)
        profile = synthesize_counts(synthesizer)
        for extra_memory in given.extra_memory:
            torch.set_num_threads(threads)
            line = measure(synthesizer, profile, given.mode, extra_memory, given.rounds)
            found.append({"workload": workload, **line})
    if given.json:
        print(json.dumps({"machine": platform.machine(), "workloads": found}, indent=1))
        return
    print(f"translation on one core, million ids/s, {platform.machine()}")
    print(
        f"{'workload':<22}{'rows':>14}{'memory':>8}{'compact':>10}{'B/row':>8}{'plain':>10}"
        f"{'B/row':>8}{'folder':>8}"
    )
    for line in found:
        print(
            f"{line['workload']:<22}{line['rows']:>14,}{line['extra_memory']:>8.0%}"
            f"{line['compact_ids_per_second'] / 1e6:>10.1f}{line['compact_bytes_per_row']:>8.3f}"
            f"{line['flat_ids_per_second'] / 1e6:>10.1f}{line['flat_bytes_per_row']:>8.3f}"
            f"{line['folder_bytes_per_row']:>8.3f}"
        )


if __name__ == "__main__":
    main()
