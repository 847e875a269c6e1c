"""The inputs of a step that is captured: copies in memory that stays, into which those of each
later step are copied.

Inputs are tensors and KeyedJaggedTensors on the model's device, numbers, text and None, and lists,
tuples, dicts and dataclasses of such. Only the values of tensors may differ from step to step.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.base.errors import OperError

_LEAVES = (torch.Tensor, KeyedJaggedTensor, bool, int, float, complex, str, bytes, type(None))


class StaticBatch(KeyedJaggedTensor):
    """A KeyedJaggedTensor of memory that stays. `counts_used` says whether somebody asked the host
    how many values its keys have, so that those of later batches must have as many; `by_lengths`,
    whether its lengths were given, and not its offsets."""

    counts_used = by_lengths = False

    def length_per_key(self) -> list[int]:
        self.counts_used = True
        return super().length_per_key()

    def length_per_key_or_none(self) -> list[int] | None:
        self.counts_used = True
        return super().length_per_key_or_none()

    def offset_per_key(self) -> list[int]:
        self.counts_used = True
        return super().offset_per_key()

    def offset_per_key_or_none(self) -> list[int] | None:
        self.counts_used = True
        return super().offset_per_key_or_none()


class Inputs:
    """The inputs of one step: what is in them, and the `structure` that it is in. OperError where
    there is something that a captured step cannot have."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        self.given = given
        self.leaves: list[Any] = []
        self.structure = _structure(given, self.leaves)

    def like(self, other: "Inputs") -> bool:
        """Whether these differ from others in the values of tensors alone."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.structure == other.structure and all(_alike(*pair) for pair in pairs)

    def check_on(self, device: torch.device) -> None:
        """OperError where a tensor is elsewhere."""
        for leaf in self.leaves:
            place = leaf.device() if isinstance(leaf, KeyedJaggedTensor) else _place(leaf, device)
            if place != device:
                raise OperError(
                    f"a step's inputs have a tensor on {place}, and the step is captured on "
                    f"{device}: put the batch there before"
                )


class StaticInputs:
    """Copies of inputs, `arguments`, into which others are copied."""

    def __init__(self, inputs: Inputs) -> None:
        self.arguments: tuple[Any, ...] = mapped(inputs.given, _copied)
        self._copies = Inputs(self.arguments)
        self._tensors = [part for leaf in self._copies.leaves for part in _tensors(leaf, leaf)]

    def fit(self, inputs: Inputs) -> bool:
        """Whether others can be in the place of these."""
        if not inputs.like(self._copies):
            return False
        used = (pair for pair in self._pairs(inputs) if pair[0].counts_used)
        return all(_counts(new) == _counts(old) for old, new in used)

    def fill(self, inputs: Inputs) -> dict[int, Any]:
        """Copy inputs that fit into these. The batches among them, by the `id` of those whose place
        they take."""
        pairs = zip(self._copies.leaves, inputs.leaves, strict=True)
        given = [part for old, new in pairs for part in _tensors(new, old)]
        if given:
            with torch.no_grad():
                torch._foreach_copy_(self._tensors, given, non_blocking=True)
        return {id(old): new for old, new in self._pairs(inputs)}

    def _pairs(self, inputs: Inputs) -> list[tuple[StaticBatch, KeyedJaggedTensor]]:
        pairs = zip(self._copies.leaves, inputs.leaves, strict=True)
        return [(old, new) for old, new in pairs if isinstance(old, StaticBatch)]


def mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    """Inputs, or what a step returns, with what `of` makes of each leaf in the place of it."""
    if isinstance(value, _LEAVES):
        return of(value)
    if isinstance(value, dict):
        return {key: mapped(each, of) for key, each in value.items()}
    if isinstance(value, tuple | list):
        parts = [mapped(each, of) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not _is_dataclass(value):
        raise _unknown(value)
    names = _field_names(value)
    return dataclasses.replace(value, **{name: mapped(getattr(value, name), of) for name in names})


def _structure(value: Any, leaves: list[Any]) -> Hashable:
    """What a value is, but for its leaves, which are appended."""
    if isinstance(value, _LEAVES):
        leaves.append(value)
        return None
    if isinstance(value, tuple | list):
        return (type(value), *(_structure(each, leaves) for each in value))
    if isinstance(value, dict):
        return (type(value), *((key, _structure(each, leaves)) for key, each in value.items()))
    if not _is_dataclass(value):
        raise _unknown(value)
    names = _field_names(value)
    return (type(value), *(_structure(getattr(value, name), leaves) for name in names))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if field.init]


def _unknown(value: Any) -> OperError:
    return OperError(
        f"a captured step is given, or returns, a {type(value).__name__}; tensors, "
        "KeyedJaggedTensors, numbers and text, and lists, tuples, dicts and dataclasses of them "
        "were needed"
    )


def _place(leaf: Any, otherwise: torch.device) -> torch.device:
    return leaf.device if isinstance(leaf, torch.Tensor) else otherwise


def _alike(one: Any, other: Any) -> bool:
    """Whether two leaves differ in the values of tensors alone."""
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
    parts = ((b.values(), b.weights_or_none()) for b in (one, other))
    return all(_alike(*pair) for pair in zip(*parts, strict=True))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _copy(leaf)
    if not isinstance(leaf, KeyedJaggedTensor):
        return leaf
    weights, lengths, offsets = leaf.weights_or_none(), leaf.lengths_or_none(), None
    if lengths is None:
        offsets = leaf.offsets()
    copied = StaticBatch(
        list(leaf.keys()),
        _copy(leaf.values()),
        None if weights is None else _copy(weights),
        None if lengths is None else _copy(lengths),
        None if offsets is None else _copy(offsets),
        leaf.stride(),
        length_per_key=leaf.length_per_key_or_none(),
    )
    copied.by_lengths = lengths is not None
    return copied


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tensors(leaf: Any, like: Any) -> Sequence[torch.Tensor]:
    """The tensors of a leaf; of a batch, its lengths or its offsets as a static one has them."""
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
