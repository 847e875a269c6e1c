"""Row addresses, by which caches know rows, the same on all ranks; and accesses sample by sample.

An address is width << 56 | row. Where rows are those of a plan, row is the owner's number << 40 |
its slot there.
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
    """The numbers of the rows' widths."""
    return addresses >> WIDTH_SHIFT


def owner_of(addresses: Numbers) -> Numbers:
    """The ranks that a plan gave the rows."""
    return (addresses & ROW_MASK) >> SLOT_BITS


def slot_of(addresses: Numbers) -> Numbers:
    """The slots of the rows at the ranks that a plan gave them."""
    return addresses & SLOT_MASK


def sample_major(lengths: Ints) -> Ints:
    """Where the accesses of features, one feature after the other, with lengths [F, samples], are
    when all of a sample's come together: positions [N]."""
    flat = lengths.reshape(-1)
    starts = (np.cumsum(flat) - flat).reshape(lengths.shape).T.reshape(-1)
    counts = lengths.T.reshape(-1)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
