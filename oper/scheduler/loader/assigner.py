"""Assigners: from what the ranks tell each other of their samples, the rank that trains each.

By locality a sample goes to the rank that holds most of the rows that it reads. That needs no
cache: a rank holds the rows that the plan gives it, and all replicas, which therefore decide
nothing. Assigners by caches are in cache_assigner.py.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from oper.base.arrays import Floats, Ints
from oper.scheduler.dispatch import Policy, assign_blindly, assign_exactly, capacities
from oper.scheduler.loader.batch_structure import Structure
from oper.scheduler.loader.plan_rows import PlanRows


class Assigner(Protocol):
    """Assigns the samples of global batches in order: first those of rank 0's loader."""

    def message(self, batch: Structure) -> torch.Tensor:
        """What all ranks must know of this rank's samples: uint8."""

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """The rank of each sample of global batch `number`, as many each; `samples` are those of
        one rank."""


class BlindAssigner:
    """By a policy that looks at nothing, among `ranks`."""

    def __init__(self, policy: Policy, ranks: int, seed: int) -> None:
        self._policy, self._ranks, self._seed = policy, ranks, seed

    def message(self, batch: Structure) -> torch.Tensor:
        """Nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """As `Assigner`."""
        room = capacities(samples * self._ranks, self._ranks)
        return assign_blindly(self._policy.kind, room, self._seed, number)


class LocalityAssigner:
    """By the rows of a plan's own placement on `ranks`."""

    def __init__(self, rows: PlanRows, ranks: int) -> None:
        self._rows, self._ranks = rows, ranks

    def message(self, batch: Structure) -> torch.Tensor:
        """The reads of each sample that each rank alone could serve from its memory, int32
        [samples, M]."""
        counts, _ = self._rows.counts(batch)
        return torch.from_numpy(counts.astype(np.int32).reshape(-1).view(np.uint8))

    def assign(self, messages: Sequence[torch.Tensor], samples: int, number: int) -> Ints:
        """The assignment with the most local reads; in ties samples stay where they are."""
        counts = np.concatenate([message.numpy().view(np.int32) for message in messages])
        return most_local(counts.reshape(-1, self._ranks))


def most_local(counts: Ints) -> Ints:
    """The ranks of M · m samples, m each, of which rank r could serve counts[s, r] reads."""
    samples, ranks = counts.shape
    costs: Floats = -counts.astype(np.float64)
    room = np.full(ranks, samples // ranks, dtype=np.int64)
    at_home = np.repeat(np.arange(ranks), room)
    costs[np.arange(samples), at_home] -= 0.5 / (samples + 1)  # of all together less than one read
    return assign_exactly(costs, room)
