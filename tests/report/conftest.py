"""A plan with all that a report can show, its page, and a browser."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.commands import fine
from tests.support.report.browser import Browser, started

WORKLOAD = (
    "--topology",
    "2x2-a100",
    "--mode",
    "inference",
    "--fetch",
    "raw",
    "--batch-size",
    "4096",
)


class Reported(NamedTuple):
    """A folder with plan, profile, comparison, drift and counters, and the page of all."""

    folder: Path
    page: Path

    def file(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


@pytest.fixture(scope="session")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    folder = tmp_path_factory.mktemp("report")
    write_log(folder / "log.parquet")
    columns = ("--columns", "C*")
    windows = ("--by-column", "day", "--every", "2d", "--time-unit", "s")
    fine("profile", folder / "log.parquet", *columns, "-o", folder / "profile")
    fine("profile", folder / "log.parquet", *columns, *windows, "-o", folder / "days")
    fine("plan", folder / "profile", *WORKLOAD, "--extra-memory", "20%", "-o", folder / "plan")
    fine("plan", folder / "days@0", *WORKLOAD, "--extra-memory", "20%", "-o", folder / "day")
    for name, command in {
        "compare": (
            *("compare", folder / "profile", *WORKLOAD, "--extra-memory", "5,20%"),
            *("--methods", "oper,paper,memory_greedy,table_wise,row_wise"),
        ),
        "drift": ("drift", folder / "plan", folder / "days@2"),
        "windows": ("drift", folder / "plan", folder / "days", "--all-windows"),
    }.items():
        (folder / f"{name}.json").write_text(fine(*command, "--json"))
    (folder / "counters.json").write_text(json.dumps(counters(folder / "plan")))
    page = folder / "report.html"
    fine(
        *("report", folder / "plan", "--profile", folder / "profile", "-o", page),
        *("--compare", folder / "compare.json", "--counters", folder / "counters.json"),
        *("--drift", folder / "drift.json", "--drift", folder / "windows.json"),
    )
    return Reported(folder, page)


def write_log(path: Path, samples: int = 30_000) -> None:
    """Days of a log whose few hottest rows are worth a copy on every rank."""
    random = np.random.default_rng(0)
    columns = {
        "C1": (random.zipf(1.2, samples) - 1) % 3000,
        "C2": (random.zipf(1.6, samples) - 1) % 700,
        "day": np.arange(samples) // (samples // 6) * 86_400,
    }
    pq.write_table(pa.table(columns), path)


def counters(plan: Path) -> list[dict[str, object]]:
    """Return counts of four ranks in ten steps: the prediction, and a tenth more."""
    figures = json.loads((plan / "plan.json").read_text())["memories"][0]["cost"]
    moved = figures["communication_bytes"]

    def counted(rank: int, kind: str) -> list[int]:
        """Bytes from or to each rank; those of its own are not between ranks."""
        return [10**9 if r == rank else round(11 * moved[kind] / 12) for r in range(4)]

    return [
        {
            "model.tables": {
                "steps": 10,
                "lookups": 10,
                "fetched_bytes": counted(rank, "fetch"),
                "gradient_bytes": counted(rank, "gradient"),
                "allreduce_bytes": round(11 * moved["allreduce"] / 4),
            }
        }
        for rank in range(4)
    ]
