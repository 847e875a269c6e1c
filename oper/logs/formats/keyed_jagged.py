"""Logs in memory: any iterable of batches that hold TorchRec `KeyedJaggedTensor`s.

A batch is one of them, or a container of some: tuples, dictionaries, objects such as
`torchrec.datasets.utils.Batch`, also nested. Together they have the features of its samples. An
object's `labels` and `dense_features` are read as well. Weights are ignored, because they are not
accesses.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from oper.base.errors import OperError
from oper.logs.batches.batch import Batch, Jagged, Location
from oper.logs.batches.columns import Column, Selection

# A batch may refer to objects of these types, which hold no ids of its samples.
_NO_BATCH = (torch.Tensor, torch.nn.Module, ModuleType, type)


class KjtSource:
    """A stream of batches. An iterator can be read once; a list or a loader several times."""

    name = "KeyedJaggedTensor batches"

    def __init__(self, batches: Iterable[Any]) -> None:
        self.samples: int | None = None
        self._batches = batches
        self._once = iter(batches) if iter(batches) is batches else None
        self._read = False
        # The first batch tells the columns; an iterator's is kept for the only pass.
        first = next(iter(self._once or batches), None)
        if first is None:
            raise OperError(f"{self.name}: the iterable is empty")
        self._kept = [first] if self._once is not None else []
        self.columns = tuple(Column(key, bags=True) for key in _features(first, self._where(0)))

    def count(self) -> int:
        """Return the number of samples."""
        return sum(
            samples_of(keyed_jagged_tensors(batch), self._where(n))
            for n, batch in enumerate(self._pass())
        )

    def estimate(self) -> None:
        """Return None: the length of an iterable is unknown."""

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in order."""
        for index, content in enumerate(self._pass()):
            location = Location(self._where(index), 0, "sample")
            held = _features(content, location.file)
            missing = set(selection.features).difference(held)
            if missing:
                raise OperError(f"{location.file}: has no key {min(missing)!r}")
            batch = Batch(
                samples_of(keyed_jagged_tensors(content), location.file),
                {name: jagged(held[name][name], name, location) for name in selection.features},
                location,
                label=_array(content, "labels"),
                dense=_array(content, "dense_features"),
            )
            for start in range(0, batch.samples, selection.batch_rows):
                yield batch.slice(start, start + selection.batch_rows)

    def _where(self, index: int) -> str:
        return f"{self.name}, batch {index}"

    def _pass(self) -> Iterator[Any]:
        if self._once is None:
            yield from self._batches
            return
        if self._read:
            raise OperError(
                f"{self.name}: an iterator can be read only once, and this needs another pass; "
                "give a list or a loader. One pass is enough where the tables' rows are stated and "
                "the log is not divided into a number of windows or a held-out part"
            )
        self._read = True
        yield from self._kept
        self._kept = []
        yield from self._once


def keyed_jagged_tensors(given: Any) -> list[Any]:
    """Return all KeyedJaggedTensors in a batch, in the order of its parts.

    Raise OperError if its objects are nested too deeply.
    """
    tensors: list[Any] = []
    try:
        _collect(given, tensors, {})
    except RecursionError as error:
        raise OperError(
            f"a batch, {type(given).__name__}: holds objects in each other, too deep to look "
            "through; give batches that hold little beside their KeyedJaggedTensors"
        ) from error
    return tensors


def _collect(given: Any, found: list[Any], seen: dict[int, Any]) -> None:
    # `seen` keeps the results of properties, so that no later object gets their id.
    if id(given) in seen or isinstance(given, _NO_BATCH):
        return
    seen[id(given)] = given
    if hasattr(given, "keys") and hasattr(given, "stride"):
        found.append(given)
        return
    parts = _parts(given)
    # A property makes them of the other parts, which would then be found twice.
    sparse = getattr(given, "sparse_features", None)
    if sparse is not None and not any(part is sparse for part in parts):
        parts = [sparse]
    for part in parts:
        _collect(part, found, seen)


def _parts(given: Any) -> list[Any]:
    """Return the content of a container or an object: values, items, attributes and slots."""
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, list | tuple):
        return list(given)
    names = list(getattr(given, "__dict__", ()))
    for kind in reversed(type(given).__mro__):
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [getattr(given, name) for name in dict.fromkeys(names) if hasattr(given, name)]


def samples_of(tensors: Sequence[Any], where: str) -> int:
    """Return the samples that all KeyedJaggedTensors of a batch have; raise OperError if they
    differ."""
    counts = {int(tensor.stride()) for tensor in tensors}
    if len(counts) > 1 or any(tensor.variable_stride_per_key() for tensor in tensors):
        raise OperError(
            f"{where}: its features are of different numbers of samples "
            f"({', '.join(map(str, sorted(counts)))}), and of each sample all features are needed: "
            "profile batches that have them, or tables of each kind of sample by themselves"
        )
    samples = counts.pop()
    for tensor in tensors:
        keys, lengths = list(tensor.keys()), tensor.lengths().numel()
        if lengths != samples * len(keys):
            raise OperError(
                f"{where}: expected a length per sample for each of the {len(keys)} keys "
                f"{', '.join(keys)[:200]}, got {lengths:,} lengths for {samples:,} samples"
            )
    return samples


def _features(given: Any, where: str) -> dict[str, Any]:
    """Return the KeyedJaggedTensor that holds each feature of a batch."""
    holder_of: dict[str, Any] = {}
    for tensor in keyed_jagged_tensors(given):
        for key in list(tensor.keys()):
            if key in holder_of:
                raise OperError(f"{where}: holds feature {key!r} twice; give each its own name")
            holder_of[key] = tensor
    if not holder_of:
        raise OperError(
            f"{where}: expected a KeyedJaggedTensor, or a batch that holds some, got "
            f"{type(given).__name__}"
        )
    return holder_of


def jagged(tensor: Any, name: str, location: Location) -> Jagged:
    """Return the ids of one feature, a JaggedTensor. Raise OperError if they are not integers, or
    its lengths do not fit its bags."""
    values = tensor.values().detach().cpu().numpy()
    lengths = tensor.lengths().detach().cpu().numpy()
    if values.ndim != 1:
        raise OperError(
            f"{location.file}: expected ids in one dimension for key {name!r}, got shape "
            f"{list(values.shape)}"
        )
    if not np.issubdtype(values.dtype, np.integer):
        raise OperError(
            f"{location.file}: expected integers as ids for key {name!r}, got {values.dtype}"
        )
    if len(lengths) and lengths.min() < 0:
        sample = int(lengths.argmin())
        raise OperError(
            f"{location.of(sample)}: expected lengths of at least 0 for key {name!r}, got "
            f"{lengths[sample]}"
        )
    if lengths.sum(dtype=np.int64) != len(values):
        raise OperError(
            f"{location.file}: expected lengths of key {name!r} that sum to its {len(values):,} "
            f"ids, got {lengths.sum(dtype=np.int64):,}"
        )
    return Jagged(values.astype(np.int64), lengths.astype(np.int32))


def _array(batch: Any, name: str) -> Any:
    tensor = getattr(batch, name, None)
    return None if tensor is None else tensor.detach().cpu().numpy().astype(np.float32)
