"""What dispatch takes, by the size of a batch and by policy, and what a cheaper one transmits.

Criteo-Kaggle's tables × 0.02, generated samples, dim 512, caches of 10 %, LRU, on demand, equal
links, the first third of the batches left out. `assign` is what the policy adds: scores and the
assignment; the look-up of the rows and the replay of the caches are the same for all. CPU times of
the one thread that does it, medians over the batches, as other work may run beside it. Sent is
against LAIA.

    python -m benchmarks.scheduler.dispatch_times [8x128 …] [--json]
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common import parser, percent, publish
from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.cli.shared.console import new_table
from oper.scheduler.cache import Caches
from oper.scheduler.dispatch import Dispatcher, Policy
from oper.scheduler.transmissions import PUSHES
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.tables.table import offsets

SIZES = {"8x128": 60, "8x1024": 24, "32x512": 12, "64x512": 12}  # workers x samples: batches
POLICIES = (
    "random",
    "laia",
    "esd:0",
    "esd:0.25",
    "esd",
    "grouped:1",
    "grouped:2",
    "grouped:4",
    "grouped",
    "grouped:1@0.5",
)
SCALE, ROW_BYTES, CACHE = 0.02, 2048, 0.1


def batches(scale: float, size: int, number: int) -> Iterator[Ints]:
    """The rows of generated samples, numbered through all tables, [size, tables]."""
    recipe = load_recipe("criteo-kaggle", scale=scale)
    first = offsets(tuple(feature.table for feature in recipe.features))
    drawn: list[Ints] = []
    for part in Synthesizer(recipe, size * number).batches():
        columns = [first[t] + rows.values for t, rows in enumerate(part.features.values())]
        drawn.append(np.stack(columns, axis=1))
        while sum(map(len, drawn)) >= size:
            whole = np.concatenate(drawn)
            yield np.ascontiguousarray(whole[:size])
            drawn = [whole[size:]]


def measured(rows: int, given: list[Ints], workers: int, policy: str) -> dict[str, float]:
    """Medians of the milliseconds of a batch, by part, and the transmissions of a batch."""
    caches = Caches(workers, [int(CACHE * rows)], [ROW_BYTES], [ROW_BYTES])
    dispatcher = Dispatcher(Policy.parse(policy), np.ones(workers))
    times, sent = [], 0
    counted = len(given) // 3
    for number, batch in enumerate(given):
        samples, tables = batch.shape
        ends = tables * np.arange(samples + 1)
        began = [time.thread_time()]
        looked_up = caches.look_up(batch.ravel(), ends)
        began.append(time.thread_time())
        assignment = dispatcher.assign(caches, batch.ravel(), looked_up, number)
        began.append(time.thread_time())
        moved = caches.train(looked_up, assignment)
        began.append(time.thread_time())
        if number >= counted:
            times.append(np.diff(began))
            sent += sum(int(moved[name].sum()) for name in ("miss_pull", *PUSHES))
    parts = (1e3 * np.median(times, axis=0)).tolist()
    found = dict(zip(("look_up_ms", "assign_ms", "replay_ms"), parts, strict=True))
    return {**found, "sent": sent / len(times)}


def table(found: dict[str, dict[str, dict[str, float]]]) -> Any:
    """A line for each size and policy."""
    made = new_table("batch", "", "look up", "assign", "replay", "sent", "of LAIA's", left=2)
    for size, runs in found.items():
        for policy, run in runs.items():
            times = [f"{run[name]:.2f}" for name in ("look_up_ms", "assign_ms", "replay_ms")]
            share = f"{percent(run['sent'] / runs['laia']['sent'], 1)}%"
            made.add_row(size, policy, *times, f"{run['sent']:,.0f}", share)
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("sizes", nargs="*", default=list(SIZES), help=", ".join(SIZES))
    given = options.parse_args()
    rows = int(
        offsets(tuple(f.table for f in load_recipe("criteo-kaggle", scale=SCALE).features))[-1]
    )
    found = {}
    for size in given.sizes:
        if size not in SIZES:
            raise OperError(f"{size[:40]!r}: one of {', '.join(SIZES)} was needed")
        workers, samples = map(int, size.split("x"))
        number = max(round(SIZES[size] * given.scale), 3)
        drawn = list(batches(SCALE, workers * samples, number))
        found[size] = {policy: measured(rows, drawn, workers, policy) for policy in POLICIES}
    publish(given, {"sizes": found}, lambda: table(found), "milliseconds a batch, one core")


if __name__ == "__main__":
    main()
