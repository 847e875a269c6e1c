"""Whole rows from shares: rounding that keeps totals and spreads what is left over.

In: rows of each class, and shares of holder sets. Out: whole rows of each class in each.
"""

import numpy as np

from oper.base.arrays import Floats, Ints


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
    # A holder set's turn comes by its share of the leftovers, which `given` counts. Lists, as this
    # goes class by class over few holder sets.
    given, loads = [0.0] * shares.shape[1], load.tolist()
    some = np.flatnonzero(left)
    for c, n, share in zip(some.tolist(), left[some].tolist(), shares[some].tolist(), strict=True):
        usable = [g for g, part in enumerate(share) if part > 0]
        turns = {g: int(given[g] / share[g] / len(share) + 1e-9) for g in usable}
        usable.sort(key=lambda g: (turns[g], loads[g] / share[g]))
        for g in usable[:n]:
            counts[c, g] += 1
            loads[g] += float(traffic[c])
            given[g] += 1
    load[:] = loads
    return counts


def whole_rows(exact: Floats, total: int) -> Ints:
    """Whole numbers near `exact` [G] that sum to `total`: the largest remainders are rounded up."""
    scaled = exact * (total / exact.sum()) if exact.sum() > 0 else exact + total / len(exact)
    whole = np.floor(scaled + 1e-9).astype(np.int64)
    order = np.argsort(whole - scaled, kind="stable")
    short = total - int(whole.sum())
    whole[order[: max(short, 0)]] += 1
    for g in order[::-1][: max(-short, 0)]:
        whole[g] -= 1
    return whole
