"""Index of a checkpoint: its tensors and objects, their shards, and the places of these.

torch.distributed.checkpoint writes it as a pickle, `.metadata`, which index_pickle.py reads without
running any of it. The stand-ins that it returns are checked here and become dataclasses.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from oper.base.errors import OperError, one_line
from oper.checkpoint.index_pickle import Stand, load_index
from oper.files.input_files import Kind, open_file
from oper.files.manifest import is_file_name

INDEX = ".metadata"
# A shard has about 200 bytes in it; 16 TB of tables in shards of 16 MB have a million.
_KIND = Kind("the index of a checkpoint", 2 << 30)
_MOST_DIMENSIONS = 64  # of a tensor of torch's
_MOST_CUT_DIMENSIONS = 6  # savers cut rows, columns, and meshes of a few dimensions


@dataclass(frozen=True)
class Extent:
    """Place of a part: bytes [start, start + bytes) of a file of the folder."""

    file: str
    start: int
    bytes: int


@dataclass(frozen=True)
class Shard:
    """Part of a tensor: `sizes` values from `offsets` on, at the place `extent`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True)
class SavedTensor:
    """Tensor of a checkpoint. Its shards are in the order of their offsets."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @cached_property
    def _first_rows(self) -> list[int] | None:
        """First rows of the shards, if all have whole rows."""
        whole = all(shard.sizes[1:] == self.shape[1:] for shard in self.shards)
        return [shard.offsets[0] for shard in self.shards] if whole else None

    def shards_of(self, first: int, rows: int) -> Iterator[Shard]:
        """Yield the shards that have some of the rows [first, first + rows)."""
        begins = self._first_rows
        at = 0 if begins is None else bisect_right(begins, first) - 1
        for shard in self.shards[at:]:
            if shard.offsets[0] >= first + rows:
                return
            if shard.offsets[0] + shard.sizes[0] > first:
                yield shard

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: all values with one first index."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        """Bytes of its values."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class SavedIndex:
    """Content of a checkpoint: tensors, and objects such as learning rates, by their names.

    `paths` has the keys and numbers by which nested dicts and lists lead to each, as torch keeps
    them; it is empty if the saver did not flatten its state dict.
    """

    tensors: dict[str, SavedTensor]
    objects: dict[str, Extent]
    paths: dict[str, tuple[str | int, ...]]

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Yield every part that lies in files, with its name."""
        for tensor in self.tensors.values():
            for shard in tensor.shards:
                yield tensor.name, shard.extent
        yield from self.objects.items()


def read_index(folder: Path | str) -> SavedIndex:
    """Read the index of a checkpoint; raise OperError if it is missing or unsound."""
    path = Path(folder) / INDEX
    with open_file(path, _KIND) as file:
        try:
            content = load_index(file)
        except OperError as error:
            raise OperError(f"{path}: {error}") from error
        except Exception as error:  # A damaged pickle may raise anything.
            raise OperError(
                f"{path}: is not a readable index of a checkpoint ({one_line(error)}); it is "
                "damaged or incomplete: copy or write the checkpoint again"
            ) from error
    try:
        return _index(content)
    except _UnsoundError as error:
        raise OperError(
            f"{path}: {error}; it is damaged, or of another version of torch: copy or write the "
            "checkpoint again"
        ) from error


class _UnsoundError(Exception):
    """Content of an index that no saver writes."""


def _index(content: Any) -> SavedIndex:
    whole = _fields(content, "Metadata")
    described = _dict(whole.get("state_dict_metadata"), "the list of what was saved")
    places: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
    for index, info in _dict(whole.get("storage_data"), "the list of places").items():
        fields = _fields(index, "MetadataIndex")
        part, offset = _text(fields.get("fqn")), fields.get("offset")
        places[part, None if offset is None else _numbers(offset)] = _extent(info)
    tensors: dict[str, SavedTensor] = {}
    objects: dict[str, Extent] = {}
    for key, entry in described.items():
        name = _text(key)
        if _kind(entry) == "BytesStorageMetadata":
            objects[name] = _found(places, name, None)
        else:
            tensors[name] = _tensor(name, _fields(entry, "TensorStorageMetadata"), places)
    paths = _paths(whole.get("planner_data"), {*tensors, *objects})
    return SavedIndex(tensors, objects, paths)


def _tensor(
    name: str,
    fields: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...] | None], Extent],
) -> SavedTensor:
    shape = _numbers(fields.get("size"))
    properties = fields.get("properties")
    if _kind(properties) != "TensorProperties":
        raise _UnsoundError(f"{name[:80]!r} has no properties of a tensor")
    state = getattr(properties, "state", None)
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise _UnsoundError(f"{name[:80]!r} has no dtype")
    shards = []
    for chunk in _list(fields.get("chunks"), name):
        part = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(part.get("offsets")), _numbers(part.get("sizes"))
        inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= most for offset, size, most in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise _UnsoundError(
                f"{name[:80]!r} of shape {shape} has a shard of {sizes} at {offsets}"
            )
        # Empty shards, such as those of ranks beyond the last row, may have no place.
        if math.prod(sizes) or not sizes:
            shards.append(Shard(offsets, sizes, _found(places, name, offsets)))
    held = sum(math.prod(shard.sizes) for shard in shards)
    if held != math.prod(shape):
        raise _UnsoundError(
            f"{name[:80]!r} of shape {shape} has shards of {held} values instead of "
            f"{math.prod(shape)}"
        )
    shards.sort(key=lambda each: each.offsets)
    if not _tile(shape, shards):
        raise _UnsoundError(f"{name[:80]!r} has two shards of the same values")
    return SavedTensor(name, dtype, shape, tuple(shards))


def _tile(shape: tuple[int, ...], shards: Sequence[Shard]) -> bool:
    """Return whether each value of a tensor is in one shard.

    The number of shards that have a value is determined by its differences along all dimensions,
    which are non-zero only at corners of shards: they must be those of the whole tensor.
    """
    cut = [d for d, size in enumerate(shape) if any(shard.sizes[d] != size for shard in shards)]
    if len(cut) > _MOST_CUT_DIMENSIONS:
        raise _UnsoundError(f"has shards that are cut along {len(cut)} dimensions")
    differences: Counter[tuple[int, ...]] = Counter()
    whole = ((0,) * len(shape), shape, -1)
    for offsets, sizes, sign in (*((each.offsets, each.sizes, 1) for each in shards), whole):
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
            differences[corner] += -sign if sum(ends) % 2 else sign
    return not any(differences.values()) or not math.prod(shape)


def _found(
    places: Mapping[tuple[str, tuple[int, ...] | None], Extent],
    name: str,
    offsets: tuple[int, ...] | None,
) -> Extent:
    try:
        return places[name, offsets]
    except KeyError:
        at = "" if offsets is None else f" at {offsets}"
        raise _UnsoundError(f"{name[:80]!r} has no place for its part{at}") from None


def _extent(info: Any) -> Extent:
    fields = _fields(info, "_StorageInfo")
    file = PurePosixPath(_text(fields.get("relative_path")))
    inside = not file.is_absolute() and ".." not in file.parts and "\0" not in str(file)
    if not inside or not is_file_name(str(file)):
        raise _UnsoundError(f"a part lies in {str(file)[:80]!r}, which is no file of the folder")
    if fields.get("transform_descriptors"):
        raise _UnsoundError("parts were encoded by an extension of torch's, which oper cannot read")
    start, length = _numbers((fields.get("offset"), fields.get("length")))
    return Extent(str(file), start, length)


def _paths(given: Any, names: set[str]) -> dict[str, tuple[str | int, ...]]:
    """Return the paths of the names, from savers that flatten nested state dicts."""
    if given is None:
        return {}
    paths = {}
    for name, path in _dict(given, "the list of paths").items():
        good = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        if not good or type(path[0]) is not str:
            raise _UnsoundError(f"{_text(name)[:80]!r} has no path")
        if name in names:
            paths[name] = path
    return paths


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Stand) else type(value).__name__


def _fields(value: Any, kind: str) -> Mapping[str, Any]:
    if _kind(value) != kind or not isinstance(value.state, dict):
        raise _UnsoundError(f"holds a {_kind(value)[:40]} instead of a {kind}")
    return value.state


def _dict(value: Any, what: str) -> Mapping[Any, Any]:
    if isinstance(value, Stand) and value.kind == "OrderedDict":
        value = value.state
    if not isinstance(value, dict):
        raise _UnsoundError(f"has a {_kind(value)[:40]} for {what}")
    return value


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _UnsoundError(f"{name[:80]!r} has no list of shards")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _UnsoundError(f"has a {_kind(value)[:40]} for a name")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Return sizes or offsets: whole numbers from 0 to 2⁶³."""
    if isinstance(value, Stand) and value.kind == "Size" and len(value.arguments) == 1:
        (value,) = value.arguments
    good = isinstance(value, list | tuple) and len(value) <= _MOST_DIMENSIONS
    if not good or any(type(part) is not int or not 0 <= part < 1 << 63 for part in value):
        raise _UnsoundError(f"has a {_kind(value)[:40]} for sizes, which is none")
    return tuple(value)
