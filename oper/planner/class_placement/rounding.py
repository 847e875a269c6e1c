"""Whole rows from shares: rounding that keeps totals and spreads what is left over.

In: rows of each class, and shares of holder sets. Out: whole rows of each class in each.
"""

import numpy as np

from oper.base.arrays import Floats, Ints

MANY_SETS = 64  # above, arrays of holder sets are faster than lists


def split_evenly(rows: Ints, shares: Floats, load: Floats, traffic: Floats) -> Ints:
    """Split `rows[c]` of each class over G holder sets by `shares` ([G] or [C, G]): rows [C, G].

    Each gets the whole part of its share. What is left over goes, class by class, to those that
    got least of the leftovers so far, and among these to those with the least `load` for their
    share. So rows of similar traffic, and so of similar R, D and U, spread evenly in number.
    `load` [G], in bytes of `traffic` [C], is updated.
    """
    shares = np.broadcast_to(shares, (len(rows), np.shape(shares)[-1]))
    shares = shares / shares.sum(axis=1, keepdims=True)
    exact = rows[:, None] * shares
    counts = np.floor(exact + 1e-9).astype(np.int64)
    load += (counts * traffic[:, None]).sum(axis=0)
    left = rows - counts.sum(axis=1)
    some = np.flatnonzero(left)
    give = _give_to_many if shares.shape[1] > MANY_SETS else _give_to_few
    give(some, left, shares, traffic, counts, load)
    return counts


def _give_to_few(
    some: Ints, left: Ints, shares: Floats, traffic: Floats, counts: Ints, load: Floats
) -> None:
    """Add the `left[c]` rows of each class of `some` to `counts` and their traffic to `load`."""
    # A holder set's turn comes by its share of the leftovers, which `given` counts. Lists, as this
    # goes class by class over few holder sets.
    given, loads = [0.0] * shares.shape[1], load.tolist()
    for c, n, share in zip(some.tolist(), left[some].tolist(), shares[some].tolist(), strict=True):
        usable = [g for g, part in enumerate(share) if part > 0]
        turns = {g: int(given[g] / share[g] / len(share) + 1e-9) for g in usable}
        usable.sort(key=lambda g: (turns[g], loads[g] / share[g]))
        for g in usable[:n]:
            counts[c, g] += 1
            loads[g] += float(traffic[c])
            given[g] += 1
    load[:] = loads


def _give_to_many(
    some: Ints, left: Ints, shares: Floats, traffic: Floats, counts: Ints, load: Floats
) -> None:
    """The same, without a sort of all holder sets for each class."""
    given = np.zeros(shares.shape[1])
    for c in some.tolist():
        usable = np.flatnonzero(shares[c] > 0)
        share, n = shares[c, usable], min(int(left[c]), len(usable))
        turns = (given[usable] / share / shares.shape[1] + 1e-9).astype(np.int64)
        last = np.partition(turns, n - 1)[n - 1]
        first, level = np.flatnonzero(turns < last), np.flatnonzero(turns == last)
        spread = load[usable[level]] / share[level]
        chosen = level[_least(spread, n - len(first))]
        taken = usable[np.concatenate([first, chosen])]
        counts[c, taken] += 1
        load[taken] += traffic[c]
        given[taken] += 1


def _least(values: Floats, n: int) -> Ints:
    """Where the n least values are, the first ones among equals; n is at least 1."""
    last = np.partition(values, n - 1)[n - 1]
    below = np.flatnonzero(values < last)
    return np.concatenate([below, np.flatnonzero(values == last)[: n - len(below)]])


def whole_rows(exact: Floats, total: int) -> Ints:
    """Whole numbers near `exact` [G] that sum to `total`: the largest remainders are rounded up."""
    held = exact.sum()
    scaled = exact * (total / held) if held > 0 else exact + total / len(exact)
    whole = np.floor(scaled + 1e-9)
    short = total - int(whole.sum())
    if short:
        order = (whole - scaled).argsort(kind="stable")
        if short > 0:
            whole[order[:short]] += 1
        else:
            whole[order[short:]] -= 1
    return whole.astype(np.int64)
