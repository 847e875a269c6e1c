"""Following the advice on re-planning, window by window, against fixed habits.

A plan is made from the first window of a log. After each further window every habit has a plan for
the next one, which is priced by the counts of that next window:

    keep           the first plan, for ever
    from_scratch   a plan from scratch after each window
    full_copies    a copy of each row on each rank, in inference, if that fits
    replan         `oper replan` of the habit's own plan after each window, moving what pays
    advice         as `oper drift` advises after each window, for the habit's own plan

`oper drift` knows the windows up to the newest, which it splits in time, and not the next one.
Ratios are of the means over windows: advice over the best of keep, from_scratch and full_copies,
by predicted step and by transfer time.

    python -m benchmarks.planning.advice [--windows 6] [--logs tmall] [--json]
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, percent, publish
from benchmarks.planning.held_out import MODES, Case, Seconds, cases, logs, of_peer, of_plan
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.replan.drift import drift
from oper.planner.replan.judgement import Choice
from oper.planner.replan.replan import plan_again
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile
from oper.synth.log_writer import write_log
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer

CAPACITIES = (None, "1.2")  # None: what the devices hold
FIXED = ("keep", "from_scratch", "full_copies")
HABITS = (*FIXED, "replan", "advice")
BAR = 1.01
SYNTH = "synth-churn"


def all_logs(number: int, chosen: str, scale: float) -> Iterator[tuple[str, list[Profile]]]:
    """Yield the windows of each log, and of one that `oper synth --churn` generates."""
    yield from logs(number, chosen, scale)
    if chosen in SYNTH:
        recipe = load_recipe("criteo-kaggle", scale=0.001 * scale, churn=0.5)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.parquet"
            written = write_log(Synthesizer(recipe, round(120_000 * scale)), path)
            yield SYNTH, profile(path, str(written.tables), windows=number)


def advised(plan: Plan, window: Profile, case: Case) -> tuple[Plan, str]:
    """Return the plan that the advice leads to after a window, and the advice."""
    advice = drift(plan, window).advice
    if advice == Choice.KEEP:
        return plan, advice
    if advice == Choice.REPLAN:
        return plan_again(plan, window).plan, advice
    copies = case.topology.ranks - 1.0 if advice == Choice.FULL_COPIES else None
    asked = PlanSettings(extra_memory=copies)
    return make_plan(window, case.topology, case.workload, asked), advice


def follow(windows: list[Profile], case: Case) -> dict[str, Any]:
    """Return the mean times of each habit on the windows from the third on."""
    first = make_plan(windows[0], case.topology, case.workload)
    replanned = followed = first
    found: dict[str, list[Seconds]] = {habit: [] for habit in HABITS}
    advice: Counter[str] = Counter()
    for window, coming in pairwise(windows[1:]):
        replanned = plan_again(replanned, window).plan
        followed, said = advised(followed, window, case)
        advice[said] += 1
        fresh = make_plan(window, case.topology, case.workload)
        plans = {"keep": first, "from_scratch": fresh, "replan": replanned, "advice": followed}
        for habit, plan in plans.items():
            found[habit].append(of_plan(plan, coming))
        if not case.workload.training:
            copies = of_peer("full_copies", case, window, coming)
            found["full_copies"] += [] if copies is None else [copies]
    means = {
        habit: Seconds(*np.mean(each, axis=0).tolist()) for habit, each in found.items() if each
    }
    best = Seconds(*np.min([means[habit] for habit in FIXED if habit in means], axis=0).tolist())
    return {
        "seconds": {habit: mean._asdict() for habit, mean in means.items()},
        "advice": dict(advice),
        "transfer": means["advice"].transfer / best.transfer,
        "step": means["advice"].step / best.step,
    }


def measure(log: str, windows: list[Profile]) -> Iterator[dict[str, Any]]:
    """Follow a log in each case."""
    for names, case in cases(CAPACITIES):
        yield {"log": log, **names, **follow(windows, case)}


def table(found: list[dict[str, Any]]) -> Any:
    """Return a table of the ratios, a line for each case."""
    made = new_table("log", "", "", "mode", *HABITS, "step", "transfer", "advice", left=4)
    for each in found:
        seconds, best = each["seconds"], min(v["step"] for v in each["seconds"].values())
        steps = [f"{seconds[h]['step'] / best:.3f}" if h in seconds else "-" for h in HABITS]
        said = ", ".join(f"{number} {what}" for what, number in sorted(each["advice"].items()))
        ratios = (f"{each['step']:.3f}", f"{each['transfer']:.3f}")
        where = (each["log"], each["topology"], each["capacity"], each["mode"])
        made.add_row(*where, *steps, *ratios, said)
    return made


def summary(found: list[dict[str, Any]]) -> str:
    """Return mean, largest ratio and misses of each mode, by step and by transfer time."""
    lines = []
    for mode, what in product(MODES, ("step", "transfer")):
        ratios = [each[what] for each in found if each["mode"] == mode]
        if ratios:
            above = sum(ratio > BAR for ratio in ratios)
            lines.append(
                f"{mode}, {what}: mean {np.mean(ratios):.3f}, largest {max(ratios):.3f}, above "
                f"{BAR} in {above} of {len(ratios)}"
            )
    met = np.mean([each["step"] <= BAR and each["transfer"] <= BAR for each in found])
    return "\n".join([*lines, f"both within the bar in {percent(float(met), 0)}% of the cases"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--windows", type=int, default=6)
    options.add_argument("--logs", default="", help="only logs with this in their names")
    given = options.parse_args()
    found = []
    with progress("following", None, "cases") as meter:
        for name, windows in all_logs(given.windows, given.logs, given.scale):
            for entry in measure(name, windows):
                found.append(entry)
                meter.advance(1)
    publish(
        given,
        {"windows": given.windows, "found": found},
        lambda: table(found),
        f"{given.windows} windows; steps over the least of the line; step and transfer: advice "
        f"over the best of {', '.join(FIXED)}",
        summary(found),
    )


if __name__ == "__main__":
    main()
