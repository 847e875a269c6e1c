"""DispatchingLoader: wraps a rank's loader, and assigns samples to ranks.

    loader = oper.DispatchingLoader(loader, plan, policy="locality")
    for batch in loader:  # what `loader` yields, with other samples
        …

The order of samples over iterations stays: the global batch of an iteration has the samples that
the ranks' loaders yielded for it, and each rank trains as many samples as it yielded.
"""

import hashlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from oper.base.arrays import Floats
from oper.base.errors import OperError, check_type
from oper.base.spoken import option
from oper.base.units import finite_number, positive_seconds, whole_number
from oper.plan.plan import Plan
from oper.runtime.comm.lost_ranks import rank_names, told
from oper.runtime.memory.runtime_plan import plan_digest
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.dispatch import BLIND, Policy
from oper.scheduler.loader.assigners import (
    Assigner,
    BlindAssigner,
    CachedRowsAssigner,
    LocalityAssigner,
    Pace,
)
from oper.scheduler.loader.global_batches import Counters, GlobalBatches, LoaderState
from oper.scheduler.loader.peers import Peers
from oper.scheduler.loader.plan_rows import PlanRows

LOCALITY = "locality"
_STOP_SECONDS = 1.0  # time for the ranks to leave a loop together
_EXIT_SECONDS = 5.0


class _Stage:
    """Thread that makes batches ahead of the training loop.

    It calls `make(stopped)`, at most `ahead` results before they are requested, until the function
    returns None or raises. `stopped` is None, or the reason to stop.
    """

    def __init__(self, make: Callable[[str | None], Any], ahead: int) -> None:
        self._make, self._made = make, queue.SimpleQueue[Any]()
        # Room is taken before a batch is begun, not when it is ready: ranks whose loops have
        # requested equally many batches are then at the same batch, and none waits for another in a
        # collective.
        self._room = threading.Semaphore(ahead)
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name="oper dispatch", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """Return the next result; None after the last one. Raise the error of `make`."""
        made = self._made.get()
        self._room.release()
        if isinstance(made, BaseException):
            raise made
        return made

    def stop(self, seconds: float, reason: str = "") -> bool:
        """Stop the thread, with an optional `reason` for the other ranks. Return whether the thread
        has ended within `seconds`."""
        if self._stopped is None:
            self._stopped = reason
        self._room.release()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                made = self._make(self._stopped)
                self._made.put(made)
                if made is None:
                    return
        except BaseException as error:
            self._made.put(error)


class DispatchingLoader:
    """Dispatcher of the samples of all ranks' loaders; every rank of the plan makes one.

    Args:
        loader: yields this rank's batches, of equal numbers of samples on all ranks.
        plan: for training, with the rows by which samples are dispatched.
        policy: `locality`, or one of `oper simulate`: random, in-order, laia, laia:K, esd,
            esd:ALPHA, grouped or grouped:N; @SHARE may follow.
        alpha: of `esd`, the share of samples that are assigned exactly; 1 unless given.
        ahead: batches that are ready before they are needed.
        group: process group of all the plan's ranks; torch.distributed's unless given.
        features: the features that read each table, by the table's name; the plan's unless given.
        cache: the cache settings given to `oper.shard`; its defaults unless given.
        links: bandwidth of each rank to the tier, in any unit; equal unless given.
        drop_last: leave out a last batch if some rank has fewer samples of it, or none.
        deterministic: do all of the policy's work for every batch, however long it takes. Otherwise
            the policy does less if dispatch takes longer than training.
        deadline_seconds: how long a rank waits for another before it fails.

    Raises:
        OperError: here and in the loop, on all ranks, with the fault and its place.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        plan: Plan,
        *,
        policy: str = "esd",
        alpha: float | None = None,
        ahead: int = 2,
        group: "dist.ProcessGroup | None" = None,
        features: Mapping[str, Sequence[str]] | None = None,
        cache: CacheSettings | None = None,
        links: Sequence[float] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        deterministic: bool = False,
        deadline_seconds: float = 60.0,
    ) -> None:
        check_type("DispatchingLoader", "plan", plan, Plan)
        self.loader = loader
        self._ahead = whole_number(ahead, "ahead")
        if self._ahead < 1:
            raise OperError(f"ahead: expected at least 1 batch, got {ahead}")
        if not plan.workload.training:
            raise OperError(
                "DispatchingLoader: expected a plan for training, got one for inference; make it "
                f"with {option('--mode', 'training')}"
            )
        _check_types(policy, cache, seed, features)
        chosen = _policy(policy, alpha)
        caches = cache or CacheSettings()
        costs = _seconds_per_byte(links, plan.ranks)
        deadline = positive_seconds(deadline_seconds, "deadline_seconds")
        peers = Peers(group, deadline)
        settings = (policy, alpha, ahead, features, caches, links, seed, drop_last)
        # The ranks' settings are compared before any rank checks its own, so that all raise the
        # same error.
        _check_equal(peers, plan, repr((deterministic, *settings)))
        if peers.ranks != plan.ranks:
            raise OperError(
                f"the plan is for {plan.ranks} ranks, and the process group has {peers.ranks}: "
                "make a plan for as many"
            )
        every = range(len(plan.tables))
        cached = getattr(plan, "tier", ()) or every  # the tables whose rows lie in a host tier
        assigner: Assigner
        if chosen is not None and chosen.kind in BLIND:
            assigner = BlindAssigner(chosen, plan.ranks, seed)
        elif chosen is None:
            assigner = LocalityAssigner(PlanRows(plan, every, features), plan.ranks)
        else:
            rows = PlanRows(plan, cached, features)
            assigner = CachedRowsAssigner(rows, cached, chosen, caches, costs, seed)
        pace = Pace(fixed=deterministic)
        self._state = LoaderState(peers, assigner, pace, drop_last)
        self._stages: list[_Stage] = []  # the running one
        self._release = weakref.finalize(self, _leave, peers, self._stages)

    @property
    def counters(self) -> Counters:
        """Counts of the samples that this rank has moved so far, and the seconds of the work."""
        return self._state.counters

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, and end the previous one: only one runs at a time."""
        peers = self._state.peers
        while self._stages:
            if not self._stages[-1].stop(peers.deadline_seconds):
                raise OperError(
                    "the epoch before has not ended on all ranks: leave the loop over a "
                    "DispatchingLoader after the same batch on all of them"
                )
            self._stages.pop()
        if peers.failure is not None:
            raise OperError(
                f"the DispatchingLoader cannot go on after its error ({peers.failure}): start the "
                "ranks again, or make a new one on all of them"
            ) from peers.failure
        # The iterator is made here, not in the thread: loaders with workers start them now.
        batches = GlobalBatches(iter(self.loader), self._state)
        self._stages.append(_Stage(batches.next, self._ahead))
        return self._epoch(self._stages[-1])

    def _epoch(self, stage: _Stage) -> Iterator[Any]:
        try:
            while (batch := stage.next()) is not None:
                start = time.perf_counter()
                yield batch
                self._state.training = time.perf_counter() - start
        except GeneratorExit:  # the loop was left
            stage.stop(_STOP_SECONDS)
            raise
        except BaseException as error:  # DataLoaders and Ctrl-C interrupt this thread too
            stage.stop(_STOP_SECONDS, told(self._state.peers.rank, error))
            raise


def _leave(peers: Peers, stages: list[_Stage]) -> None:
    """End running stages when the loader is deleted, or the process ends."""
    for stage in stages:
        if not stage.stop(_STOP_SECONDS):
            peers.abandon()
            stage.stop(_EXIT_SECONDS)


def _check_types(policy: Any, cache: Any, seed: Any, features: Any) -> None:
    """Raise OperError if an argument of DispatchingLoader is not of its type."""
    if not isinstance(policy, str):
        raise OperError(f"policy: expected a name, such as 'esd', got {type(policy).__name__}")
    if cache is not None and not isinstance(cache, CacheSettings):
        raise OperError(
            "cache: expected oper.CacheSettings, such as oper.CacheSettings('10%'), got "
            f"{type(cache).__name__}"
        )
    if whole_number(seed, "seed") < 0:
        raise OperError(f"seed: expected at least 0, got {seed}")
    for table, names in (features or {}).items():
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise OperError(f"features of table {table!r}: expected a list, got {names!r:.80}")


def _policy(text: str, alpha: float | None) -> Policy | None:
    """Return the policy of that name; None is locality."""
    if text == LOCALITY and alpha is None:
        return None
    if alpha is not None:
        if text != "esd":
            raise OperError(f"alpha {alpha}: is of policy 'esd', and policy is {text[:40]!r}")
        text = f"esd:{finite_number(alpha, 'alpha'):.17g}"
    try:
        return Policy.parse(text)
    except OperError as error:
        raise OperError(f"{error}; or {LOCALITY}") from None


def _seconds_per_byte(links: Sequence[float] | None, ranks: int) -> Floats:
    bandwidth = [finite_number(link, "links") for link in links or [1.0] * ranks]
    if len(bandwidth) != ranks or min(bandwidth) <= 0:
        raise OperError(
            f"links: expected a bandwidth above 0 for each of {ranks} ranks, got "
            f"{list(links or ())}"
        )
    return 1 / np.array(bandwidth)


def _check_equal(peers: Peers, plan: Plan, settings: str) -> None:
    """Raise OperError on all ranks if their plans or settings differ."""
    digest = hashlib.sha256(plan_digest(plan) + settings.encode()).digest()
    digests = peers.gather(digest, "make its DispatchingLoader")
    other = [rank for rank, digest_of_rank in enumerate(digests) if digest_of_rank != digests[0]]
    if other:
        raise OperError(
            f"{rank_names(other)} made the DispatchingLoader with other settings than rank 0, or "
            "another plan: give all ranks the same plan and settings"
        )
