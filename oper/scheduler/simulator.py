"""The simulator: a log replayed through the caches of M workers, for any ways to run them.

Every combination of dispatch, synchronisation and eviction sees the same global batches of M · m
samples in the same order, and has caches of its own. What they transmit is counted after the
warm-up (the papers drop ten iterations), and what they still hold at the end is flushed, which
counts apart.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.scheduler.cache import Caches, CacheTooSmallError, Synchronisation
from oper.scheduler.cache_capacity import least_bytes, rows_asked, rows_that_fit
from oper.scheduler.dispatch import BLIND, Dispatcher, Policy
from oper.scheduler.frequent_rows import FrequentRows, most_frequent
from oper.scheduler.infrequency import Infrequency
from oper.scheduler.trace import Batch, Trace
from oper.scheduler.transmissions import Totals
from oper.tables.table import offsets

# Of a batch's time: numbers of the rows; scores and assignment; what is pushed and pulled, and the
# caches' next state.
_PARTS = ("look_up", "assign", "replay")


@dataclass(frozen=True)
class Settings:
    """M workers of m samples each; caches of `cache_share` of all rows' bytes, each."""

    workers: int = 8
    samples_per_worker: int = 128
    cache_share: float = 0.1
    link_bandwidth: tuple[float, ...] = (1.25e10,)  # bytes/s to the tier; one, or one a worker
    warm_up: int = 10  # iterations
    seed: int = 0

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self.workers * self.samples_per_worker

    @property
    def seconds_per_byte(self) -> Floats:
        """Of each worker's link, [M]."""
        if len(self.link_bandwidth) not in (1, self.workers):
            raise OperError(
                f"--links: {len(self.link_bandwidth)} were given, and 1 or {self.workers} were "
                "needed, one for each worker"
            )
        if min(self.link_bandwidth) <= 0:
            raise OperError("--links: a worker without bandwidth cannot train; give more than 0")
        return 1 / np.resize(np.array(self.link_bandwidth), self.workers)


@dataclass
class Run:
    """One combination, and what it has transmitted."""

    policy: Policy
    sync: Synchronisation
    eviction: str
    caches: Caches | FrequentRows
    dispatcher: Dispatcher
    totals: Totals
    flushed: int = 0  # updates that were left at the end
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))

    def step(self, batch: Batch, number: int, counted: bool, seconds_per_byte: Floats) -> None:
        """Dispatch and train a batch, which is `counted` after the warm-up."""
        times = [time.perf_counter()]
        looked_up = self.caches.look_up(*batch)
        times.append(time.perf_counter())
        assignment = self.dispatcher.assign(self.caches, batch.addresses, looked_up, number)
        times.append(time.perf_counter())
        moved = self.caches.train(looked_up, assignment)
        times.append(time.perf_counter())
        if counted:
            self.totals.add(moved, seconds_per_byte)
            for part, spent in zip(_PARTS, np.diff(times), strict=True):
                self.seconds[part] += float(spent)

    def to_json(self) -> dict[str, Any]:
        """The figures of the run."""
        times = {part: 1e3 * spent / self.totals.iterations for part, spent in self.seconds.items()}
        return {
            "policy": str(self.policy),
            "sync": str(self.sync),
            "eviction": self.eviction,
            **self.totals.to_json(),
            "flushed": self.flushed,
            "dispatch_ms": sum(times.values()),
            "dispatch_parts_ms": times,
        }


def simulate(
    trace: Trace,
    settings: Settings,
    policies: Sequence[Policy],
    syncs: Sequence[Synchronisation],
    evictions: Sequence[str],
    report: Callable[[int], None] = lambda samples: None,
) -> dict[str, Any]:
    """The figures of every combination, by name; `report` is called with the samples replayed.

    OperError where the log ends within the warm-up, or a batch's rows do not fit a cache.
    """
    seconds_per_byte = settings.seconds_per_byte
    for policy, sync in product(policies, syncs):
        _check_optimizers(trace, sync)
        if sync.kind == "fae" and policy.kind not in BLIND:
            raise OperError(
                f"--policy {policy} --sync {sync}: FAE has nothing in caches by which a sample "
                f"could be dispatched; give it --policy {' or '.join(BLIND)}"
            )
    runs: dict[str, Run] = {}
    batches = 0
    for number, batch in enumerate(trace):
        if not runs:
            first = batch
            capacity = cache_rows(trace, batch, settings.cache_share)
            choices = product(policies, syncs, evictions)
            for policy, sync, eviction in choices:
                name = "+".join(map(str, (policy, sync, *[eviction][: len(evictions) > 1])))
                runs[name] = _run(trace, settings, capacity, policy, sync, eviction)
        for name, run in runs.items():
            try:
                run.step(batch, number, number >= settings.warm_up, seconds_per_byte)
            except CacheTooSmallError as error:
                least = 100 * least_share(trace, first, error.needed)
                raise OperError(
                    f"--cache {100 * settings.cache_share:.4g}%: iteration {number}, {name}: "
                    f"{error}; {1.001 * least:.4g}% would be enough for it, and fewer samples a "
                    "worker need less"
                ) from None
        batches += 1
        report(batch.samples)
    if batches < settings.warm_up + 1:
        raise OperError(
            f"the log has {batches} batches of {settings.batch_size:,} samples, and the warm-up "
            f"takes {settings.warm_up}; give a longer log, a smaller --batch or --warm-up"
        )
    for run in runs.values():
        moved = run.caches.flush()
        run.flushed = int(moved["update_push"].sum())
    return {
        "workers": settings.workers,
        "samples_per_worker": settings.samples_per_worker,
        "iterations": batches - settings.warm_up,
        "warm_up": settings.warm_up,
        "cache_rows": capacity.tolist(),
        "rows": int(trace.rows_of_width.sum()),
        "policies": {name: run.to_json() for name, run in runs.items()},
    }


def _check_optimizers(trace: Trace, sync: Synchronisation) -> None:
    """OperError where HET is to train with another optimizer than SGD."""
    wrong = [table for table in trace.tables if table.optimizer not in ("sgd", "none")]
    if sync.kind.startswith("het") and wrong:
        raise OperError(
            f"--sync {sync}: table {wrong[0].name!r} has {wrong[0].optimizer}, and HET pushes sums "
            "of gradients, which plain SGD alone applies as if each had come in its turn; give it "
            "--optimizer sgd, or --sync on-demand"
        )


def _run(
    trace: Trace,
    settings: Settings,
    capacity: Ints,
    policy: Policy,
    sync: Synchronisation,
    eviction: str,
) -> Run:
    row_bytes, gradient_bytes = zip(*trace.widths, strict=True)
    caches: Caches | FrequentRows
    if sync.kind == "fae":
        frequent = most_frequent(trace, sync.frequent)
        caches = FrequentRows(settings.workers, frequent, list(row_bytes), list(gradient_bytes))
    else:
        caches = Caches(
            settings.workers, capacity.tolist(), row_bytes, gradient_bytes, eviction, sync
        )
    infrequency = None
    if policy.tables is not None:
        infrequency = Infrequency(offsets(trace.tables), settings.workers)
    dispatcher = Dispatcher(policy, settings.seconds_per_byte, settings.seed, infrequency)
    return Run(policy, sync, eviction, caches, dispatcher, Totals(settings.workers))


def cache_rows(trace: Trace, batch: Batch, share: float) -> Ints:
    """Rows of each width that a worker caches: a share of all rows' bytes."""
    row_bytes = np.array([width.row_bytes for width in trace.widths])
    total = share * float(trace.rows_of_width @ row_bytes)
    return rows_that_fit(total, batch.addresses, trace.rows_of_width, row_bytes)


def least_share(trace: Trace, batch: Batch, needed: Ints) -> float:
    """The least share of all rows' bytes with which `cache_rows` gives room for `needed` rows of
    each width, where `batch` is the first one."""
    row_bytes = np.array([width.row_bytes for width in trace.widths])
    asked = rows_asked(batch.addresses, len(row_bytes))
    return least_bytes(needed, asked, row_bytes) / float(trace.rows_of_width @ row_bytes)
