"""The code of a listed row: its holder set and its position there, packed into one integer."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints
from oper.base.tensors import as_tensor
from oper.plan.layout import Layout


def unpack_codes(layout: Layout) -> tuple[Ints, Ints]:
    """Group and position of each explicit row, [E]."""
    codes = layout.codes.astype(np.uint64)
    bits = layout.group_bits
    group = (codes & np.uint64((1 << bits) - 1)).astype(np.int64)
    return group, (codes >> np.uint64(bits)).astype(np.int64)


def pack_codes(group: NDArray[np.int32], groups: int) -> tuple[NDArray[Any], Ints]:
    """The address map's code of each row, and the rows of each group.

    code = position << bits | group, with as few bits as a group's number needs; positions count
    each group's rows in order. uint32 where that is enough, else uint64.
    """
    codes, rows = native.ops().pack_codes(as_tensor(group), groups)
    array = codes.numpy()
    return array.view(np.uint32 if array.dtype == np.int32 else np.uint64), rows.numpy()
