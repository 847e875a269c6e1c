"""The planner's constants: what plans cost, and take to make, at half and at twice each.

One constant is changed at a time, and plans are made for each real log on homogeneous ranks and on
random unequal links, in both modes. T is the objective over that with the constant as it stands,
worst and mean over the cases; time the sum of planning times over the same. A constant is well
placed where halving costs objective or doubling costs time, and harmless where neither moves.

    python -m benchmarks.planning.constants [NAME …] [--json]
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from benchmarks.common import parser, publish, real_profiles, unequal
from oper.cli.shared.console import new_table
from oper.cli.shared.progress import progress
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_placement import make_placement
from oper.topology.topology import Topology

# Constants by the module that reads them.
CONSTANTS = {
    "oper.planner.class_placement.greedy": ("MOST_HALVINGS", "LEAST_GAIN"),
    "oper.planner.class_placement.homogeneous": ("HOT_SHARE",),
    "oper.planner.class_placement.homogeneous_replicas": ("_BISECTIONS", "_PASSES"),
    "oper.planner.lp.restricted_master": ("HOT_CLASSES", "BUCKET_RATIO", "ROUNDS"),
    "oper.planner.row_placement.swaps": ("ROUNDS", "_PAIRS_TRIED", "_BISECTIONS", "_SHARPNESS"),
    "oper.planner.row_placement.listing_thresholds": ("_RESERVE_ROWS",),
    "oper.planner.bounds.hot_rows_bound": ("HEAD_ROWS", "HEAD_SHARE", "TAIL_RATIO", "NODES"),
}
BATCH_SIZE, EXTRA_MEMORY = 65_536, 0.01


def changed(value: float, factor: float) -> float:
    """The constant times `factor`; of ratios, what is above 1."""
    if isinstance(value, int):
        return max(round(value * factor), 1)
    return 1 + (value - 1) * factor if 1 < value < 2 else value * factor


@contextmanager
def constant(module: str, name: str, factor: float) -> Iterator[None]:
    """The constant of a module times `factor`, for a while."""
    home = import_module(module)
    before = getattr(home, name)
    setattr(home, name, changed(before, factor))
    try:
        yield
    finally:
        setattr(home, name, before)


def measure(cases: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Objectives, gaps and seconds of planning of all cases."""
    objective, gap, seconds = [], [], []
    for profile, topology, mode in cases:
        started = time.perf_counter()
        planned = make_placement(
            profile,
            topology,
            Workload(mode, "distinct", BATCH_SIZE),
            PlanSettings(extra_memory=EXTRA_MEMORY),
        )
        seconds.append(time.perf_counter() - started)
        objective.append(planned.cost.objective_seconds)
        gap.append(planned.certificate.certified_gap or 0.0)
    return {"objective": np.array(objective), "gap": max(gap), "seconds": sum(seconds)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", help="real logs; all by default")
    given = options.parse_args()
    topologies = [Topology.load("2x4-a100"), unequal(4, 2), unequal(8, 0)]
    profiles = [p for name, p in real_profiles() if not given.names or name in given.names]
    cases = list(product(profiles, topologies, ("inference", "training")))
    measure(cases[:1])  # loads and warms
    todo = [(m, n) for m, names in CONSTANTS.items() for n in names]
    rows = []
    base = measure(cases)
    with progress("constants", len(todo), "constants") as meter:
        for module, name in todo:
            row: dict[str, Any] = {"module": module, "constant": name}
            row["value"] = getattr(import_module(module), name)
            for label, factor in (("half", 0.5), ("double", 2.0)):
                with constant(module, name, factor):
                    found = measure(cases)
                ratio = found["objective"] / base["objective"]
                row[label] = {
                    "worst": float(ratio.max()),
                    "mean": float(ratio.mean()),
                    "gap": found["gap"],
                    "time": found["seconds"] / base["seconds"],
                }
            rows.append(row)
            meter.advance(1)

    def table() -> Any:
        out = new_table(
            "constant", "value", "½: worst T", "mean T", "time", "×2: worst T", "mean T", "time"
        )
        for row in rows:
            cells = [
                f"{row[k][f]:.{d}f}"
                for k in ("half", "double")
                for f, d in (("worst", 6), ("mean", 6), ("time", 2))
            ]
            out.add_row(row["constant"], f"{row['value']:g}", *cells)
        return out

    publish(
        given,
        {"cases": len(cases), "gap": base["gap"], "seconds": base["seconds"], "constants": rows},
        table,
        f"{len(cases)} plans, {base['seconds']:.1f} s, largest gap {100 * base['gap']:.4f} %",
    )


if __name__ == "__main__":
    main()
