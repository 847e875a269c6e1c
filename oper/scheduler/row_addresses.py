"""Row addresses, by which caches know rows, equal on all ranks; and accesses sample by sample.

An address is width << 56 | row. For the rows of a plan, row is the owner's number << 40 | its slot
there.
"""

from typing import TypeVar

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.plan.layout import SLOT_BITS, SLOT_MASK

WIDTH_SHIFT = 56  # csrc/include/oper/scheduler/caches.h has it too
ROW_MASK = (1 << WIDTH_SHIFT) - 1

Numbers = TypeVar("Numbers", Ints, torch.Tensor)


def width_of(addresses: Numbers) -> Numbers:
    """Return the numbers of the rows' widths."""
    return addresses >> WIDTH_SHIFT


def owner_of(addresses: Numbers) -> Numbers:
    """Return the ranks that own the rows in a plan."""
    return (addresses & ROW_MASK) >> SLOT_BITS


def slot_of(addresses: Numbers) -> Numbers:
    """Return the slots of the rows at their owners in a plan."""
    return addresses & SLOT_MASK


def sample_major(lengths: Ints) -> Ints:
    """Return the positions [N] of accesses in sample-major order; the accesses are in feature-major
    order, with lengths [F, samples]."""
    flat = lengths.reshape(-1)
    starts = (np.cumsum(flat) - flat).reshape(lengths.shape).T.reshape(-1)
    counts = lengths.T.reshape(-1)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
