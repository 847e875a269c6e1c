"""Comparisons from Python: several methods' placements, and how a notebook shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oper.base.display import Summarised, Summary
from oper.base.errors import OperError, check_type
from oper.base.formatting import format_bytes, format_duration, format_factor, format_gap
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.compare import METHODS, installed_methods
from oper.planner.compare import compare as compare_methods
from oper.profiling.profile import Profile
from oper.topology.topology import Topology


@dataclass(frozen=True, repr=False)
class Comparison(Summarised):
    """What each method comes to under the same limits: an entry of `runs` of `oper compare --json`,
    with its `settings` and, by name, its `methods`."""

    run: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.run['methods'])}>"

    def to_json(self) -> dict[str, Any]:
        """What `oper compare --json` prints."""
        return {"runs": [self.run]}

    def summary(self) -> Summary:
        """A line for each method."""
        settings, entries = self.run["settings"], self.run["methods"]
        ours = entries.get("oper", {}).get("objective_seconds")
        return Summary(
            f"{len(entries)} methods on {settings['ranks']} ranks ({settings['topology']}), "
            f"{settings['mode']}, batches of {settings['batch_size']:,} samples",
            headers=("method", "iteration", "times oper's", "fits", "fullest rank", "gap"),
            rows=[_row(name, entry, ours) for name, entry in entries.items()],
        )


def _row(name: str, entry: dict[str, Any], ours: float | None) -> tuple[str, ...]:
    seconds = entry["objective_seconds"]
    if seconds is None:
        return name, "-", "-", "-", "-", entry["notes"]["reason"]
    fits, gap = entry["certified_gap"] is not None, entry["certified_gap"]
    return (
        name,
        format_duration(seconds),
        format_factor(seconds / ours) if ours else "-",
        "yes" if fits else "no",
        format_bytes(max(entry["memory_bytes"])),
        format_gap(gap) if fits else "-",
    )


def compare(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    settings: PlanSettings | None = None,
    methods: Sequence[str] | None = None,
    limit_seconds: float = 60.0,
) -> Comparison:
    """Compare OPER with `methods`, or all that are installed, on one profile; nothing is written.

    TorchRec's planner and the exact solver, with building its programme, get `limit_seconds` each.
    Raises OperError for an
    unknown method, or where the capacities cannot hold the tables.
    """
    settings = PlanSettings() if settings is None else settings
    check_type("compare", "profile", profile, Profile)
    check_type("compare", "topology", topology, Topology)
    check_type("compare", "workload", workload, Workload)
    check_type("compare", "settings", settings, PlanSettings)
    chosen = installed_methods() if methods is None else methods
    if not chosen:
        raise OperError(f"methods: none was named; one or more of {', '.join(METHODS)} were needed")
    run = compare_methods(profile, topology, workload, settings, chosen, limit_seconds)
    return Comparison(run)
