"""Rows of a delta, which `oper.save_delta` wrote, found by their numbers in the table.

Its tensors have the touched rows of the table's weight and states, and `touched.TABLE` their
numbers in the table, ascending.
"""

from bisect import bisect_left
from pathlib import Path

import torch

from oper.base.errors import OperError
from oper.checkpoint.saved_index import SavedIndex, SavedTensor
from oper.checkpoint.saved_rows import read_rows
from oper.checkpoint.shard_file import read_shard_rows

TOUCHED = "touched"  # the part of a checkpoint that has the rows' numbers, by table
# The object that names the checkpoint before this one. Without it, a delta that touched no row and
# lost its marker would look like a whole checkpoint of a model without tables.
UPON = "delta_upon"


def ids_of(index: SavedIndex, table: str) -> SavedTensor | None:
    """Return the tensor with the numbers of a table's touched rows; None if it has none."""
    return index.tensors.get(f"{TOUCHED}.{table}")


def is_of_delta(index: SavedIndex) -> bool:
    """Return whether the files of a checkpoint are those of a delta, whatever its marker says."""
    touched = (tensor for name, tensor in index.tensors.items() if name.startswith(f"{TOUCHED}."))
    numbers = any(tensor.dtype == torch.int64 and len(tensor.shape) == 1 for tensor in touched)
    return numbers or UPON in index.objects


class DeltaRows:
    """Touched rows of one table in the delta of a folder; `ids` has their numbers, and the table
    has `rows` rows."""

    def __init__(self, folder: Path, ids: SavedTensor, rows: int) -> None:
        self._folder, self._ids, self._rows = folder, ids, rows
        self._bounds: tuple[list[int], list[int]] | None = None

    def put(self, tensor: SavedTensor, first: int, values: torch.Tensor) -> torch.Tensor:
        """Overwrite `values`, rows [first, first + n) of a tensor of the table, [n, …], with the
        delta's values. Return the overwritten rows, counted from `first`.

        Raise OperError if a file is missing or damaged.
        """
        ids, begin = self._within(first, first + len(values))
        if tensor.shape != (*self._ids.shape, *values.shape[1:]) or tensor.dtype != values.dtype:
            raise self._unsound(f"{tensor.name!r} is {tensor.shape} in {tensor.dtype}")
        at = ids - first
        if len(ids):
            values.index_copy_(0, at, read_rows(self._folder, tensor, begin, len(ids)))
        return at

    def numbers(self) -> torch.Tensor:
        """Return the ascending numbers of all rows; raise OperError if they do not ascend."""
        self._shard_bounds()
        parts = [self._shard(number) for number in range(len(self._ids.shards))]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])

    def _within(self, first: int, end: int) -> tuple[torch.Tensor, int]:
        """Return the touched rows of [first, end), and the number of touched rows before them."""
        firsts, lasts = self._shard_bounds()
        shards = range(bisect_left(lasts, first), bisect_left(firsts, end))
        touched, begin = [torch.zeros(0, dtype=torch.int64)], -1
        for number in shards:
            ids = self._shard(number)
            low, high = torch.searchsorted(ids, torch.tensor([first, end])).tolist()
            if begin < 0:
                begin = self._ids.shards[number].offsets[0] + low
            touched.append(ids[low:high])
        return torch.cat(touched), max(begin, 0)

    def _shard_bounds(self) -> tuple[list[int], list[int]]:
        """Return the first and the last row of each shard."""
        if self._bounds is None:
            last, firsts, lasts = -1, [], []
            for number in range(len(self._ids.shards)):
                ids = self._shard(number)
                if int(ids[0]) <= last or bool((ids.diff() <= 0).any()):
                    raise self._unsound("its rows do not ascend")
                firsts.append(int(ids[0]))
                last = int(ids[-1])
                lasts.append(last)
            if last >= self._rows:
                raise self._unsound(f"it has row {last:,} of {self._rows:,}")
            self._bounds = firsts, lasts
        return self._bounds

    def _shard(self, number: int) -> torch.Tensor:
        shard = self._ids.shards[number]
        return read_shard_rows(self._folder, self._ids, shard, 0, shard.sizes[0])

    def _unsound(self, what: str) -> OperError:
        return OperError(
            f"{self._folder}: {self._ids.name!r}: {what}; the delta was changed or damaged: copy "
            "it again, or go on from what it is upon"
        )
