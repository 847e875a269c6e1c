"""The counts of periods, in which older ones weigh less: half as much with each period.

Rank 0 has the counts of the running period, `window`, and of all before it, `before`. When a period
ends, before becomes window + before / 2. A count c that is halved becomes c / 2, rounded up or down
at random if c is odd: its mean is exact, it stays a whole number in 4 bytes, and of rows that were
read once half are forgotten, as if half of the samples had been drawn. So sums of n periods weigh
as 2 − 2^(1 − n) of them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Counts, Ints
from oper.profiling.profile import Profile, in_order, merge
from oper.tables.bag_lengths import BagLengths

_CHUNK_ROWS = 1 << 23


class DecayedCounts:
    """The counts of the running period and of those before it, of the same tables."""

    def __init__(self) -> None:
        self.window: Profile | None = None
        self.before: Profile | None = None
        self.periods = 0  # that have ended

    def add(self, counted: list[Profile]) -> None:
        """Add to the running period."""
        self.window = merge([*counted, *([] if self.window is None else [self.window])])

    def total(self) -> Profile | None:
        """Return all counts, as if the running period ended now; None: nothing was counted."""
        if self.window is None or self.before is None:
            return self.window or self.before
        return merge([self.window, halved(self.before, np.random.default_rng(self.periods))])

    def end_period(self) -> Profile | None:
        """End the period: return its own counts, preceded by those of all before it. None:
        nothing was counted."""
        window, before, total = self.window, self.before, self.total()
        if window is not None and before is not None:
            in_order([before, window])
        self.window, self.before = None, total
        self.periods += 1
        return window


def halved(profile: Profile, random: np.random.Generator) -> Profile:
    """Return a profile with half of every count, odd ones rounded at random."""
    accesses = np.empty_like(profile.accesses)
    samples_with_row = np.empty_like(profile.samples_with_row)
    for table, bagged in enumerate(profile.bagged):
        whole = profile.table_accesses(table)
        first = int(profile.offsets[table])
        with_row = profile.table_samples_with_row(table)
        first_with_row = int(profile.samples_with_row_offsets[table])
        for start in range(0, len(whole), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            up = random.integers(0, 2, len(whole[part]), dtype=np.uint8)
            half = _half(whole[part], up)
            accesses[first + start :][: len(half)] = half
            if bagged:  # by the same choice, so that a row has no more samples than accesses
                samples = np.maximum(_half(with_row[part], up), half > 0)
                samples_with_row[first_with_row + start :][: len(half)] = samples
    bags = profile.bag_lengths
    return replace(
        profile,
        samples=max(profile.samples // 2, 1),
        accesses=accesses,
        samples_with_row=samples_with_row,
        bag_lengths=None if bags is None else _halved_bags(bags, random),
        open_following=None,
        open_preceding=None,
        open_last_windows=None,
        open_first_part=None,
    )


def _half(counts: Counts | Ints, up: NDArray[np.uint8]) -> Any:
    return (counts >> 1) + (counts & up)


def _halved_bags(bags: BagLengths, random: np.random.Generator) -> BagLengths:
    pairs = bags.pairs.copy()
    pairs[:, 2] = _half(pairs[:, 2], random.integers(0, 2, len(pairs), dtype=np.uint8))
    made = BagLengths.of_pairs(pairs, bags.distinct)
    # Among a bag's ids after its first, the share of new ones stays.
    more = made.ids_of_tables - made.filled_bags
    distinct = made.filled_bags + np.rint(bags.new_shares * more).astype(np.int64)
    return replace(made, distinct=distinct)
