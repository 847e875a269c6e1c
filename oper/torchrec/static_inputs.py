"""Inputs of a captured step: copies in fixed memory, into which the inputs of each later step are
copied.

Inputs are tensors and KeyedJaggedTensors on the model's device, numbers, text and None, and lists,
tuples, dicts and dataclasses of such. Only the values of tensors may differ from step to step.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.base.errors import OperError

Batch = TypeVar("Batch", bound=KeyedJaggedTensor)

_LEAVES = (torch.Tensor, KeyedJaggedTensor, bool, int, float, complex, str, bytes, type(None))


class StaticBatch(KeyedJaggedTensor):
    """KeyedJaggedTensor in fixed memory, or made from one by `to`. `counts_used`: the host has read
    the numbers of values of its keys, so those of later batches must be equal. `by_lengths`: it was
    made from lengths, not from offsets."""

    by_lengths = False
    _source: "StaticBatch | None" = None
    _asked = False

    @property
    def counts_used(self) -> bool:
        return self._asked

    def _ask(self) -> None:
        self._asked = True
        if self._source is not None:
            self._source._ask()

    def length_per_key(self) -> list[int]:
        self._ask()
        return super().length_per_key()

    def length_per_key_or_none(self) -> list[int] | None:
        self._ask()
        return super().length_per_key_or_none()

    def offset_per_key(self) -> list[int]:
        self._ask()
        return super().offset_per_key()

    def offset_per_key_or_none(self) -> list[int] | None:
        self._ask()
        return super().offset_per_key_or_none()

    def to(self, *arguments: Any, **named: Any) -> KeyedJaggedTensor:
        """Move the batch like KeyedJaggedTensor; the result has its counts too."""
        moved = super().to(*arguments, **named)
        if moved is not self:
            moved.__class__ = StaticBatch
            moved._source = self
        return moved


class Inputs:
    """Inputs of one step: leaves, and their `structure`. Raises OperError for a value that a
    captured step cannot have."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        self.given = given
        self.leaves: list[Any] = []
        self.structure = _structure(given, self.leaves)

    def like(self, other: "Inputs", counts_too: bool = False) -> bool:
        """Return whether these differ from others only in the values of tensors; with `counts_too`,
        also not in the numbers of values of keys, as far as the host knows them."""
        if self.structure != other.structure:
            return False
        pairs = list(zip(self.leaves, other.leaves, strict=True))
        if not all(_alike(*pair) for pair in pairs):
            return False
        if not counts_too:
            return True
        counts = ([_counts(b) for b in pair] for pair in pairs if _is_batch(pair[0]))
        return all(None in both or both[0] == both[1] for both in counts)

    def check_on(self, device: torch.device) -> None:
        """Raise OperError if a tensor is elsewhere."""
        for place in (tensor.device for leaf in self.leaves for tensor in _given_tensors(leaf)):
            if place != device:
                raise OperError(
                    f"expected a step's inputs on {device}, got a tensor on {place}: put the batch "
                    "there before"
                )


class StaticInputs:
    """Copies of inputs, `arguments`, into which others on the same device are copied: a copy from
    the host's memory would read it after the caller has put the next batch there."""

    def __init__(self, inputs: Inputs) -> None:
        self.arguments: tuple[Any, ...] = mapped(inputs.given, _copied)
        self._copies = Inputs(self.arguments)
        self._tensors = [part for leaf in self._copies.leaves for part in _tensors(leaf, leaf)]

    def fit(self, inputs: Inputs) -> bool:
        """Return whether other inputs can replace these."""
        if not inputs.like(self._copies):
            return False
        used = (pair for pair in self._pairs(inputs) if pair[0].counts_used)
        return all(_counts(new) == _counts(old) for old, new in used)

    def fill(self, inputs: Inputs) -> dict[int, Any]:
        """Copy fitting inputs into these. Return the batches among them, by the `id` of the batches
        that they replace."""
        pairs = zip(self._copies.leaves, inputs.leaves, strict=True)
        sources = [part for old, new in pairs for part in _tensors(new, old)]
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._tensors, sources, non_blocking=True)
        return {id(old): new for old, new in self._pairs(inputs)}

    def _pairs(self, inputs: Inputs) -> list[tuple[StaticBatch, KeyedJaggedTensor]]:
        pairs = zip(self._copies.leaves, inputs.leaves, strict=True)
        return [(old, new) for old, new in pairs if isinstance(old, StaticBatch)]


def mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    """Return inputs, or a step's result, with `of` applied to each leaf."""
    if isinstance(value, _LEAVES):
        return of(value)
    if isinstance(value, dict):
        made = copy.copy(value)  # of the same class
        made.update({key: mapped(item, of) for key, item in value.items()})
        return made
    if isinstance(value, tuple | list):
        parts = [mapped(item, of) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not _is_dataclass(value):
        raise _unknown(value)
    names = _field_names(value)
    return dataclasses.replace(value, **{name: mapped(getattr(value, name), of) for name in names})


def _structure(value: Any, leaves: list[Any]) -> Hashable:
    """Return the structure of a value, and append its leaves."""
    if isinstance(value, _LEAVES):
        leaves.append(value)
        return None
    if isinstance(value, tuple | list):
        return (type(value), *(_structure(item, leaves) for item in value))
    if isinstance(value, dict):
        return (dict, *((key, _structure(item, leaves)) for key, item in value.items()))
    if not _is_dataclass(value):
        raise _unknown(value)
    names = _field_names(value)
    return (type(value), *(_structure(getattr(value, name), leaves) for name in names))


def _is_batch(value: Any) -> bool:
    return isinstance(value, KeyedJaggedTensor)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if field.init]


def _unknown(value: Any) -> OperError:
    return OperError(
        "a captured step: expected it to take and return tensors, KeyedJaggedTensors, numbers and "
        "text, and lists, tuples, dicts and dataclasses of them, got a "
        f"{type(value).__name__}: give and return those alone"
    )


def _alike(one: Any, other: Any) -> bool:
    """Return whether two leaves differ only in the values of tensors."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and one.requires_grad == other.requires_grad
        )
    if not isinstance(one, KeyedJaggedTensor):
        return type(one) is type(other) and bool(one == other)
    if not isinstance(other, KeyedJaggedTensor):
        return False
    if one.stride() != other.stride() or one.keys() != other.keys():
        return False
    if _size_of_lengths(one) != _size_of_lengths(other):
        return False
    parts = ((b.values(), b.weights_or_none()) for b in (one, other))
    return all(_alike(*pair) for pair in zip(*parts, strict=True))


def _size_of_lengths(batch: KeyedJaggedTensor) -> int:
    lengths = batch.lengths_or_none()
    return batch.offsets().numel() - 1 if lengths is None else int(lengths.numel())


def cloned(leaf: Any) -> Any:
    """Return a copy of a leaf of a step's result."""
    if isinstance(leaf, KeyedJaggedTensor):
        return _copied_batch(leaf, KeyedJaggedTensor)
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _copy(leaf)
    if not isinstance(leaf, KeyedJaggedTensor):
        return leaf
    copied = _copied_batch(leaf, StaticBatch)
    copied.by_lengths = leaf.lengths_or_none() is not None
    return copied


def _copied_batch(batch: KeyedJaggedTensor, kind: type[Batch]) -> Batch:
    weights, lengths, offsets = batch.weights_or_none(), batch.lengths_or_none(), None
    if lengths is None:
        offsets = batch.offsets()
    return kind(
        list(batch.keys()),
        _copy(batch.values()),
        None if weights is None else _copy(weights),
        None if lengths is None else _copy(lengths),
        None if offsets is None else _copy(offsets),
        batch.stride(),
        length_per_key=_counts(batch),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _given_tensors(leaf: Any) -> Sequence[torch.Tensor]:
    """Return the tensors from which a leaf was made."""
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    if not isinstance(leaf, KeyedJaggedTensor):
        return ()
    parts = (leaf.values(), leaf.weights_or_none(), leaf.lengths_or_none(), leaf.offsets_or_none())
    return [part for part in parts if part is not None]


def _tensors(leaf: Any, like: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a leaf; for a batch, lengths or offsets, whichever `like` has."""
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    if not isinstance(leaf, KeyedJaggedTensor):
        return ()
    sizes = leaf.lengths() if like.by_lengths else leaf.offsets()
    weights = leaf.weights_or_none()
    return (leaf.values(), sizes) if weights is None else (leaf.values(), sizes, weights)


def _counts(batch: KeyedJaggedTensor) -> list[int] | None:
    counts: list[int] | None = KeyedJaggedTensor.length_per_key_or_none(batch)
    return counts
