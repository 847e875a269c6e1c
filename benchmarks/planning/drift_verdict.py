"""False alarms of the verdict on a plan, and the least drift that it finds.

A log's samples are shuffled, so that nothing drifts but by chance. The first half makes a plan by
default settings, and the second is newer data, on which the product judges the plan:

    window   `oper drift` of the second half as a window, whose last third judges
    period   the monitor of two periods as small as it judges (4,096 accesses a rank)

An alarm is a verdict to replan. "longer" is the share by which a step of the plan is predicted to
take longer than with the best other plan.

Power: in the newer data random rows with a share of all accesses have exchanged their popularities.
Stated is how much longer a step takes, and how often the verdict is to replan.

    python -m benchmarks.planning.drift_verdict [--shuffles 10] [--logs tmall] [--json]
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from wherever
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from scipy.stats import beta

from benchmarks.common import LOGS, REAL_LOGS, parser, percent, publish
from benchmarks.planning.held_out import Case, cases
from oper.base.defaults import WORSE
from oper.base.errors import OperWarning
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.monitoring.judge_plan import judge_period, why_not_judged
from oper.plan.plan import Plan
from oper.planner.enough_accesses import ENOUGH_ACCESSES
from oper.planner.make_plan import make_plan
from oper.planner.replan.drift import drift
from oper.planner.replan.judgement import Judgement
from oper.profiling.profile import Profile, in_order, itself
from oper.profiling.windows import FIRST_SHARE
from oper.tables.table import Table

CAPACITIES = (None, "1.2")  # None: what the devices hold
SHARES = (0.02, 0.1, 0.5)  # of all accesses: rows that exchange popularities


@dataclass(frozen=True)
class Samples:
    """A log as one table: the ids of each sample, one after the other."""

    name: str
    rows: int
    ids: Any  # int64 [ids]
    first: Any  # int64 [samples + 1], at which each sample begins

    @property
    def number(self) -> int:
        return len(self.first) - 1

    def profile(self, chosen: Any, renamed: Any | None = None) -> Profile:
        """Return the counts of some samples, by number; with `renamed` [rows] of other rows."""
        lengths = np.diff(self.first)[chosen]
        sample = np.repeat(np.arange(len(chosen)), lengths)
        within = np.arange(len(sample)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        ids = self.ids[self.first[chosen][sample] + within]
        if renamed is not None:
            ids = renamed[ids]
        once = np.unique(sample * self.rows + ids) % self.rows
        accesses, samples_with_row = (
            np.bincount(each, minlength=self.rows).astype(np.uint32) for each in (ids, once)
        )
        table = Table("t", self.rows)
        return Profile((table,), len(chosen), accesses, samples_with_row, (True,))

    def enough(self, order: Any, accesses: int) -> Any:
        """Return the first samples of `order` that have so many accesses."""
        total = np.cumsum(np.diff(self.first)[order])
        return order[: int(np.searchsorted(total, accesses)) + 1]


def logs(chosen: str = "") -> Iterator[Samples]:
    """Yield the real logs of bags that are there, and a made-up one of Zipf's law."""
    for name, (path, _) in REAL_LOGS.items():
        if chosen in name and path.endswith(".npz") and (LOGS / path).exists():
            arrays = np.load(LOGS / path)
            first = np.concatenate([[0], np.cumsum(arrays["lengths"].astype(np.int64))])
            ids = arrays["item"].astype(np.int64)
            yield Samples(name, int(ids.max()) + 1, ids, first)
    if chosen in "zipf-1.2":
        random = np.random.default_rng(0)
        ids = random.zipf(1.2, 1_500_000)
        ids = ids[ids <= 100_000][:600_000].astype(np.int64) - 1
        lengths = random.multinomial(len(ids), np.full(100_000, 1e-5))
        first = np.concatenate([[0], np.cumsum(lengths)])
        yield Samples("zipf-1.2", 100_000, ids, first)


def exchanged(log: Samples, share: float, random: Any) -> Any:
    """Return new names of rows, [rows]: random ones with that share of all accesses take each
    other's."""
    accesses = np.bincount(log.ids, minlength=log.rows)
    order = random.permutation(log.rows)
    left, some = share * len(log.ids), []
    for row, count in zip(order.tolist(), accesses[order].tolist(), strict=True):
        if count <= left:
            some.append(row)
            left -= count
    renamed = np.arange(log.rows)
    renamed[some] = random.permutation(some)
    return renamed


def of_window(plan: Plan, newer: Any, count: Callable[[Any], Profile]) -> Judgement:
    """Judge a plan by samples as one window, as `oper drift` does."""
    first = count(newer[: int(FIRST_SHARE * len(newer))])
    return drift(plan, replace(count(newer), open_first_part=partial(itself, first))).judgement


def of_period(plan: Plan, newer: Any, count: Callable[[Any], Profile]) -> Judgement:
    """Judge a plan by two periods of a monitor."""
    before, window = (count(part) for part in newer)
    in_order([before, window])
    assert not why_not_judged(window, plan.ranks)
    return judge_period(plan, window, WORSE)


def judged(log: Samples, case: Case, share: float, random: Any) -> dict[str, Judgement]:
    """Shuffle a log once, and judge a plan of its first half by the second."""
    order = random.permutation(log.number)
    half = log.number // 2
    plan = make_plan(log.profile(order[:half]), case.topology, case.workload)
    renamed = exchanged(log, share, random) if share else None
    count = partial(log.profile, renamed=renamed)
    least = ENOUGH_ACCESSES * case.topology.ranks
    periods = [log.enough(part, least) for part in np.array_split(order[half:], 2)]
    return {
        "window": of_window(plan, order[half:], count),
        "period": of_period(plan, periods, count),
    }


def measure(shuffles: int, chosen: str) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on shuffles of each log in each case, and with drifts of each share."""
    for log in logs(chosen):
        for names, case in cases(CAPACITIES):
            for share in (0.0, *SHARES):
                random = np.random.default_rng(1)
                times = max(shuffles // 5, 1) if share else shuffles
                found = [judged(log, case, share, random) for _ in range(times)]
                for data in ("window", "period"):
                    yield {
                        "log": log.name,
                        **names,
                        "moved": share,
                        "data": data,
                        "longer": [each[data].worse for each in found],
                        "transfers_longer": [_transfers_longer(each[data]) for each in found],
                        "advice": [each[data].advice for each in found],
                    }


def _transfers_longer(judgement: Judgement) -> float:
    """Return the share by which transfers take longer than with the best other plan."""
    return judgement.keep.transfer_seconds / judgement.best.transfer_seconds - 1


def most_rate(alarms: int, shuffles: int) -> float:
    """Return the rate that the true one is below with 95 % confidence (Clopper and Pearson)."""
    return 1.0 if alarms == shuffles else float(beta.ppf(0.95, alarms + 1, shuffles - alarms))


def verdicts(found: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of verdicts to replan, and of all verdicts."""
    advice = [said for each in found for said in each["advice"]]
    return sum(said != "keep" for said in advice), len(advice)


def table(found: list[dict[str, Any]]) -> Any:
    """Return a table with a line for each case, all logs together."""
    made = new_table(
        "accesses moved",
        "data",
        "",
        "",
        "mode",
        "verdicts",
        "replan",
        "longer: 50%",
        "most",
        left=5,
    )
    keys = ("moved", "data", "topology", "capacity", "mode")
    for key in sorted({tuple(each[name] for name in keys) for each in found}):
        mine = [each for each in found if tuple(each[name] for name in keys) == key]
        longer = np.array([value for each in mine for value in each["longer"]])
        replans, all_verdicts = verdicts(mine)
        made.add_row(
            f"{key[0]:.0%}",
            *key[1:],
            f"{all_verdicts}",
            f"{replans}",
            f"{percent(float(np.median(longer)), 2)}%",
            f"{percent(float(longer.max()), 2)}%",
        )
    return made


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--shuffles",
        type=int,
        default=10,
        help="of each log and case; a fifth of so many for each share that moves",
    )
    made.add_argument("--logs", default="", help="only logs with this in their names")
    given = made.parse_args()
    warnings.simplefilter("ignore", OperWarning)
    found = []
    with progress("judging", None, "lines") as meter:
        for entry in measure(max(round(given.scale * given.shuffles), 1), given.logs):
            found.append(entry)
            meter.advance(1)
    alarms, shuffles = verdicts([each for each in found if not each["moved"]])
    publish(
        given,
        {"threshold": WORSE, "found": found},
        lambda: table(found),
        f"{alarms} alarms in {shuffles:,} verdicts on data without drift: a rate of at most "
        f"{percent(most_rate(alarms, shuffles), 2)}% with 95 % confidence",
    )


if __name__ == "__main__":
    main()
