"""The array types that all packages share, and NumPy arrays as tensors for the native kernels,
without copies."""

import warnings
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = NDArray[np.uint32] | NDArray[np.uint64]  # counters of rows, as wide as the largest needs


class OverRanks(NamedTuple):
    """Mark of an array type: each of its `axes` axes is over the ranks."""

    axes: int


PerRank = Annotated[Floats, OverRanks(1)]  # [M]
PerPair = Annotated[Floats, OverRanks(2)]  # [M, M]
WholePerRank = Annotated[Ints, OverRanks(1)]  # [M]


def as_tensor(array: NDArray[Any]) -> "torch.Tensor":
    """Return a tensor over the array's memory.

    The kernels only read it, so torch's warning about arrays that are mapped read-only is silenced.
    """
    import torch

    contiguous = np.ascontiguousarray(array)
    if contiguous.flags.writeable:
        return torch.from_numpy(contiguous)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(contiguous)


def as_int64(array: NDArray[Any]) -> "torch.Tensor":
    """Return an int64 tensor of any integers, copied if they are of another type."""
    return as_tensor(np.asarray(array, dtype=np.int64))


def struct_words(structs: NDArray[Any]) -> "torch.Tensor":
    """Return an array of structs [N] in the form for kernels, int64 [N, words of a struct]."""
    return as_tensor(structs.view(np.int64).reshape(len(structs), structs.itemsize // 8))


def as_bytes(values: "torch.Tensor") -> "torch.Tensor":
    """Return the bytes of a tensor, uint8 [n]."""
    import torch

    if not values.numel():  # its strides may be anything
        return torch.empty(0, dtype=torch.uint8)
    return values.contiguous().flatten().view(torch.uint8)
