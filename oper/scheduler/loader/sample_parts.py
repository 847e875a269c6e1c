"""Samples on their way: chosen from the parts of a batch, as bytes, and joined again.

Bytes of n samples, part after part: of jagged ones their lengths [F, n], then the values of each
feature, then the weights; of tensors their rows. The ranks' batches are made of the same, so that n
is all that a receiver has to know. Every array begins at a multiple of 16 bytes.
"""

from collections.abc import Sequence

import torch

from oper.scheduler.loader.batch_structure import Jagged, Part, bytes_of

_ALIGNMENT = 16  # bytes, of the widest type (complex128)


def choose(part: Part, samples: torch.Tensor) -> Part:
    """Some samples of a part, by their numbers, in that order."""
    if isinstance(part, torch.Tensor):
        return part[samples]
    lengths = part.lengths.reshape(-1).long()
    starts = (lengths.cumsum(0) - lengths).reshape(part.lengths.shape)[:, samples].reshape(-1)
    chosen = part.lengths[:, samples]
    counts = chosen.reshape(-1).long()
    before = counts.cumsum(0) - counts
    positions = torch.repeat_interleave(starts - before, counts)
    positions += torch.arange(len(positions))
    weights = None if part.weights is None else part.weights[positions]
    return Jagged(chosen, part.values[positions], weights)


def join(pieces: Sequence[Part]) -> Part:
    """The samples of several parts, one after the other."""
    jagged = [piece for piece in pieces if isinstance(piece, Jagged)]
    if not jagged:
        return torch.cat([piece for piece in pieces if isinstance(piece, torch.Tensor)])
    sizes = [piece.lengths.sum(dim=1).tolist() for piece in jagged]

    def by_feature(columns: list[torch.Tensor]) -> torch.Tensor:
        split = [column.split(size) for column, size in zip(columns, sizes, strict=True)]
        bags = [of_piece for feature in zip(*split, strict=True) for of_piece in feature]
        return torch.cat([columns[0][:0], *bags])  # of no features too

    weights = [piece.weights for piece in jagged if piece.weights is not None]
    return Jagged(
        torch.cat([piece.lengths for piece in jagged], dim=1),
        by_feature([piece.values for piece in jagged]),
        by_feature(weights) if weights else None,
    )


def to_bytes(parts: Sequence[Part]) -> torch.Tensor:
    """The samples of some parts, uint8."""
    arrays = []
    for part in parts:
        arrays += [part] if isinstance(part, torch.Tensor) else [part.lengths, part.values]
        if isinstance(part, Jagged) and part.weights is not None:
            arrays.append(part.weights)
    pieces = [torch.empty(0, dtype=torch.uint8)]
    for array in arrays:
        content = bytes_of(array)
        pieces += [content, content.new_zeros(-len(content) % _ALIGNMENT)]
    return torch.cat(pieces)


def from_bytes(content: torch.Tensor, like: Sequence[Part], samples: int) -> list[Part]:
    """The inverse of `to_bytes`, of so many samples; `like` are parts that are made of the same."""
    position = 0

    def next_array(rows: int, model: torch.Tensor) -> torch.Tensor:
        nonlocal position
        shape = (rows, *model.shape[1:])
        size = torch.Size(shape).numel() * model.element_size()
        found = content[position : position + size].view(model.dtype).reshape(shape)
        position += size + -size % _ALIGNMENT
        return found

    parts: list[Part] = []
    for model in like:
        if isinstance(model, torch.Tensor):
            parts.append(next_array(samples, model))
            continue
        features = len(model.lengths)
        lengths = next_array(features * samples, model.lengths.reshape(-1))
        total = int(lengths.sum())
        values = next_array(total, model.values)
        weights = None if model.weights is None else next_array(total, model.weights)
        parts.append(Jagged(lengths.reshape(features, samples), values, weights))
    return parts
