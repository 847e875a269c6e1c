"""Following a log: a plan is made for its first window, then replanned for each of the others.

Each log is cut into equal windows. Window by window, the plan that is there is priced under the new
counts, replanned with few moves, and compared with a plan made from scratch for that window: how
much of that plan's gain the moves get, and for how many of the bytes that it would take to get
there, both summed over the windows and in the worst window. "stale" is how much slower the first
plan is in the last window than a fresh one, had it been kept.

    python -m benchmarks.planning.replan [--windows 4] [--horizon 10000] [--extra-memory 0.01]
    [--logs retailrocket] [--unequal] [--balance link] [--json]

With `--unequal` the links are random instead (`benchmarks.common.unequal`). With `--balance link`
plans even out links, and gains are those of the slowest.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any, Literal

from benchmarks.common import (
    LOGS,
    REAL_LOGS,
    SAMPLES_PER_RANK,
    parser,
    percent,
    publish,
    unequal,
)
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.planner.replan.drift import drift
from oper.planner.replan.replan import replan
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile
from oper.synth.profile_writer import synthesize_counts
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.topology.topology import Topology

TOPOLOGIES = ("dgx-a100", "2x4-a100")
UNEQUAL = ((4, 0), (4, 2), (8, 1))  # ranks and seeds
MODES: tuple[Literal["training", "inference"], ...] = ("training", "inference")
SYNTHETIC = "criteo-kaggle"
DRIFTS = (0.05, 0.3)  # of the accesses have moved at the log's end
# Windows of the session logs are of 16 to 50 thousand sessions: a batch is to be well below that.
SESSIONS_PER_RANK = 512


def synthetic_windows(moved: float, scale: float, number: int) -> list[Profile]:
    """Profiles of equal parts of a log whose popularity drifts."""
    recipe = load_recipe(SYNTHETIC, scale=scale)
    synthesizer = Synthesizer(recipe, recipe.samples, drift=moved)
    ends = [window * recipe.samples // number for window in range(number + 1)]
    return [synthesize_counts(synthesizer, None, begin, end) for begin, end in pairwise(ends)]


def follow(
    windows: list[Profile],
    topology: Topology,
    workload: Workload,
    settings: PlanSettings,
    horizon: int,
) -> dict[str, Any]:
    """Replan for each window but the first, from the plan of the one before."""
    first = assemble(make_placement(windows[0], topology, workload, settings))
    plan, steps = first, []
    for window in windows[1:]:
        made = replan(plan, window, horizon)
        steps.append(made.to_json())
        plan = made.plan

    def gains(step: dict[str, Any], to: str) -> float:
        return float(step["aimed_seconds"]["old"] - step["aimed_seconds"][to])

    fresh = [gains(step, "fresh") for step in steps]
    gained = [gains(step, "new") for step in steps]
    moved = [step["moved_bytes"] for step in steps]
    fresh_moved = [step["fresh"]["moved_bytes"] for step in steps]
    return {
        "stale": drift(first, windows[-1], 0.05).worse,
        "gain_share": sum(gained) / sum(fresh) if sum(fresh) > 0 else None,
        "worst_gain_share": min((s["gain_share"] for s in steps if s["gain_share"]), default=None),
        "bytes_share": sum(moved) / sum(fresh_moved) if sum(fresh_moved) else None,
        "worst_bytes_share": max((s["bytes_share"] for s in steps if s["bytes_share"]), default=0),
        "rows_moved": sum(step["moved_rows"] for step in steps) / len(steps),
        "rows": windows[0].rows,
        "seconds": sum(step["seconds_spent"]["replan"] for step in steps) / len(steps),
        "fresh_seconds": sum(step["seconds_spent"]["fresh"] for step in steps) / len(steps),
        "steps": [
            {k: v for k, v in step.items() if k not in ("bytes_by_link", "fresh")} for step in steps
        ],
    }


def logs(scale: float, number: int, chosen: str) -> Iterator[tuple[str, list[Profile], int]]:
    """The windows of each log whose name has `chosen` in it, and its samples per rank and
    iteration."""
    for name, (path, reading) in REAL_LOGS.items():
        if chosen in name and path.startswith("sessions5") and (LOGS / path).exists():
            yield name, profile(LOGS / path, windows=number, **reading), SESSIONS_PER_RANK
    for moved in DRIFTS:
        if chosen in (name := f"{SYNTHETIC} {moved:.0%}"):
            yield name, synthetic_windows(moved, scale, number), SAMPLES_PER_RANK


def table(found: list[dict[str, Any]]) -> Any:
    """A line for each log, topology and mode; shares in percent of the fresh plans'."""
    made = new_table(
        "%", "", "", "stale", "gain", "worst", "bytes", "worst", "rows moved", "s", left=3
    )
    for entry in found:
        made.add_row(
            entry["log"],
            entry["topology"],
            entry["mode"],
            percent(entry["stale"], 2),
            percent(entry["gain_share"], 2),
            percent(entry["worst_gain_share"], 2),
            percent(entry["bytes_share"], 2),
            percent(entry["worst_bytes_share"], 2),
            f"{entry['rows_moved']:,.0f}",
            f"{entry['seconds']:.2f}",
        )
    return made


def main() -> None:
    options = parser(__doc__, scale=0.1)
    options.add_argument("--windows", type=int, default=4)
    options.add_argument("--horizon", type=int, default=10_000)
    options.add_argument("--extra-memory", type=float, default=0.01)
    options.add_argument("--logs", default="", help="those with this in their names alone")
    options.add_argument("--unequal", action="store_true")
    options.add_argument("--balance", choices=("time", "link"), default="time")
    given = options.parse_args()
    topologies = [Topology.load(name) for name in TOPOLOGIES]
    if given.unequal:
        topologies = [unequal(ranks, seed) for ranks, seed in UNEQUAL]
    found = []
    with progress("following", None, "plans") as meter:
        for name, windows, per_rank in logs(given.scale, given.windows, given.logs):
            for topology, mode in product(topologies, MODES):
                workload = Workload(mode, "raw", per_rank * topology.ranks)
                settings = PlanSettings(given.extra_memory, balance=given.balance)
                entry = follow(windows, topology, workload, settings, given.horizon)
                found.append({"log": name, "topology": topology.name, "mode": mode, **entry})
                meter.advance(given.windows)
    content = {
        "windows": given.windows,
        "horizon": given.horizon,
        "extra_memory": given.extra_memory,
        "balance": given.balance,
        "scale": given.scale,
        "found": found,
    }
    publish(
        given,
        content,
        lambda: table(found),
        f"{given.windows} windows, moves pay within {given.horizon:,} iterations, "
        f"{given.extra_memory:.1%} extra memory, {SYNTHETIC} at scale {given.scale:g}",
    )


if __name__ == "__main__":
    main()
