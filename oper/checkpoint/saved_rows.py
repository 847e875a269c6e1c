"""Rows of a tensor of a checkpoint, from all shards that have them."""

from pathlib import Path

import torch

from oper.checkpoint.saved_index import SavedTensor
from oper.checkpoint.shard_file import read_shard_rows


def read_rows(folder: Path, tensor: SavedTensor, first: int, rows: int) -> torch.Tensor:
    """Read rows [first, first + rows), [rows, …], from shards of rows or of columns.

    Raise OperError if a file is missing, truncated or damaged.
    """
    values: torch.Tensor | None = None
    for shard in tensor.shards_of(first, rows):
        begin = max(first, shard.offsets[0])
        end = min(first + rows, shard.offsets[0] + shard.sizes[0])
        at = begin - shard.offsets[0]
        part = read_shard_rows(folder, tensor, shard, at, end - begin)
        if part.shape == (rows, *tensor.shape[1:]):
            return part
        if values is None:
            values = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype)
        ends = [o + s for o, s in zip(shard.offsets, shard.sizes, strict=True)][1:]
        columns = [slice(o, e) for o, e in zip(shard.offsets[1:], ends, strict=True)]
        values[(slice(begin - first, end - first), *columns)] = part
    assert values is not None, "the shards of an index have all values of their tensors"
    return values
