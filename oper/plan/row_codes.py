"""The code of a listed row: its group and its position there, packed into one integer.

code = position << bits | group, with the fewest bits that hold any group's number; the codes of a
layout are uint32 where all of them fit, else uint64. The kernels do the same by
csrc/include/oper/plan/row_codes.h.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints
from oper.base.tensors import as_tensor


def group_bits(groups: int) -> int:
    """The bits of a code that are the group's number."""
    return max(groups - 1, 0).bit_length()


def groups_of(codes: NDArray[Any], groups: int) -> NDArray[np.int32]:
    """The group of each code, [E]."""
    mask = codes.dtype.type((1 << group_bits(groups)) - 1)
    group: NDArray[np.int32] = (codes & mask).astype(np.int32)
    return group


def unpack_codes(codes: NDArray[Any], groups: int) -> tuple[Ints, Ints]:
    """Group and position of each code, [E] each."""
    codes = codes.astype(np.uint64)
    bits = group_bits(groups)
    group = (codes & np.uint64((1 << bits) - 1)).astype(np.int64)
    return group, (codes >> np.uint64(bits)).astype(np.int64)


def pack_codes(group: NDArray[np.int32], groups: int) -> tuple[NDArray[Any], Ints]:
    """The code of each row, [E], and the rows of each group, [groups]. Positions count each
    group's rows in the order they come."""
    codes, rows = native.ops().pack_codes(as_tensor(group), groups)
    array = codes.numpy()
    return array.view(np.uint32 if array.dtype == np.int32 else np.uint64), rows.numpy()


def pack_positions(group: Ints, position: Ints, groups: int) -> NDArray[Any]:
    """The code of each row, [E], at positions that are given."""
    bits = group_bits(groups)
    narrow = int(position.max(initial=0)) >> (32 - bits) == 0
    return (position << bits | group).astype(np.uint32 if narrow else np.uint64)
