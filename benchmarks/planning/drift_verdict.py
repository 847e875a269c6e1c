"""How often a monitor takes chance for drift, and how small a drift it finds.

A log's samples are shuffled, so that nothing drifts but by chance. The first half makes the plan;
two parts of the second are what a monitor counted before a period, and in it. A transfer time
counts as drift if, on the period's counts, it is longer by more than THRESHOLD than with a plan
made from the counts before. Monitors judge by steps, of which transfers are a part. Parts are as
small as a verdict may be of (4,096 accesses a rank), or a quarter of the log.
`self-judged` compares with plans made from the period's own counts.

Power: in both parts, after the shuffle, random rows with a share of all accesses have exchanged
their popularities. Stated is what that costs the plan (mean over the shuffles, against a plan from
scratch on later data), and how often the verdict is to replan.

    python -m benchmarks.planning.drift_verdict [--shuffles 100] [--json]
"""

import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from wherever
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.console import Group
from scipy.stats import beta

import oper
from benchmarks.common import LOGS, REAL_LOGS, parser, percent, publish
from oper.base.errors import OperWarning
from oper.cli.shared.console import new_table
from oper.monitoring.judge_plan import judge_period, why_not_judged
from oper.planner.enough_accesses import ENOUGH_ACCESSES
from oper.planner.replan.drift import drift
from oper.planner.replan.judgement import Judgement
from oper.profiling.profile import Profile, in_order
from oper.tables.table import Table

TOPOLOGY, RANKS, BATCH = "dgx-a100", 8, 4096  # the least parts have more samples than a batch
EXTRA_MEMORY = 0.05
THRESHOLD = 0.05
MODES = ("training", "inference")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of all accesses: rows that exchange popularities


@dataclass(frozen=True)
class Samples:
    """A log as one table: the ids of each sample, one after the other."""

    name: str
    rows: int
    ids: Any  # int64 [ids]
    first: Any  # int64 [samples + 1], where each sample's begin

    @property
    def number(self) -> int:
        return len(self.first) - 1

    def profile(self, chosen: Any, renamed: Any | None = None) -> Profile:
        """The counts of some samples, by number; rows are `renamed` [rows], where given."""
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
        """The first samples of `order` that have so many accesses."""
        total = np.cumsum(np.diff(self.first)[order])
        return order[: int(np.searchsorted(total, accesses)) + 1]


def logs() -> list[Samples]:
    """The real logs that are there, and a made-up one of Zipf's law."""
    found = []
    for name, (path, _) in REAL_LOGS.items():
        if path.endswith(".npz") and (LOGS / path).exists():
            arrays = np.load(LOGS / path)
            first = np.concatenate([[0], np.cumsum(arrays["lengths"].astype(np.int64))])
            ids = arrays["item"].astype(np.int64)
            found.append(Samples(name, int(ids.max()) + 1, ids, first))
    random = np.random.default_rng(0)
    ids = random.zipf(1.2, 1_500_000)
    ids = ids[ids <= 100_000][:600_000].astype(np.int64) - 1
    lengths = random.multinomial(len(ids), np.full(100_000, 1e-5))
    found.append(Samples("zipf-1.2", 100_000, ids, np.concatenate([[0], np.cumsum(lengths)])))
    return found


def exchanged(log: Samples, share: float, random: Any) -> Any:
    """New names of rows, [rows]: random ones with that share of all accesses take each other's."""
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


def judged(log: Samples, mode: Any, least: bool, share: float, random: Any) -> tuple[float, float]:
    """One shuffle: by what share the plan is worse than one from the counts before, and than one
    from the period's own."""
    order = random.permutation(log.number)
    half = log.number // 2
    plan = oper.make_plan(
        log.profile(order[:half]),
        TOPOLOGY,
        oper.Workload(mode, None, BATCH),
        oper.PlanSettings(extra_memory=EXTRA_MEMORY),
    )
    parts = np.array_split(order[half:], 2)
    if least:
        parts = [log.enough(part, ENOUGH_ACCESSES * RANKS) for part in parts]
    renamed = exchanged(log, share, random) if share else None
    before, window = (log.profile(part, renamed) for part in parts)
    in_order([before, window])
    assert not why_not_judged(window, RANKS)
    own = replace(window, open_preceding=None)
    return _longer(judge_period(plan, window, THRESHOLD)), _longer(drift(plan, own).judgement)


def _longer(judgement: Judgement) -> float:
    """Return the share by which transfers take longer than with a plan from scratch."""
    return judgement.keep.transfer_seconds / judgement.fresh.transfer_seconds - 1


def measure(shuffles: int) -> dict[str, Any]:
    """All shuffles of all logs, in both modes, and of drifts of each share."""
    chance, power = [], []
    for mode in MODES:
        for log in logs():
            for least in (True, False):
                random = np.random.default_rng(1)
                found = np.array([judged(log, mode, least, 0, random) for _ in range(shuffles)])
                chance.append(
                    {
                        "mode": mode,
                        "log": log.name,
                        "part": "least" if least else "quarter",
                        "worse": found[:, 0].tolist(),
                        "self_judged": found[:, 1].tolist(),
                    }
                )
            for share in SHARES:
                random = np.random.default_rng(2)
                found = np.array(
                    [judged(log, mode, False, share, random) for _ in range(max(shuffles // 10, 5))]
                )
                power.append(
                    {
                        "mode": mode,
                        "log": log.name,
                        "moved": share,
                        "costs": float(found[:, 0].mean()),
                        "found": float((found[:, 0] > THRESHOLD).mean()),
                    }
                )
    return {"threshold": THRESHOLD, "chance": chance, "power": power}


def most_rate(alarms: int, shuffles: int) -> float:
    """The rate that the true one is below with 95 % confidence (Clopper and Pearson)."""
    return 1.0 if alarms == shuffles else float(beta.ppf(0.95, alarms + 1, shuffles - alarms))


def tables(content: dict[str, Any]) -> Any:
    chance = new_table(
        "nothing drifts", "mode", "part", "shuffles", "worse: 50%", "99%", "most", "alarms",
        "self-judged", left=3,
    )  # fmt: skip
    for each in content["chance"]:
        worse, own = np.array(each["worse"]), np.array(each["self_judged"])
        chance.add_row(
            each["log"], each["mode"], each["part"], f"{len(worse):,}",
            *(f"{percent(v, 2)}%" for v in (*np.quantile(worse, [0.5, 0.99]), worse.max())),
            f"{int((worse > THRESHOLD).sum())}", f"{percent(float((own > THRESHOLD).mean()), 1)}%",
        )  # fmt: skip
    power = new_table("drift", "mode", "accesses moved", "costs the plan", "found", left=2)
    for each in content["power"]:
        power.add_row(
            each["log"], each["mode"],
            *(f"{percent(each[name], 1)}%" for name in ("moved", "costs", "found")),
        )  # fmt: skip
    return Group(chance, "", power)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shuffles", type=int, default=100, help="of each log, mode and part")
    given = made.parse_args()
    warnings.simplefilter("ignore", OperWarning)
    content = measure(max(round(given.scale * given.shuffles), 2))
    worse = np.concatenate([each["worse"] for each in content["chance"]])
    alarms = int((worse > THRESHOLD).sum())
    publish(
        given,
        content,
        lambda: tables(content),
        f"{alarms} alarms in {len(worse):,} shuffles: a rate of at most "
        f"{percent(most_rate(alarms, len(worse)), 2)}% with 95 % confidence",
    )


if __name__ == "__main__":
    main()
