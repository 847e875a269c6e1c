"""The page of a report: its size, the time to write it, and how soon a browser has drawn it.

The plans are of the demo's log (26 tables on 8 ranks) and of a workload with 856 tables on 1,024
ranks, both with the profile, so that every chart of a plan is there. A headless Chromium opens the
page from the disk, in a laptop's and a phone's width; the time runs from the start of the
navigation until the last chart is drawn, medians over `--runs`.

    python -m benchmarks.report.page [--runs 5] [--scale 0.02] [--json]
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import parser, publish, synthetic
from oper.base.formatting import format_bytes, format_duration
from oper.cli.shared.console import new_table
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.report.write_report import write_report
from oper.topology.topology import Topology
from tests.support.report.browser import LAPTOP, PHONE, started

CASES = {
    "criteo-kaggle": ("dgx-a100", 131_072, 0.5),  # topology, batch, factor on the scale
    "meta-2021": ("128x8-a100", 65_536, 1.0),
}


def measure(case: str, scale: float, runs: int, folder: Path) -> dict[str, Any]:
    """The figures of one plan's page."""
    name, batch, factor = CASES[case]
    topology = Topology.load(name)
    profile = synthetic(case, scale * factor)
    workload = Workload("training", batch_size=batch)
    make_plan(profile, topology, workload, PlanSettings()).save(folder / "plan")
    plan, page = Plan.load(folder / "plan"), folder / "plan.html"
    began = time.perf_counter()
    write_report(plan, page, profile)
    wrote = time.perf_counter() - began
    found = {
        "case": case,
        "ranks": plan.ranks,
        "tables": len(plan.tables),
        "bytes": page.stat().st_size,
        "write_seconds": wrote,
    }
    with started() as browser:
        for label, width in (("laptop", LAPTOP), ("phone", PHONE)):
            seconds = []
            for _ in range(runs):
                browser.open(page, width)
                drawn = browser.run("return Number(document.documentElement.dataset.drawn)")
                seconds.append(drawn / 1000)
            found[f"{label}_seconds"] = statistics.median(seconds)
            assert browser.complaints() == []
    return found


def main() -> None:
    options = parser(__doc__, scale=0.02)
    options.add_argument("--runs", type=int, default=5)
    given = options.parse_args()
    found = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(case, given.scale, given.runs, Path(folder)))
    publish(given, {"pages": found}, lambda: print_pages(found))


def print_pages(found: list[dict[str, Any]]) -> Any:
    table = new_table("plan", "ranks", "tables", "page", "written in", "laptop", "phone")
    for page in found:
        table.add_row(
            page["case"],
            f"{page['ranks']:,}",
            str(page["tables"]),
            format_bytes(page["bytes"]),
            *(format_duration(page[f"{name}_seconds"]) for name in ("write", "laptop", "phone")),
        )
    return table


if __name__ == "__main__":
    main()
