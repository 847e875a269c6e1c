"""Whole rows from shares: rounding that keeps totals and spreads the remainders.

In: rows of each class, and shares of holder sets. Out: whole rows of each class in each.
"""

from typing import Any

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Floats, Ints, as_int64, as_tensor


def split_evenly(rows: Ints, shares: Floats, load: Floats, traffic: Floats) -> Ints:
    """Split `rows[c]` of each class over G holder sets by `shares` ([G] or [C, G]): rows [C, G].

    Each gets the whole part of its share. The remainder goes, class by class, to the sets that got
    least of the leftovers so far, and among these to those with the least `load` for their share.
    So rows of similar traffic, and so of similar R, D and U, spread evenly in number. `load` [G],
    in bytes of `traffic` [C], is updated.
    """
    shares = shares / shares.sum(axis=-1, keepdims=True)
    shares = np.broadcast_to(shares, (len(rows), shares.shape[-1]))
    exact = rows[:, None] * shares
    exact += 1e-9
    counts = np.floor(exact, out=exact).astype(np.int64)
    load += (counts * traffic[:, None]).sum(axis=0)
    left = rows - counts.sum(axis=1)
    some = np.flatnonzero(left)
    leftovers = np.zeros((len(some), len(load)), dtype=np.int64)
    native.ops().give_leftovers(
        as_int64(left[some]),
        as_tensor(shares[some]),
        as_tensor(traffic[some]),
        torch.from_numpy(leftovers),
        torch.from_numpy(load),
    )
    counts[some] += leftovers
    return counts


def whole_by_shares(rows: Ints, shares: Floats, bucket: Ints, traffic: Floats) -> Ints:
    """Return whole rows [C, G] by `shares` [C, G].

    Rows that rounding takes from a holder set are made up for by the next classes: of hot classes,
    which have no more rows than there are holder sets, in `traffic` [C], because they decide a
    rank's load; of the others in rows of the same `bucket` [C], because they decide its memory.
    """
    buckets = int(bucket.max()) + 1 if len(bucket) else 0
    rounded: Any = native.ops().whole_by_shares(
        as_int64(rows), as_tensor(shares), as_int64(bucket), as_tensor(traffic), buckets
    )
    counts: Ints = rounded.numpy()
    return counts


def whole_rows(exact: Floats, total: int) -> Ints:
    """Return whole numbers near `exact` [G] that sum to `total`: the largest remainders are rounded
    up."""
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
