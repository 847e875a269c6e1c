"""Training steps predicted for data that no plan was made from: the real Criteo log, held out.

All planners know the first 64,000 of 80,000 samples. OPER's default plan, those of TorchRec's
planner, of table-wise and row-wise sharding and of the paper's procedure are priced for these
samples and for the last 16,000, as `oper compare` does; batches of 65,536. Gaps of OPER's plan are
above the lower bounds for either data.

    python -m benchmarks.planning.criteo_log [--json]
"""

from typing import Any

import numpy as np

from benchmarks.common import LOGS, REAL_LOGS, parser, publish
from oper.base.formatting import format_duration
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.planner.compare import compare
from oper.planner.make_plan import make_plan
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile

LOG, DIM, HELD_OUT, BATCH_SIZE = "criteo-80k", 64, 0.2, 65_536
TOPOLOGIES = ("dgx-h100", "2x8-h100")
METHODS = ("oper", "torchrec", "table_wise", "row_wise", "paper")


def counted() -> Profile:
    """Return the profile of the log's first part, which knows the counts of the rest."""
    path, reading = REAL_LOGS[LOG]
    return profile(LOGS / path, **reading, hold_out=HELD_OUT, dim=DIM)


def measure(
    log: Profile, topology: str, methods: tuple[str, ...] = METHODS
) -> list[dict[str, Any]]:
    """Return each method's steps in seconds and OPER's gaps, for the data of the plan and for the
    held-out data."""
    workload = Workload("training", batch_size=BATCH_SIZE)
    run = compare(log, topology, workload, methods=methods)
    judged = make_plan(log, topology, workload).held_out
    assert judged is not None
    return [
        {
            "topology": topology,
            "method": name,
            "step_seconds": found.step_seconds,
            "held_out_step_seconds": found.held_out_step_seconds,
            "certified_gap": found.certified_gap,
            "held_out_certified_gap": judged.certified_gap if name == "oper" else None,
        }
        for name, found in run.methods.items()
    ]


def reads_of_hottest(log: Profile, share: float = 0.01) -> float:
    """Return the share of all reads that go to this share of the rows, the hottest ones."""
    counts = np.sort(np.asarray(log.accesses, dtype=np.int64))[::-1]
    return float(counts[: round(share * len(counts))].sum() / counts.sum())


def published(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return each method's steps in µs and over OPER's, and OPER's gaps in percent."""
    figures: dict[str, float] = {}
    kinds = {"fitted": "step_seconds", "held-out": "held_out_step_seconds"}
    ours = {run["topology"]: run for run in runs if run["method"] == "oper"}
    for run in runs:
        for kind, key in kinds.items():
            if run[key] is not None:
                name = f"criteo-log-{run['topology']}-{kind}-{run['method']}"
                figures[name] = 1e6 * run[key]
                if run["method"] != "oper":
                    figures[f"{name}-times"] = run[key] / ours[run["topology"]][key]
    for topology, run in ours.items():
        for kind, key in (("fitted", "certified_gap"), ("held-out", "held_out_certified_gap")):
            figures[f"criteo-log-{topology}-{kind}-gap-percent"] = 100 * run[key]
    return figures


def table(runs: list[dict[str, Any]]) -> Any:
    """Return a table with a line for each method on each topology."""
    made = new_table("", "", "step", "held out", left=2)
    for run in runs:
        keys = ("step_seconds", "held_out_step_seconds")
        steps = ("-" if run[key] is None else format_duration(run[key]) for key in keys)
        made.add_row(run["topology"], run["method"], *steps)
    return made


def main() -> None:
    given = parser(__doc__).parse_args()
    log = counted()
    runs = [run for topology in TOPOLOGIES for run in measure(log, topology)]
    hottest = reads_of_hottest(log)
    content = {"reads_of_hottest": hottest, "runs": runs}
    figures = {"criteo-log-reads-of-hottest-percent": 100 * hottest} | published(runs)
    publish(given, content, lambda: table(runs), figures=figures)


if __name__ == "__main__":
    main()
