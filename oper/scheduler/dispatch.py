"""Dispatch: which worker trains which sample of the next global batch, m each.

A policy sees the batch, what the caches hold, and the links. Every rank that has the same of them
makes the same assignment: random choices come from the seed and the batch's number.

    random       a seeded choice (the papers' vanilla)
    in-order     sample s by worker s // m, as loaders yield them
    laia         in order, each sample to the worker with room that has most of its rows (Herald)
    laia:K       adaptive: by the rows of the K tables alone whose cached rows are most infrequent
    esd:ALPHA    by expected cost of transmissions (ESD): the ALPHA share of samples for which the
                 choice matters most exactly, then the others in order, each to the cheapest worker
                 with room (HybridDis). esd is esd:1, the optimum of the score
    grouped      esd, then pairs of samples are exchanged so that those that share rows meet: a
                 score counts a row for each of them (beyond the papers)
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.scheduler.cache import Caches, LookedUp
from oper.scheduler.fae import FrequentRows
from oper.scheduler.laia_infrequency import REFRESH, Infrequency

_MOST_TABLES = 1 << 24
_KINDS = ("random", "in-order", "laia", "esd", "grouped")


@dataclass(frozen=True)
class Policy:
    """A way to dispatch; `alpha` is that of esd, `tables` the number that laia looks at."""

    kind: str
    alpha: float = 1.0
    tables: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """`random`, `in-order`, `laia`, `laia:K`, `esd`, `esd:ALPHA` or `grouped`."""
        kind, colon, number = text.partition(":")
        if kind in _KINDS and not colon:
            return cls(kind)
        if kind == "laia" and number.isdecimal() and 0 < float(number) < _MOST_TABLES:
            return cls(kind, tables=int(number))
        with contextlib.suppress(ValueError):
            if kind == "esd" and 0 <= float(number) <= 1:
                return cls(kind, alpha=float(number))
        raise OperError(
            f"--policy {text[:40]!r}: random, in-order, laia, laia:K, esd, esd:ALPHA or grouped "
            "was needed, with K tables that are looked at, and ALPHA from 0 to 1, the share of "
            "samples that are assigned exactly"
        )

    def __str__(self) -> str:
        number = f"{self.alpha:g}" if self.tables is None else str(self.tables)
        return self.kind if number == "1" and self.tables is None else f"{self.kind}:{number}"


BLIND = ("random", "in-order")  # policies that look at nothing the caches hold


@dataclass
class Dispatcher:
    """Assigns batches of M · m samples by a policy."""

    policy: Policy
    seconds_per_byte: Floats  # [M], of each worker's link to the tier
    seed: int = 0
    infrequency: Infrequency | None = None  # for laia:K

    def __post_init__(self) -> None:
        self._ranked: Ints | None = None  # tables, the most infrequent first

    def assign(
        self, caches: Caches | FrequentRows, addresses: Ints, batch: LookedUp, number: int
    ) -> Ints:
        """The worker of each sample of batch `number`, [samples]; the last batch may be smaller.

        `batch` is what the caches made of `addresses`.
        """
        samples, workers = len(batch.offsets) - 1, caches.workers
        room = capacities(samples, workers)
        if self.policy.kind in BLIND or isinstance(caches, FrequentRows):
            return assign_blindly(self.policy.kind, room, self.seed, number)
        if self.policy.kind == "laia":
            random = np.random.default_rng([self.seed, number])
            # Scores are whole numbers: half of one decides ties alone.
            ties = 0.5 * random.random((samples, workers))
            scored = self._scored(caches, addresses, batch, number)
            return assign_in_order(ties - caches.latest_rows(scored), room)
        costs = caches.expected_costs(batch, self.seconds_per_byte)
        assignment = hybrid(costs, room, self.policy.alpha)
        if self.policy.kind == "grouped":
            return caches.group(batch, assignment, self.seconds_per_byte)
        return assignment

    def _scored(self, caches: Caches, addresses: Ints, batch: LookedUp, number: int) -> LookedUp:
        """The rows of a batch that laia looks at."""
        if self.policy.tables is None or self.infrequency is None:
            return batch
        rows = addresses[batch.positions.numpy()]
        if number % REFRESH == 1 or self._ranked is None:  # before batch 0 nothing is cached
            self._ranked = np.argsort(-self.infrequency.of_tables(caches), kind="stable")
        looked_at = np.zeros(len(self._ranked), dtype=bool)
        looked_at[self._ranked[: self.policy.tables]] = True
        self.infrequency.count(rows, len(batch.offsets) - 1)
        return batch.only(looked_at[self.infrequency.tables_of(rows)])


def assign_blindly(kind: str, room: Ints, seed: int, number: int) -> Ints:
    """The worker of each sample of batch `number`, by a policy that is BLIND; room [M]."""
    in_order = np.repeat(np.arange(len(room)), room)
    random = np.random.default_rng([seed, number])
    return random.permutation(in_order) if kind == "random" else in_order


def capacities(samples: int, workers: int) -> Ints:
    """Samples of each worker, [M], as even as can be; the first ones have more."""
    return samples // workers + (np.arange(workers) < samples % workers).astype(np.int64)


def hybrid(costs: Floats, room: Ints, alpha: float) -> Ints:
    """HybridDis(α): the share `alpha` of samples with the largest regret, second least less least
    cost, is assigned exactly within `room` [M], then the rest in order, into what is left."""
    if alpha == 1 or costs.shape[1] == 1:
        return assign_exactly(costs, room)
    least_two = np.partition(costs, 1, axis=1)
    regret = least_two[:, 1] - least_two[:, 0]
    chosen = np.sort(np.argsort(-regret, kind="stable")[: round(alpha * len(costs))])
    others = np.setdiff1d(np.arange(len(costs)), chosen, assume_unique=True)
    assignment = np.zeros(len(costs), dtype=np.int64)
    assignment[chosen] = assign_exactly(costs[chosen], room)
    left = room - np.bincount(assignment[chosen], minlength=len(room))
    assignment[others] = assign_in_order(costs[others], left)
    return assignment


def assign_in_order(costs: Floats, room: Ints) -> Ints:
    """Samples in order, each to its cheapest worker with room; costs [samples, M], room [M]."""
    return _assigned(native.ops().assign_in_order, costs, room)


def assign_exactly(costs: Floats, room: Ints) -> Ints:
    """The assignment of the least total cost; costs [samples, M], room [M]."""
    return _assigned(native.ops().assign_exactly, costs, room)


def _assigned(kernel: Callable[..., torch.Tensor], costs: Floats, room: Ints) -> Ints:
    found: Ints = kernel(
        torch.from_numpy(np.ascontiguousarray(costs)), torch.from_numpy(room)
    ).numpy()
    return found
