"""Structure of a batch: parts that have samples, in the containers that a loader yields; and
samples in flight: chosen from the parts, as bytes, and joined again.

Parts with samples are KeyedJaggedTensors, JaggedTensors, and tensors and arrays of numbers, whose
first dimension must be the batch's samples. They may lie in tuples, NamedTuples, lists, dicts and
dataclasses. Everything else in a batch (None, numbers, texts, tensors without dimensions) must be
equal on all ranks, and is kept. Other values with a first dimension are rejected, because their
size cannot distinguish them from a tensor with one row per sample.
"""

import copy
import dataclasses
import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from oper.base.arrays import as_tensor
from oper.base.errors import OperError

_OfLeaf = Callable[[Any, str, str], Any]
_ALIGNMENT = 16  # bytes, of the widest type (complex128)
_JAGGED = (KeyedJaggedTensor, JaggedTensor)
_LEAVES = (*_JAGGED, torch.Tensor, type(None), bool, int, float, complex, str, bytes, enum.Enum)


@dataclass(frozen=True)
class Jagged:
    """Bags of F features, feature after feature in `values`; of feature f, sample s has lengths[f,
    s] values."""

    lengths: torch.Tensor  # [F, samples]
    values: torch.Tensor  # [N, …]
    weights: torch.Tensor | None = None  # [N, …]


Part = Jagged | torch.Tensor  # a tensor: [samples, …]


@dataclass(frozen=True)
class Structure:
    """Parts of a batch with samples, in order, and a description that must be equal on all ranks.

    `description`: by its path in the batch, the kind of each part and each other value. `features`:
    for each occurrence of a feature in the batch, its ids and their number per sample.
    """

    batch: Any
    samples: int
    parts: list[Part]
    description: dict[str, str]
    features: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]

    @classmethod
    def of(cls, batch: Any) -> "Structure":
        """Return the structure of a batch; raise OperError if it has parts that cannot be
        dispatched."""
        leaves: list[tuple[Any, str, str]] = []
        _replace(batch, "", "", lambda leaf, *path: leaves.append((_as_tensor(leaf), *path)))
        samples = _samples(leaves, batch)
        parts: list[Part] = []
        description: dict[str, str] = {}
        features: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for leaf, path, name in leaves:
            if isinstance(leaf, _JAGGED):
                keys = list(leaf.keys()) if isinstance(leaf, KeyedJaggedTensor) else [name]
                part = _jagged(leaf, len(keys), samples)
                parts.append(part)
                by_feature = part.values.split(part.lengths.sum(dim=1).tolist())
                for key, ids, lengths in zip(keys, by_feature, part.lengths, strict=True):
                    features.setdefault(key, []).append((ids, lengths))
                description[path] = f"{type(leaf).__name__} of {', '.join(keys)}; {_types(part)}"
            elif _has_samples(leaf):
                _check_samples(leaf, path, samples)
                parts.append(leaf.detach())
                description[path] = f"samples of {_shape(leaf.shape[1:])} {leaf.dtype}"
            else:
                description[path] = _constant(leaf)
        return cls(batch, samples, parts, description, features)

    @property
    def digest(self) -> bytes:
        """Digest that is equal for batches of equal structure."""
        return hashlib.sha256(repr(self.description).encode()).digest()[:16]

    def with_parts(self, parts: Iterable[Part], samples: int) -> Any:
        """Return a batch like this one, with other samples."""
        left = iter(parts)

        def filled(leaf: Any, path: str, name: str) -> Any:
            if isinstance(leaf, _JAGGED):
                return _like(leaf, next(left), samples)
            if not _has_samples(_as_tensor(leaf)):
                return leaf
            part = next(left)
            assert isinstance(part, torch.Tensor)
            return part.numpy() if isinstance(leaf, np.ndarray) else part

        return _replace(self.batch, "", "", filled)


def _replace(given: Any, path: str, name: str, function: _OfLeaf) -> Any:
    """Return a copy of a batch in which each leaf is replaced by `function` of the leaf, its path
    and the path's last name."""
    numbers = isinstance(given, np.ndarray) and given.dtype.kind in "biufc"
    if numbers or isinstance(given, _LEAVES):
        return function(given, path or "the batch", name)
    if isinstance(given, tuple | list):
        items = [_replace(item, f"{path}[{n}]", str(n), function) for n, item in enumerate(given)]
        return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
    if isinstance(given, dict):
        filled = copy.copy(given)
        for key, item in given.items():
            filled[key] = _replace(item, f"{path}[{key!r}]", str(key), function)
        return filled
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        made: Any = copy.copy(given)
        for field in dataclasses.fields(given):
            value = getattr(given, field.name)
            item = _replace(value, f"{path}.{field.name}", field.name, function)
            object.__setattr__(made, field.name, item)  # frozen dataclasses refuse setattr
        return made
    raise OperError(
        f"{path or 'the batch'}: expected KeyedJaggedTensors, JaggedTensors, tensors or arrays of "
        f"numbers, in tuples, lists, dicts or dataclasses, got {type(given).__name__}; convert it "
        "before"
    )


def _as_tensor(leaf: Any) -> Any:
    """Return a leaf, or an equal tensor if it is an array of numbers."""
    return as_tensor(leaf).reshape(leaf.shape) if isinstance(leaf, np.ndarray) else leaf


def _samples(leaves: list[tuple[Any, str, str]], batch: Any) -> int:
    """Return the number of samples, which all jagged parts of a batch share."""
    path_of: dict[int, str] = {}
    for leaf, path, _ in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
            raise OperError(
                f"{path}: expected a dense tensor, or a KeyedJaggedTensor, got a nested or sparse "
                "one"
            )
        if isinstance(leaf, (*_JAGGED, torch.Tensor)) and not _on_cpu(leaf):
            raise OperError(
                f"{path}: does not lie on the CPU, and ranks exchange samples in the host's "
                "memory: let the loader yield CPU tensors, and move batches to devices afterwards"
            )
        if isinstance(leaf, KeyedJaggedTensor):
            if leaf.variable_stride_per_key() or leaf.inverse_indices_or_none() is not None:
                raise OperError(
                    f"{path}: expected one batch size for all features, got features with batch "
                    "sizes of their own (variable batch), which have no samples to move"
                )
            if leaf.keys():
                path_of.setdefault(leaf.stride(), path)
        elif isinstance(leaf, JaggedTensor):
            path_of.setdefault(len(leaf.lengths()), path)
    if not path_of:
        raise OperError(
            f"expected a batch with a KeyedJaggedTensor or a JaggedTensor, got "
            f"{type(batch).__name__} without one"
        )
    if len(path_of) > 1:
        (one, first), (two, second) = list(path_of.items())[:2]
        raise OperError(
            f"{first} has {one} samples and {second} has {two}: all parts of a batch must have as "
            "many"
        )
    return next(iter(path_of))


def _on_cpu(leaf: Any) -> bool:
    tensor = leaf if isinstance(leaf, torch.Tensor) else leaf.values()
    return bool(tensor.device.type == "cpu")


def _jagged(leaf: Any, features: int, samples: int) -> Jagged:
    lengths = leaf.lengths().detach().reshape(features, samples)
    weights = leaf.weights_or_none()
    values = leaf.values().detach()
    # Values may be padded beyond the sum of the lengths.
    total = int(lengths.sum())
    return Jagged(lengths, values[:total], None if weights is None else weights.detach()[:total])


def _like(leaf: Any, part: Part, samples: int) -> Any:
    assert isinstance(part, Jagged)
    common = {"values": part.values, "weights": part.weights, "lengths": part.lengths.reshape(-1)}
    if isinstance(leaf, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=list(leaf.keys()), stride=samples, **common)
    return JaggedTensor(**common)


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _check_samples(leaf: torch.Tensor, path: str, samples: int) -> None:
    if len(leaf) != samples:
        raise OperError(
            f"{path}: expected a tensor whose first dimension is the batch's {samples} samples, "
            f"got shape {list(leaf.shape)}; give what is no sample's as a number or a tuple of "
            "numbers, or keep it out of the loader"
        )


def _types(part: Jagged) -> str:
    lists = {"lengths": part.lengths, "values": part.values, "weights": part.weights}
    kinds = [
        f"{name} {_shape(array.shape[1:]) if name != 'lengths' else ''} {array.dtype}"
        for name, array in lists.items()
        if array is not None
    ]
    return ", ".join(" ".join(kind.split()) for kind in kinds)


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def _constant(leaf: Any) -> str:
    """Describe a value that has no samples, which must be equal on all ranks."""
    return f"{leaf.dtype} {leaf.item()!r}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def first_difference(descriptions: Mapping[int, dict[str, str]]) -> str:
    """Return the first difference between two ranks whose batches have different structures."""
    (one, first), *others = descriptions.items()
    for two, its in others:
        for path in (*first, *its):
            if first.get(path) != its.get(path):
                return (
                    f"{path}: rank {one} has {first.get(path, 'nothing')}, and rank {two} "
                    f"{its.get(path, 'nothing')}"
                )
    return "the order of its parts"


def choose(part: Part, samples: torch.Tensor) -> Part:
    """Return some samples of a part, by their numbers, in that order."""
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
    """Return the samples of several parts, one after the other."""
    jagged = [piece for piece in pieces if isinstance(piece, Jagged)]
    if not jagged:
        return torch.cat([piece for piece in pieces if isinstance(piece, torch.Tensor)])
    sizes = [piece.lengths.sum(dim=1).tolist() for piece in jagged]

    def by_feature(columns: list[torch.Tensor]) -> torch.Tensor:
        split = [column.split(size) for column, size in zip(columns, sizes, strict=True)]
        bags = [of_piece for feature in zip(*split, strict=True) for of_piece in feature]
        return torch.cat([columns[0][:0], *bags])  # a batch may have no features

    weights = [piece.weights for piece in jagged if piece.weights is not None]
    return Jagged(
        torch.cat([piece.lengths for piece in jagged], dim=1),
        by_feature([piece.values for piece in jagged]),
        by_feature(weights) if weights else None,
    )


def to_bytes(parts: Sequence[Part]) -> torch.Tensor:
    """Return the bytes of n samples, uint8, part after part: of jagged parts their lengths [F, n],
    then the values of each feature, then the weights; of tensors their rows. The ranks' batches
    have equal structures, so a receiver only has to know n. Every array begins at a multiple of 16
    bytes."""
    arrays = []
    for part in parts:
        arrays += [part] if isinstance(part, torch.Tensor) else [part.lengths, part.values]
        if isinstance(part, Jagged) and part.weights is not None:
            arrays.append(part.weights)
    pieces = [torch.empty(0, dtype=torch.uint8)]
    for array in arrays:
        content = _bytes_of(array)
        pieces += [content, content.new_zeros(-len(content) % _ALIGNMENT)]
    return torch.cat(pieces)


def from_bytes(content: torch.Tensor, like: Sequence[Part], samples: int) -> list[Part]:
    """Read `samples` samples from the bytes of `to_bytes`; `like` are parts of equal structure."""
    position = 0

    def next_array(rows: int, model: torch.Tensor) -> torch.Tensor:
        nonlocal position
        shape = (rows, *model.shape[1:])
        size = torch.Size(shape).numel() * model.element_size()
        array = content[position : position + size].view(model.dtype).reshape(shape)
        position += size + -size % _ALIGNMENT
        return array

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


def _bytes_of(array: torch.Tensor) -> torch.Tensor:
    """Return the content of a tensor, uint8. An empty tensor may have strides that do not allow a
    view."""
    if array.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return array.contiguous().reshape(-1).view(torch.uint8)
