"""A stand-in for CUDA graphs, on the emulated device: the operators that a step calls, recorded and
called again.

As a graph, it knows tensors by where they lie, and numbers as they were; nothing is written to
what was there before while it is recorded; and it keeps none of that memory: where others have let
it go, it says so (DanglingError), in place of reading what may be anything's. Where the host looks
at a tensor of the device it says so too (HostReadsError).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.support.cuda.operator_places import is_on_host


class DanglingError(AssertionError):
    """A graph reads or writes memory that has been let go."""


class HostReadsError(RuntimeError):
    """The host looked at a tensor whose values are known once the graph has been run."""


# What allocates, and starts nothing; and what looks at values on the host.
_NO_WORK = {
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
}
_READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"}


class _Outside:
    """A tensor that was there before, by where it lies."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._place = tensor.dtype, int(tensor.storage_offset())
        self._sizes, self._strides = tensor.size(), tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise DanglingError(f"{self._dtype} {list(self._sizes)} is gone")
        return _view(storage, self._dtype, self._place, self._sizes, self._strides)


class Memory:
    """What a step's pieces have recorded of memory, by where it lies: the storages that were made
    in them, and, of others that they would write to, the copies that are written to in their
    place while nothing is to be run."""

    def __init__(self) -> None:
        self.inside: dict[int, torch.UntypedStorage] = {}
        self.piece: Any = None  # that is recorded now
        self.first: Any = None  # of the step's pieces
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._originals: dict[int, torch.UntypedStorage] = {}
        self._of_host: dict[int, torch.Tensor] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.inside

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.inside.setdefault(storage.data_ptr(), storage)

    def hold_for_host(self, result: Any) -> None:
        """What the host has of its own, and makes of that."""
        tensors = (x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor))
        self._of_host.update({x.untyped_storage().data_ptr(): x for x in tensors})

    def on_host(self, given: Sequence[Any]) -> bool:
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        places = [each.untyped_storage().data_ptr() for each in tensors]
        return bool(places) and all(place in self._of_host for place in places)

    def copy(self, storage: torch.UntypedStorage) -> None:
        """Have a copy in the place of a storage from now on."""
        place = storage.data_ptr()
        if storage.nbytes() and place not in self.inside and place not in self._copies:
            copied = self._copies[place] = storage.clone()
            self._originals[copied.data_ptr()] = storage

    def copied(self, each: Any) -> Any:
        return self._moved(each, self._copies)

    def original(self, each: Any) -> Any:
        return self._moved(each, self._originals)

    def poison(self) -> None:
        """Write over what was made in the step: what it does not make anew is anything's, as the
        memory of tensors that are let go is taken for others."""
        for storage in self.inside.values():
            _view(storage, torch.uint8, 0, [storage.nbytes()], [1]).fill_(0xA5)

    def forget(self) -> None:
        self._copies, self._originals, self._of_host = {}, {}, {}

    def _moved(self, each: Any, storages: Mapping[int, torch.UntypedStorage]) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        storage = storages.get(each.untyped_storage().data_ptr())
        if storage is None:
            return each
        return _view(storage, each.dtype, int(each.storage_offset()), each.size(), each.stride())


def _view(storage: Any, dtype: torch.dtype, place: int, sizes: Any, strides: Any) -> torch.Tensor:
    made = torch.empty(0, dtype=dtype)
    made.set_(storage, place, sizes, strides)
    return made


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without what autograd would go back to, which may be all of a batch."""
    place = int(tensor.storage_offset())
    storage = tensor.untyped_storage()
    return _view(storage, tensor.dtype, place, tensor.size(), tensor.stride())


class Recorded:
    """The operators of one piece of a step."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._calls: list[tuple[Any, list[Any], Any, list[Any]]] = []
        self._stack = ExitStack()

    def begin(self) -> None:
        self._memory.piece = self
        self._memory.first = self._memory.first or self
        self._stack.enter_context(_Recording(self._record))

    def end(self) -> bool:
        self._stack.close()
        return bool(self._calls)

    def _record(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self._memory.piece is not self:
            # Autograd goes back to the mode that its backward began in, for what it does last.
            return self._memory.piece._record(func, args, kwargs)
        name, memory = func.name().partition(".")[0], self._memory
        given, shape = tree_flatten((args, dict(kwargs)))
        if name == "aten::lift_fresh" or memory.on_host(given):  # of torch.tensor(…)
            result = func(*args, **kwargs)
            memory.hold_for_host(result)
            return result
        if name in _READS:
            if any(isinstance(each, torch.Tensor) and memory.has(each) for each in given):
                raise HostReadsError(name)
            return func(*args, **kwargs)
        for written in _written(func, args, kwargs):
            memory.copy(written.untyped_storage())
        for_host = _of_the_host(func, args)
        known = [each if id(each) in for_host else self._known(each) for each in given]
        copied = [memory.copied(each) for each in given]
        args, kwargs = tree_unflatten(copied, shape)
        results, of_results = tree_flatten(func(*args, **kwargs))
        same = {id(copy): each for copy, each in zip(copied, given, strict=True)}
        results = [same.get(id(each), memory.original(each)) for each in results]
        for each in results:
            if isinstance(each, torch.Tensor) and not self._is_of(each, given):
                memory.hold(each)
        if name not in _NO_WORK:
            made = [
                _alone(each) if isinstance(each, torch.Tensor) and memory.has(each) else None
                for each in results
            ]
            self._calls.append((func, known, shape, made))
        return tree_unflatten(results, of_results)

    def _is_of(self, each: torch.Tensor, given: Sequence[Any]) -> bool:
        """Whether a result lies in the memory of an argument."""
        place = each.untyped_storage().data_ptr()
        tensors = (x for x in given if isinstance(x, torch.Tensor))
        return any(x.untyped_storage().data_ptr() == place for x in tensors)

    def _known(self, each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or each.untyped_storage().nbytes() == 0:
            return each
        return _alone(each) if self._memory.has(each) else _Outside(each)

    def replay(self) -> None:
        if self._memory.first is self:
            self._memory.poison()
        with torch._C._AutoDispatchBelowAutograd():
            for call in self._calls:
                self._again(*call)

    def _again(self, func: Any, known: list[Any], shape: Any, made: list[Any]) -> None:
        try:
            given = [each.tensor() if isinstance(each, _Outside) else each for each in known]
        except DanglingError as error:
            raise DanglingError(f"{func.name()}: {error}") from error
        args, kwargs = tree_unflatten(given, shape)
        found, _ = tree_flatten(func(*args, **kwargs))
        for old, new in zip(made, found, strict=True):
            if old is not None and old.data_ptr() != new.data_ptr():
                old.copy_(new)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to, as its schema has it."""
    by_name = {argument.name: argument for argument in func._schema.arguments}
    named = zip(func._schema.arguments, args, strict=False)
    for argument, value in [*named, *((by_name[name], v) for name, v in kwargs.items())]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor))


def _of_the_host(func: Any, args: Any) -> set[int]:
    """By `id`, what an operator reads on the host, when it is started, and never again."""
    named = zip(func._schema.arguments, args, strict=False)
    return {id(value) for argument, value in named if is_on_host(func, argument.name)}


class _Recording(TorchDispatchMode):
    def __init__(self, record: Callable[[Any, Any, Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._record(func, args, dict(kwargs or {}))


@contextmanager
def recording(memory: Memory) -> Iterator[None]:
    """Inside, steps are recorded. HostReadsError where the host asks for values of tensors that are
    made in them."""

    def told(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if memory.has(self):
                raise HostReadsError(name)
            return original(self, *args, **kwargs)

        return patch.object(torch.Tensor, name, method)

    with ExitStack() as stack:
        for name in ("tolist", "numpy", "item", "__bool__", "__int__"):
            stack.enter_context(told(name))
        stack.callback(memory.forget)
        yield
