"""Policies against all assignments of tiny batches: one sample a worker, as in Herald's App. C."""

from itertools import permutations

import numpy as np
import pytest

from oper.scheduler.cache import Caches
from oper.scheduler.cache_settings import Synchronisation
from oper.scheduler.dispatch import Dispatcher, Policy

PUSHES_AND_PULLS = ("miss_pull", "update_push", "evict_push")
Batch = tuple[np.ndarray, np.ndarray]


def replay(workers: int, history: list[tuple[Batch, np.ndarray]]) -> tuple[Caches, int]:
    """Caches after a history, and what its last batch transmitted."""
    caches = Caches(workers, [30], [8], [8], "lru", Synchronisation.parse("on-demand"))
    last = 0
    for batch, assignment in history:
        moved = caches.train(caches.look_up(*batch), assignment)
        last = sum(int(moved[name].sum()) for name in PUSHES_AND_PULLS)
    return caches, last


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_no_policy_transmits_less_than_the_best_of_all_assignments(workers: int) -> None:
    random = np.random.default_rng(workers)
    totals = dict.fromkeys(("best", "random", "laia", "esd", "grouped"), 0)
    for _ in range(6):
        history: list[tuple[Batch, np.ndarray]] = []
        for number in range(8):
            addresses = (40 * random.random(6 * workers) ** 2).astype(np.int64)
            batch = (addresses, 6 * np.arange(workers + 1))
            every = [np.array(p) for p in permutations(range(workers))]
            moved = [replay(workers, [*history, (batch, a)])[1] for a in every]
            totals["best"] += min(moved)
            for name in list(totals)[1:]:
                caches, _ = replay(workers, history)
                dispatcher = Dispatcher(Policy(name), np.ones(workers), seed=number)
                chosen = dispatcher.assign(caches, addresses, caches.look_up(*batch), number)
                found = moved[[a.tolist() for a in every].index(chosen.tolist())]
                assert found >= min(moved)
                totals[name] += found
            history.append((batch, every[int(np.argmin(moved))]))
    assert totals["best"] <= totals["grouped"] <= totals["random"]
    assert totals["esd"] < totals["random"]
    assert totals["grouped"] <= 1.1 * totals["best"]
