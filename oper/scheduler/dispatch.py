"""Dispatch: assignment of the next global batch's samples to workers, m each.

A policy sees the batch, the rows in the caches, and the links. All ranks make the same assignment
from equal inputs: random choices come from the seed and the batch's number, and the work is bounded
by numbers of the policy, never by a clock.

    random       a seeded choice (the papers' vanilla)
    in-order     sample s by worker s // m, as loaders yield them
    laia         in order, each sample to the worker with room that has most of its rows (Herald)
    laia:K       adaptive: by the rows of the K tables alone whose cached rows are most infrequent
    esd:ALPHA    by expected cost of transmissions (ESD): the ALPHA share of samples for which the
                 choice matters most exactly, then the others in order, each to the cheapest worker
                 with room (HybridDis). esd is esd:1, the optimum of the score
    grouped:N    each sample to the worker with room with which the whole batch transmits least,
                 given the other samples, in N rounds over the samples: a score counts a row once
                 for each of them (beyond the papers). grouped is grouped:6
    POLICY@SHARE only the first SHARE of the batch's samples by POLICY, and the others in order,
                 into the remaining room

Training's pace lowers ALPHA, K, N and SHARE if dispatch takes longer than training (`Policy.at`).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.scheduler.cache import Caches, LookedUp
from oper.scheduler.fae import FrequentRows
from oper.scheduler.laia_infrequency import REFRESH, Infrequency

_MOST_TABLES = 1 << 24
_MOST_ROUNDS = 1024
ROUNDS = 6  # of `grouped`: docs/design/dispatch-by-groups.md
BLIND = ("random", "in-order")  # policies that ignore the caches
_KINDS = (*BLIND, "laia", "esd", "grouped")
_FORMS = "random, in-order, laia, laia:K, esd, esd:ALPHA, grouped or grouped:N"


@dataclass(frozen=True)
class Policy:
    """Dispatch policy: `alpha` is that of esd, `tables` the number that laia considers, `rounds`
    those of grouped, and `share` that of the samples that the policy considers."""

    kind: str
    alpha: float = 1.0
    tables: int | None = None
    rounds: int = ROUNDS
    share: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Parse `random`, `in-order`, or, with an optional `@SHARE` after it, `laia`, `laia:K`,
        `esd`, `esd:ALPHA`, `grouped` or `grouped:N`."""
        name, at, share = text.partition("@")
        kind, colon, number = name.partition(":")
        with contextlib.suppress(ValueError):
            policy = cls._of(kind, number) if colon else cls(kind)
            looked_at = float(share) if at else 1.0
            if kind in _KINDS and 0 <= looked_at <= 1 and (kind not in BLIND or not at):
                return replace(policy, share=looked_at)
        raise OperError(
            f"{option('--policy', text[:40])}: expected {_FORMS}, with K tables that are looked "
            "at, ALPHA from 0 to 1, the share of samples that are assigned exactly, and N rounds, "
            f"1 to {_MOST_ROUNDS:,}; but for the first two @SHARE may follow, from 0 to 1, the "
            "share of samples that are looked at"
        )

    @classmethod
    def _of(cls, kind: str, number: str) -> "Policy":
        """Return the policy of this kind with a number; raise ValueError for an invalid number."""
        if kind == "esd" and 0 <= float(number) <= 1:
            return cls(kind, alpha=float(number))
        if number.isdecimal():
            if kind == "laia" and 0 < float(number) < _MOST_TABLES:
                return cls(kind, tables=int(number))
            if kind == "grouped" and 0 < float(number) <= _MOST_ROUNDS:
                return cls(kind, rounds=int(number))
        raise ValueError(number)

    def __str__(self) -> str:
        number = ""
        if self.kind == "esd" and self.alpha != 1:
            number = f":{self.alpha:g}"
        if self.tables is not None:
            number = f":{self.tables}"
        if self.kind == "grouped" and self.rounds != ROUNDS:
            number = f":{self.rounds}"
        return self.kind + number + (f"@{self.share:g}" if self.share != 1 else "")

    def at(self, effort: float) -> "Policy":
        """Return the policy with this part of its work, from 0 to 1: from 1 to ½ α, K and N fall to
        their cheapest values, and then the share of samples that are considered. LAIA has only that
        share."""
        if self.kind in BLIND or effort >= 1:
            return self
        if self.kind == "laia" and self.tables is None:
            return replace(self, share=self.share * effort)
        part = max(2 * effort - 1, 0.0)
        share = self.share * min(2 * effort, 1.0)
        if self.kind == "esd":
            return replace(self, alpha=self.alpha * part, share=share)
        if self.tables is not None:
            return replace(self, tables=max(round(self.tables * part), 1), share=share)
        return replace(self, rounds=max(round(self.rounds * part), 1), share=share)


@dataclass
class Dispatcher:
    """Dispatcher of batches of M · m samples by a policy."""

    policy: Policy
    seconds_per_byte: Floats  # [M], of each worker's link to the tier
    seed: int = 0
    infrequency: Infrequency | None = None  # for laia:K

    def __post_init__(self) -> None:
        self._ranked: Ints | None = None  # tables, the most infrequent first

    def assign(
        self, caches: Caches | FrequentRows, addresses: Ints, batch: LookedUp, number: int
    ) -> Ints:
        """Return the worker of each sample of batch `number`, [samples]; the last batch may be
        smaller.

        `batch` is the caches' `look_up` of `addresses`.
        """
        samples, workers = len(batch.offsets) - 1, caches.workers
        room = capacities(samples, workers)
        if self.policy.kind in BLIND or isinstance(caches, FrequentRows):
            return assign_blindly(self.policy.kind, room, self.seed, number)
        looked_at = round(self.policy.share * samples)
        if looked_at == samples:
            return self._assigned(caches, addresses, batch, room, number)
        assigned = self._assigned(caches, addresses, batch.first(looked_at), room, number)
        left = room - np.bincount(assigned, minlength=workers)
        return np.concatenate([assigned, np.repeat(np.arange(workers), left)])

    def _assigned(
        self, caches: Caches, addresses: Ints, batch: LookedUp, room: Ints, number: int
    ) -> Ints:
        """Return the worker of each sample of `batch`, within `room` [M]."""
        policy = self.policy
        if policy.kind == "grouped":
            return caches.group(batch, room, self.seconds_per_byte, policy.rounds)
        if policy.kind == "laia":
            scores = caches.latest_rows(self._scored(caches, addresses, batch, number))
            return assign_in_order(np.negative(scores, out=scores), room, (self.seed, number))
        return hybrid(caches.expected_costs(batch, self.seconds_per_byte), room, policy.alpha)

    def _scored(self, caches: Caches, addresses: Ints, batch: LookedUp, number: int) -> LookedUp:
        """Return the rows of a batch that laia considers."""
        if self.policy.tables is None or self.infrequency is None:
            return batch
        rows = self.infrequency.rows_of(addresses[batch.positions.numpy()])
        if number % REFRESH == 1 or self._ranked is None:  # before batch 0 nothing is cached
            self._ranked = np.argsort(-self.infrequency.of_tables(caches), kind="stable")
        looked_at = np.zeros(len(self._ranked), dtype=bool)
        looked_at[self._ranked[: self.policy.tables]] = True
        self.infrequency.count(rows, len(batch.offsets) - 1)
        return batch.only(looked_at[self.infrequency.tables_of(rows)])


def assign_blindly(kind: str, room: Ints, seed: int, number: int) -> Ints:
    """Return the worker of each sample of batch `number`, by a BLIND policy; room [M]."""
    in_order = np.repeat(np.arange(len(room)), room)
    random = np.random.default_rng([seed, number])
    return random.permutation(in_order) if kind == "random" else in_order


def capacities(samples: int, workers: int) -> Ints:
    """Return the number of samples of each worker, [M], as even as possible; the first workers have
    more."""
    return samples // workers + (np.arange(workers) < samples % workers).astype(np.int64)


def hybrid(costs: Floats, room: Ints, alpha: float) -> Ints:
    """Assign by HybridDis(α): the share `alpha` of samples with the largest regret, the second
    least minus the least cost, exactly within `room` [M], then the rest in order, into the
    remaining room."""
    if alpha == 1:
        return assign_exactly(costs, room)
    return _assigned(native.ops().assign_partly, costs, room, round(alpha * len(costs)))


def assign_in_order(costs: Floats, room: Ints, drawn: tuple[int, int] | None = None) -> Ints:
    """Assign samples in order, each to its cheapest worker with room, in ties to the first one, or
    to one that is drawn with the numbers `drawn`; costs [samples, M], room [M]."""
    seed = None
    if drawn is not None:
        seed = int(np.random.SeedSequence(drawn).generate_state(1, np.uint64)[0] >> 1)
    return _assigned(native.ops().assign_in_order, costs, room, seed)


def assign_exactly(costs: Floats, room: Ints) -> Ints:
    """Return the assignment of least total cost; costs [samples, M], room [M]."""
    return _assigned(native.ops().assign_exactly, costs, room)


def _assigned(
    kernel: Callable[..., torch.Tensor], costs: Floats, room: Ints, *arguments: int | None
) -> Ints:
    given = torch.from_numpy(np.ascontiguousarray(costs)), torch.from_numpy(room)
    found: Ints = kernel(*given, *arguments).numpy()
    return found
