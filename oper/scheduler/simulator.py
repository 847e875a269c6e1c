"""Simulator: a log replayed through the caches of M workers, by any combination of methods.

Every combination of dispatch, synchronisation and eviction has its own caches and sees the same
global batches in the same order; each of M workers trains an equal part. Transmissions are counted
after the warm-up (the papers drop ten iterations); updates that remain at the end are flushed, and
counted separately.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.defaults import DIM
from oper.base.errors import OperError, check_type
from oper.base.spoken import option, spoken
from oper.base.units import finite_number, whole_number
from oper.logs.batches.log_options import LogKeywords, LogOptions
from oper.logs.log import open_log
from oper.logs.row_reader import RowReader
from oper.logs.table_discovery import tell_left_out
from oper.profiling.table_options import TableOptions
from oper.scheduler.cache import (
    MOST_WORKERS,
    Caches,
    CacheTooSmallError,
    least_bytes,
    rows_asked,
    rows_that_fit,
)
from oper.scheduler.cache_settings import EVICTIONS, Synchronisation
from oper.scheduler.dispatch import BLIND, Dispatcher, Policy
from oper.scheduler.fae import FrequentRows, most_frequent
from oper.scheduler.laia_infrequency import Infrequency
from oper.scheduler.trace import Batch, Trace
from oper.scheduler.transmissions import PUSHES, TRANSMISSIONS, add_to
from oper.tables.table import offsets

# Herald's settings: values per row, and optimizer, of tables that only a log describes.
POLICIES, SYNCS, EVICT = "random,laia,esd,grouped", "bsp,on-demand", "lru"


def _links() -> str:
    return spoken("--links", "link_bandwidth")


def _cache(share: float) -> str:
    return spoken(f"--cache {100 * share:.4g}%", f"cache_share={share:.4g}")


@dataclass(frozen=True)
class SimulationSettings:
    """Workers of a simulation, their caches and their links; the defaults are Herald's.

    Args:
        workers: how many workers train, 1 to 64, each with a cache.
        batch_size: samples of an iteration over all workers, a multiple of `workers`, because each
            trains an equal part.
        cache_share: bytes of a worker's cache, as a share of the bytes of all rows.
        link_bandwidth: bytes per second between a worker and the tier: one number, or one for each
            worker.
        warm_up: iterations at the start that are not counted.
        seed: seed of random choices.

    Raises:
        OperError: a number is out of range.
    """

    workers: int = 8
    batch_size: int = 1024
    cache_share: float = 0.1
    link_bandwidth: float | Sequence[float] = 1.25e10
    warm_up: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("batch_size", 1), ("warm_up", 0), ("seed", 0)):
            flag = "--" + name.replace("_", "-")
            number = whole_number(getattr(self, name), option(flag))
            if number < least:
                raise OperError(f"{option(flag, number)}: expected {least} or more")
            object.__setattr__(self, name, number)
        if self.workers > MOST_WORKERS:
            raise OperError(f"{option('--workers', self.workers)}: expected 1 to {MOST_WORKERS}")
        if below := self.batch_size % self.workers:
            fitting = [self.batch_size - below, self.batch_size - below + self.workers]
            raise OperError(
                f"{option('--batch-size', self.batch_size)}: expected the samples of all "
                f"{self.workers} workers together, a multiple of {option('--workers')}, such as "
                f"{' or '.join(str(size) for size in fitting if size)}"
            )
        share = finite_number(self.cache_share, spoken("--cache", "cache_share"))
        if share <= 0:
            raise OperError(f"{_cache(share)}: expected a share above 0, such as 10%")
        bandwidths = np.ravel(np.asarray(self.link_bandwidth, dtype=object))
        links = tuple(finite_number(each, _links()) for each in bandwidths)
        object.__setattr__(self, "cache_share", share)
        if len(links) not in (1, self.workers):
            raise OperError(
                f"{_links()}: expected 1 or {self.workers}, one for each worker, got {len(links)}"
            )
        if min(links) <= 0:
            raise OperError(
                f"{_links()}: a worker without bandwidth cannot train; give more than 0"
            )

    @property
    def samples_per_worker(self) -> int:
        """Samples of a batch that one worker trains."""
        return self.batch_size // self.workers

    @property
    def seconds_per_byte(self) -> Floats:
        """Seconds per byte of each worker's link, [M]."""
        return 1 / np.resize(np.array(self.link_bandwidth, dtype=np.float64), self.workers)


@dataclass(frozen=True)
class Methods:
    """Methods of dispatch, synchronisation and eviction; all combinations are simulated."""

    policies: tuple[Policy, ...]
    syncs: tuple[Synchronisation, ...]
    evictions: tuple[str, ...]

    @classmethod
    def parse(
        cls, policy: str | Sequence[str], sync: str | Sequence[str], evict: str | Sequence[str]
    ) -> "Methods":
        """Parse the names of methods, each a text with commas or several texts. Raise OperError for
        an unknown name or an impossible combination."""
        evictions = tuple(_names(evict))
        if unknown := [name for name in evictions if name not in EVICTIONS]:
            raise OperError(
                f"{option('--evict', unknown[0][:40])}: expected {', '.join(EVICTIONS)}, separated "
                "by commas"
            )
        policies = tuple(map(Policy.parse, _names(policy)))
        syncs = tuple(map(Synchronisation.parse, _names(sync)))
        for dispatch, synchronisation in product(policies, syncs):
            if synchronisation.kind == "fae" and dispatch.kind not in BLIND:
                raise OperError(
                    f"{option('--policy', dispatch)} {option('--sync', synchronisation)}: FAE has "
                    "nothing in caches by which a sample could be dispatched; give it "
                    f"{option('--policy')} {' or '.join(BLIND)}"
                )
        return cls(policies, syncs, evictions)

    def check_optimizers(self, trace: Trace) -> None:
        """Raise OperError if HET would train with another optimizer than SGD."""
        wrong = [table for table in trace.tables if table.optimizer not in ("sgd", "none")]
        for sync in self.syncs if wrong else ():
            if sync.kind.startswith("het"):
                raise OperError(
                    f"{option('--sync', sync)}: table {wrong[0].name!r} has {wrong[0].optimizer}, "
                    "and HET pushes sums of gradients, which plain SGD alone applies as if each "
                    f"had come in its turn; give it {option('--optimizer', 'sgd')}, or "
                    f"{option('--sync', 'on-demand')}"
                )


def _names(given: str | Sequence[str]) -> Sequence[str]:
    return given.split(",") if isinstance(given, str) else list(map(str, given))


@dataclass(frozen=True)
class BatchTime:
    """Milliseconds of a batch in the simulator, by part.

    `look_up`: to number its rows. `assign`: scores and the assignment. `replay`: pushes and pulls,
    and the caches' next state.
    """

    look_up: float
    assign: float
    replay: float

    @property
    def total(self) -> float:
        """Milliseconds of all parts."""
        return self.look_up + self.assign + self.replay


@dataclass(frozen=True)
class SimulatedRun:
    """Transmissions of one combination after the warm-up, summed over workers and iterations.

    A transmission is one row, or its gradient, one way. `miss_pull`: rows that were absent or
    outdated, from the tier. `update_push`: updates to the tier, and `evict_push`: those of rows
    that left a cache. `peer_push`: rows straight to another worker. `reads`: distinct rows of a
    worker and iteration; `hits`: reads of present and latest rows; `wrong_reads`: reads that lack
    an update of an earlier iteration; `most_lag`: the most updates that a read lacks.
    `cost_seconds`: link time, of all workers together (ESD). `barrier_cost`: rows, the largest push
    and the largest pull of each iteration (Herald). `flushed`: updates that remained at the end.
    """

    policy: str
    sync: str
    eviction: str
    miss_pull: int
    update_push: int
    evict_push: int
    peer_push: int
    pull_bytes: int
    push_bytes: int
    reads: int
    hits: int
    wrong_reads: int
    most_lag: int
    cost_seconds: float
    barrier_cost: int
    flushed: int
    dispatch: BatchTime

    @property
    def total(self) -> int:
        """All transmissions."""
        return self.miss_pull + self.update_push + self.evict_push + self.peer_push

    @property
    def exact(self) -> bool:
        """True if its synchronisation guarantees that every read has all updates, for any log."""
        return Synchronisation.parse(self.sync).exact

    @property
    def wrong_read_ratio(self) -> float | None:
        """Share of the reads that lacked an update of an earlier iteration; None if nothing was
        read."""
        return self.wrong_reads / self.reads if self.reads else None

    @property
    def hit_ratio(self) -> float | None:
        """Share of the reads that were hits; None if nothing was read."""
        return self.hits / self.reads if self.reads else None

    def to_json(self) -> dict[str, Any]:
        """Return an entry of `policies` of `oper simulate --json`."""
        content = asdict(self)
        flushed, parts = content.pop("flushed"), content.pop("dispatch")
        seconds, barrier = content.pop("cost_seconds"), content.pop("barrier_cost")
        return {
            **content,
            "total": self.total,
            "cost_seconds": seconds,
            "barrier_cost": barrier,
            "hit_ratio": self.hit_ratio,
            "exact": self.exact,
            "wrong_read_ratio": self.wrong_read_ratio,
            "flushed": flushed,
            "dispatch_ms": self.dispatch.total,
            "dispatch_parts_ms": parts,
        }


@dataclass(frozen=True)
class Simulation:
    """Results of a log with several combinations of methods.

    `iterations` are those counted, after `settings.warm_up`. A worker caches `cache_rows` rows of
    each width of row, ascending, of the tables' `rows`. `runs` are by the names of their methods,
    in the order in which these were given: "laia+bsp", and "laia+bsp+lfu" with several evictions.
    """

    settings: SimulationSettings
    iterations: int
    cache_rows: tuple[int, ...]
    rows: int
    runs: dict[str, SimulatedRun]

    @property
    def least_sent(self) -> str | None:
        """Name of the exact run with the fewest transmissions, the first of several; None if no run
        is exact."""
        exact = [name for name, run in self.runs.items() if run.exact]
        return min(exact, key=lambda name: self.runs[name].total) if exact else None

    @property
    def least_sent_of_all(self) -> str:
        """Name of the run with the fewest transmissions, exact or not."""
        return min(self.runs, key=lambda name: self.runs[name].total)

    def to_json(self) -> dict[str, Any]:
        """Return the output of `oper simulate --json` without the names of the log's files."""
        return {
            "workers": self.settings.workers,
            "batch_size": self.settings.batch_size,
            "samples_per_worker": self.settings.samples_per_worker,
            "iterations": self.iterations,
            "warm_up": self.settings.warm_up,
            "cache_rows": list(self.cache_rows),
            "rows": self.rows,
            "least_sent": self.least_sent,
            "least_sent_of_all": self.least_sent_of_all,
            "policies": {name: run.to_json() for name, run in self.runs.items()},
        }


def simulate(
    log: Any,
    tables: Any = None,
    settings: SimulationSettings | None = None,
    *,
    policy: str | Sequence[str] = POLICIES,
    sync: str | Sequence[str] = SYNCS,
    evict: str | Sequence[str] = EVICT,
    dim: int = DIM,
    optimizer: str = "sgd",
    **reading: Unpack[LogKeywords],
) -> Simulation:
    """Replay a log through the caches of several workers, and count their transmissions.

        found = oper.simulate("clicks.parquet", settings=oper.SimulationSettings(workers=4))
        print(found.least_sent, found.runs["laia+bsp"].hit_ratio)

    Args:
        log: any iterable of TorchRec `KeyedJaggedTensor` batches, or paths of files, as for
            `oper.profile`. Samples are regrouped into batches of `settings.batch_size`.
        tables: as for `oper.profile`; None infers them from the log.
        settings: the workers, the samples of an iteration over all of them, caches and links;
            Herald's unless given.
        policy: assignment of samples to workers: random, in-order, laia, laia:TABLES, esd,
            esd:ALPHA, grouped or grouped:N, optionally with @SHARE; several as a sequence or with
            commas.
        sync: when updates reach the tier: bsp, on-demand, peer, fae:SHARE, het, het:S or
            het-exact:S; several as `policy`. fae is simulated only: no training has it.
        evict: eviction from a full cache: lru, lfu, light-lfu or emark; several as `policy`.
        dim, optimizer: of tables that do not state them, as for `oper.profile`.
        reading: how to read the log, as for `oper.profile`.

    Returns:
        The figures of every combination of the three.

    Raises:
        OperError: a name is unknown, the log ends within the warm-up, a batch's rows do not
            fit a cache, or the log is damaged.
    """
    settings = SimulationSettings() if settings is None else settings
    check_type("simulate", "settings", settings, SimulationSettings)
    methods = Methods.parse(policy, sync, evict)
    opened = open_log(log, LogOptions.of(reading))
    prepared = TableOptions(tables, dim, optimizer=optimizer).prepare(opened)
    tell_left_out(prepared.left_out)
    return replay(Trace(RowReader(opened, prepared), settings.batch_size), settings, methods)


@dataclass
class _Run:
    """One combination during its replay: its caches, and sums over the iterations so far."""

    sync: Synchronisation
    eviction: str
    caches: Caches | FrequentRows
    dispatcher: Dispatcher
    iterations: int = 0
    barrier_cost: int = 0
    cost_seconds: float = 0.0
    seconds: Floats = field(default_factory=lambda: np.zeros(3))  # of the parts of BatchTime

    def __post_init__(self) -> None:
        self.moved = np.zeros(self.caches.workers, dtype=TRANSMISSIONS)  # of each worker

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
            self._add(moved, seconds_per_byte)
            self.seconds += np.diff(times)

    def _add(self, moved: NDArray[np.void], seconds_per_byte: Floats) -> None:
        """Count an iteration's transmissions, TRANSMISSIONS [M]."""
        add_to(self.moved, moved)
        self.iterations += 1
        pushes = np.sum([moved[name] for name in PUSHES], axis=0)
        self.barrier_cost += int(pushes.max() + moved["miss_pull"].max())
        moved_bytes = moved["pull_bytes"] + moved["push_bytes"]
        self.cost_seconds += float(moved_bytes @ seconds_per_byte)

    def finish(self) -> SimulatedRun:
        """Flush the caches, and return the figures."""
        left = self.caches.flush()
        summed = {name: int(self.moved[name].sum()) for name in self.moved.dtype.names or ()}
        del summed["lag"]
        return SimulatedRun(
            str(self.dispatcher.policy),
            str(self.sync),
            self.eviction,
            **summed,
            most_lag=int(self.moved["lag"].max()),
            cost_seconds=self.cost_seconds,
            barrier_cost=self.barrier_cost,
            flushed=int(left["update_push"].sum()),
            dispatch=BatchTime(*(1e3 * self.seconds / self.iterations).tolist()),
        )


def replay(
    trace: Trace,
    settings: SimulationSettings,
    methods: Methods,
    report: Callable[[int], None] = lambda samples: None,
) -> Simulation:
    """Return the result of `simulate` for a log that is open; `trace` has batches of
    `settings.batch_size` samples. `report` is called with the samples replayed."""
    methods.check_optimizers(trace)
    seconds_per_byte = settings.seconds_per_byte
    runs: dict[str, _Run] = {}
    batches = 0
    for number, batch in enumerate(trace):
        if not runs:
            first = batch
            capacity = cache_rows(trace, batch, settings.cache_share)
            runs = _runs(trace, settings, methods, capacity)
        for name, run in runs.items():
            try:
                run.step(batch, number, number >= settings.warm_up, seconds_per_byte)
            except CacheTooSmallError as error:
                least = 100 * least_share(trace, first, error.needed)
                raise OperError(
                    f"{_cache(settings.cache_share)}: iteration {number}, "
                    f"{name}: {error}; {1.001 * least:.4g}% would be enough for it, and a smaller "
                    f"{option('--batch-size')} needs less"
                ) from None
        batches += 1
        report(batch.samples)
    if batches < settings.warm_up + 1:
        raise OperError(
            f"the log has {batches} batches of {settings.batch_size:,} samples, and the warm-up "
            f"takes {settings.warm_up}; give a longer log, a smaller {option('--batch-size')} or "
            f"{option('--warm-up')}"
        )
    return Simulation(
        settings,
        batches - settings.warm_up,
        tuple(capacity.tolist()),
        int(trace.rows_of_width.sum()),
        {name: run.finish() for name, run in runs.items()},
    )


def _runs(
    trace: Trace, settings: SimulationSettings, methods: Methods, capacity: Ints
) -> dict[str, _Run]:
    """Return every combination by its name, with empty caches of `capacity` rows of each width."""
    runs = {}
    for policy, sync, eviction in product(methods.policies, methods.syncs, methods.evictions):
        name = "+".join(map(str, (policy, sync, *[eviction][: len(methods.evictions) > 1])))
        runs[name] = _run(trace, settings, capacity, policy, sync, eviction)
    return runs


def _run(
    trace: Trace,
    settings: SimulationSettings,
    capacity: Ints,
    policy: Policy,
    sync: Synchronisation,
    eviction: str,
) -> _Run:
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
        infrequency = Infrequency.of_numbered_rows(offsets(trace.tables), settings.workers)
    dispatcher = Dispatcher(policy, settings.seconds_per_byte, settings.seed, infrequency)
    return _Run(sync, eviction, caches, dispatcher)


def cache_rows(trace: Trace, batch: Batch, share: float) -> Ints:
    """Return the rows of each width that a worker caches: a share of all rows' bytes."""
    row_bytes = np.array([width.row_bytes for width in trace.widths])
    total = share * float(trace.rows_of_width @ row_bytes)
    return rows_that_fit(total, batch.addresses, trace.rows_of_width, row_bytes)


def least_share(trace: Trace, batch: Batch, needed: Ints) -> float:
    """Return the least share of all rows' bytes with which `cache_rows` leaves room for `needed`
    rows of each width, if `batch` is the first batch."""
    row_bytes = np.array([width.row_bytes for width in trace.widths])
    asked = rows_asked(batch.addresses, len(row_bytes))
    return least_bytes(needed, asked, row_bytes) / float(trace.rows_of_width @ row_bytes)
