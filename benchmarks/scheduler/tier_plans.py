"""Plans with a tier: iteration, certified gap, evenness of both memories, planning time.

Training, Criteo-Kaggle sizes and the real logs, for each preset: no tier, the tables that together
have most of the rows (of the largest ones, until half of all bytes are there), and all tables.
"largest" is the time of the slowest rank of either memory alone, the greater of the two; a plan of
both cannot take less. The gap is against the bound of both. Seconds are of CPU, profile in memory
to plan on disk.

    python -m benchmarks.scheduler.tier_plans [NAME …] [--scale 0.01] [--json]
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import (
    PRESETS,
    REAL_LOGS,
    SAMPLES_PER_RANK,
    parser,
    percent,
    publish,
    real_profiles,
    synthetic,
)
from oper.base import native
from oper.base.formatting import format_duration
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload, usual_fetch
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

REAL_SAMPLES_PER_RANK = 512


def tiers(profile: Profile) -> dict[str, Any]:
    """What `Settings.tier` is, by name."""
    by_bytes = sorted(profile.tables, key=lambda table: -table.rows * table.row_bytes)
    total, largest, held = sum(t.rows * t.row_bytes for t in by_bytes), [], 0
    for table in by_bytes[:-1]:
        if held >= total / 2:
            break
        held += table.rows * table.row_bytes
        largest.append(table.name)
    return {"none": (), **({"largest": largest} if largest else {}), "all": "all"}


def measure(name: str, profile: Profile, spec: str, tier: str, tables: Any) -> dict[str, Any]:
    """One line of the table."""
    topology = Topology.load(spec)
    samples = REAL_SAMPLES_PER_RANK if name in REAL_LOGS else SAMPLES_PER_RANK
    fetch = usual_fetch(topology.nodes)
    workload = Workload("training", fetch, topology.ranks * samples)
    with tempfile.TemporaryDirectory() as place:
        began = time.process_time()
        make_plan(profile, topology, workload, PlanSettings(tier=tables)).save(Path(place) / "plan")
        seconds = time.process_time() - began
        plan = Plan.load(Path(place) / "plan")
    parts = [] if plan.host is None else [memory for memory in plan.memories if memory.tables]
    certificates = [plan.certificate, *(memory.certificate for memory in parts)]
    gaps = [each and each.certified_gap for each in certificates]
    alone = [part.cost.objective_seconds for part in parts]
    return {
        "workload": name,
        "topology": spec,
        "tier": tier,
        "tables_in_tier": len(plan.tier),
        "objective_seconds": plan.cost.objective_seconds,
        "largest_part_seconds": max(alone, default=plan.cost.objective_seconds),
        "certified_gap": gaps[0],
        "part_gaps": gaps[1:],
        "cpu_seconds": seconds,
    }


def table(found: list[dict[str, Any]]) -> Any:
    """A line for each plan."""
    headers = ["topology", "tier", "tables", "iteration", "largest", "gap, %", "parts', %", "CPU s"]
    made = new_table("workload", *headers, left=3)
    for entry in found:
        made.add_row(
            entry["workload"],
            entry["topology"],
            entry["tier"],
            str(entry["tables_in_tier"]),
            format_duration(entry["objective_seconds"]),
            format_duration(entry["largest_part_seconds"]),
            percent(entry["certified_gap"]),
            percent(max(entry["part_gaps"], default=entry["certified_gap"])),
            f"{entry['cpu_seconds']:.2f}",
        )
    return made


def main() -> None:
    options = parser(__doc__)
    everything = ["criteo-kaggle", *REAL_LOGS]
    options.add_argument("names", nargs="*", default=everything, help="workloads and real logs")
    given = options.parse_args()
    native.ops()  # loading torch is no part of planning
    profiles = {name: p for name, p in real_profiles() if name in given.names}
    found = []
    for name in given.names:
        if name in REAL_LOGS and name not in profiles:
            continue
        profile = profiles[name] if name in profiles else synthetic(name, given.scale)
        for spec in PRESETS:
            for tier, tables in tiers(profile).items():
                found.append(measure(name, profile, spec, tier, tables))
    publish(given, {"runs": found}, lambda: table(found))


if __name__ == "__main__":
    main()
