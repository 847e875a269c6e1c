"""Following a log with what is known of it by then: rules of planning for the next window.

Each log is cut into equal windows. Before a window begins every RULE has a plan, made from the
windows before it alone, and the plan is priced under the window's own counts, as they are:

    stale      the first window's, for ever
    previous   from scratch, of the window before
    all        from scratch, of the sum of all windows before
    decayed    from scratch, of these, each weighing half as much as the next: a monitor's counts
    product    `oper.replan` of the rule's own plan for the decayed counts, whatever the judgement
    verdict    as the product, only if a monitor's judgement says that the moves pay
    oracle     from scratch, of the window itself, which nobody has by then

The rules were listed before anything was measured. Gains are the sums over windows, from the third
on, of what an iteration takes less than with the stale plan. "closes" is the rule's gain over the
oracle's, "bytes" what product moves over what a plan from scratch would have it move, "longer" how
much longer its iterations are than those of the rule decayed, at most.

    python -m benchmarks.planning.ten_windows [--windows 10] [--logs retailrocket] [--json]
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common import parser, percent, publish
from benchmarks.planning.replan import MODES, SYNTHETIC, logs
from oper.base.defaults import WORSE
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.cost.workload import Workload
from oper.monitoring.decayed_counts import halved
from oper.monitoring.judge_plan import judge_period, why_not_judged
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.planner.price_plan import costs_under, problems_of_memories, rank_seconds
from oper.planner.replan.replan import plan_again
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.profile import Profile, in_order, merge
from oper.topology.topology import Topology

TOPOLOGY = "dgx-a100"
CAUSAL = ("previous", "all", "decayed", "product", "verdict")
RULES = ("stale", *CAUSAL, "oracle")
EXTRA_MEMORY = 0.01


def seconds_under(plan: Plan, window: Profile) -> float:
    """T of the slowest rank for what was counted, in seconds."""
    problems = problems_of_memories(plan, window, as_counted=True)
    return float(rank_seconds(costs_under(plans_of_memories(plan), problems)).max())


class Rules:
    """The plan of each rule before a window, made from the windows before it."""

    def __init__(self, first: Profile, workload: Workload) -> None:
        self._topology, self._workload = Topology.load(TOPOLOGY), workload
        self._all = self._decayed = first
        self._before: Profile | None = None  # the decayed counts before the last window
        self.moves: list[Replanned] = []
        stale = self.from_scratch(first)
        self.plans = dict.fromkeys(RULES[:-1], stale)

    def from_scratch(self, counts: Profile) -> Plan:
        settings = PlanSettings(EXTRA_MEMORY)
        return assemble(make_placement(counts, self._topology, self._workload, settings))

    def learn(self, window: Profile, number: int) -> None:
        """Make the plans for the window after this one."""
        before = self._decayed
        self._all = merge([self._all, window])
        self._decayed = merge([window, halved(before, np.random.default_rng(number))])
        in_order([before, window])
        plans = self.plans
        plans["previous"] = self.from_scratch(window)
        plans["all"] = self.from_scratch(self._all)
        plans["decayed"] = self.from_scratch(self._decayed)
        made = plan_again(plans["product"], self._decayed)
        if made.moves.changed_rows:
            self.moves.append(made)
            plans["product"] = made.plan
        ranks = self._topology.ranks
        if not why_not_judged(window, ranks):
            found = judge_period(plans["verdict"], window, WORSE)
            if found.pays(found.replan):
                plans["verdict"] = plan_again(plans["verdict"], self._decayed).plan


def follow(windows: list[Profile], workload: Workload) -> dict[str, Any]:
    """What every rule's plans cost in the windows from the third on, in seconds."""
    rules = Rules(windows[0], workload)
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    for number, window in enumerate(windows[1:-1]):
        rules.learn(window, number)
        coming = windows[number + 2]
        for rule, plan in (rules.plans | {"oracle": rules.from_scratch(coming)}).items():
            seconds[rule].append(seconds_under(plan, coming))
    taken = {rule: np.array(each) for rule, each in seconds.items()}
    gains = {rule: float((taken["stale"] - each).sum()) for rule, each in taken.items()}
    best = max(gains[rule] for rule in CAUSAL)
    moved = sum(made.migration.link_bytes for made in rules.moves)
    fresh = sum(made.fresh_migration.link_bytes for made in rules.moves)
    return {
        "seconds": seconds,
        "stale_longer": float((taken["stale"] / taken["oracle"]).mean() - 1),
        "closes": {
            rule: gains[rule] / gains["oracle"] if gains["oracle"] > 0 else None for rule in CAUSAL
        },
        "of_best_causal": gains["product"] / best if best > 0 else None,
        "bytes_share": moved / fresh if fresh else None,
        "moved_bytes": moved,
        "longer": float((taken["product"] / taken["decayed"]).max() - 1),
    }


def measure(scale: float, number: int, chosen: str) -> Iterator[dict[str, Any]]:
    for name, windows, per_rank in logs(scale, number, chosen):
        for mode in MODES:
            ranks = Topology.load(TOPOLOGY).ranks
            workload = Workload(mode, "raw", per_rank * ranks)
            yield {"log": name, "mode": mode, **follow(windows, workload)}


def table(found: list[dict[str, Any]]) -> Any:
    made = new_table("%", "", "stale", *CAUSAL, "of best", "bytes", "longer", left=2)
    for entry in found:
        made.add_row(
            entry["log"],
            entry["mode"],
            percent(entry["stale_longer"], 2),
            *(percent(entry["closes"][rule], 1) for rule in CAUSAL),
            percent(entry["of_best_causal"], 1),
            percent(entry["bytes_share"], 2),
            percent(entry["longer"], 2),
        )
    return made


def main() -> None:
    options = parser(__doc__, scale=0.1)
    options.add_argument("--windows", type=int, default=10)
    options.add_argument("--logs", default="", help="those with this in their names alone")
    given = options.parse_args()
    found = []
    with progress("following", None, "logs") as meter:
        for entry in measure(given.scale, given.windows, given.logs):
            found.append(entry)
            meter.advance(1)
    publish(
        given,
        {"windows": given.windows, "scale": given.scale, "found": found},
        lambda: table(found),
        f"{given.windows} windows on {TOPOLOGY}, {EXTRA_MEMORY:.0%} extra memory, {SYNTHETIC} at "
        f"scale {given.scale:g}; stale: how much longer an iteration takes than the oracle's",
    )


if __name__ == "__main__":
    main()
