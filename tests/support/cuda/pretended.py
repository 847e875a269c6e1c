"""Host tensors that say they are on cuda:0, where there is no device: what mixes tensors of the
host with those of a device fails as it would there, and everything is computed all the same.

The emulated device takes host memory for a device's, and cannot tell the two apart. Here torch's
FakeTensorMode, which knows by each operator which devices may go together, judges every operator
first. It then runs on the host tensors that are meant, so that the host can read what it reads.
What oper's own operators take is in operator_places.py, as their bindings check it
(oper/csrc/device/).
"""

import contextlib
import ctypes
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from oper.runtime.comm.shared_segment import DeviceSegment
from oper.runtime.memory.device import OnTheWay
from tests.support.cuda.device_engines import EmulatedDevice
from tests.support.cuda.operator_places import is_on_host

DEVICE = torch.device("cuda:0")

# Arguments that oper's operators for devices bring to the device themselves.
ON_EITHER = {"segment_offset", "segment_table"}


class MixedDevicesError(AssertionError):
    """An operator got tensors of the host and of the device that do not go together."""


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnDevice":
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _Pretending().run(func, args, dict(kwargs or {}))

    def data_ptr(self) -> int:
        """The place of the values."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        """The values, for which the host would wait."""
        return self.held.tolist()


class _Pretending(TorchDispatchMode):
    """Runs operators on the tensors that are held, once it is known that their devices fit."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[int] = []  # where the tensors are that a stream was recorded of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, dict(kwargs or {}))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operator gives."""
        given, _ = tree_flatten((args, kwargs))
        on_device = any(isinstance(each, OnDevice) for each in given)
        if not on_device and not any(_names_device(each) for each in given):
            return func(*args, **kwargs)
        if func.name() == "aten::record_stream":
            self.streams.append(args[0].data_ptr())
            return None
        made_there = self._judge(func, args, kwargs, given)
        known = {id(each.held): each for each in given if isinstance(each, OnDevice)}
        args, kwargs = tree_map(_held, (args, kwargs))
        out = func(*args, **kwargs)
        flat, _ = tree_flatten(out)
        there = iter(made_there or [on_device] * len(flat))

        def claimed(each: Any) -> Any:
            is_there = next(there)
            if not isinstance(each, torch.Tensor):
                return each
            return known.get(id(each), OnDevice(each) if is_there else each)

        return tree_map(claimed, out)

    def _judge(
        self, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Any]
    ) -> list[bool] | None:
        """Which of an operator's results are on the device, None: all. MixedDevicesError where its
        arguments do not go together."""
        if func.namespace in ("oper", "oper_emulated"):
            self._judge_ours(func, args, kwargs)
            return None
        with FakeTensorMode() as mode, torch.no_grad():
            try:
                fakes = tree_map(lambda each: _fake(each, mode), (args, kwargs))
                found, _ = tree_flatten(func(*fakes[0], **fakes[1]))
            except (
                DataDependentOutputException,
                DynamicOutputShapeException,
                UnsupportedOperatorException,
                NotImplementedError,
            ):
                # Its result's size depends on values: torch's rule for all others.
                sized = [each for each in given if isinstance(each, torch.Tensor) and each.dim()]
                if len({isinstance(each, OnDevice) for each in sized}) > 1:
                    raise MixedDevicesError(_text(func, given)) from None
                return None
            except RuntimeError as error:
                raise MixedDevicesError(f"{_text(func, given)}: {error}") from error
        return [isinstance(each, torch.Tensor) and each.device == DEVICE for each in found]

    def _judge_ours(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        names = [argument.name for argument in func._schema.arguments]
        for argument, given in (*zip(names, args, strict=False), *kwargs.items()):
            if argument in ON_EITHER:
                continue
            for value in given if isinstance(given, list) else [given]:
                there = isinstance(value, OnDevice)
                if isinstance(value, torch.Tensor) and there == is_on_host(func, argument):
                    where = "the device" if there else "the host"
                    raise MixedDevicesError(f"{func.name()}: {argument} is on {where}")


def _names_device(each: Any) -> bool:
    return isinstance(each, torch.device) and each.type == "cuda"


def _held(each: Any) -> Any:
    if isinstance(each, OnDevice):
        return each.held
    return torch.device("cpu") if _names_device(each) else each


def _fake(each: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(each, torch.Tensor):
        return each
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)


def _text(func: Any, given: Iterable[Any]) -> str:
    devices = [str(each.device) for each in given if isinstance(each, torch.Tensor)]
    return f"{func.name()} of tensors on {', '.join(devices)}"


class _Segment(DeviceSegment):
    """Its views say that they are on the device."""

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return OnDevice(super().tensor(offset, shape, dtype))


class PretendedDevice(EmulatedDevice):
    """The emulated device, whose tensors say that they are on cuda:0."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.torch_device = DEVICE

    def bring(self, tensor: torch.Tensor) -> OnTheWay:
        return OnTheWay(tensor.cpu().clone())

    def segment(self, bytes: int, used_bytes: int) -> DeviceSegment:
        segment = _Segment.create(bytes, torch.device("cpu"))
        segment.zero()
        return segment


def build_guard(folder: Path) -> Path:
    """The library of device_guard.cpp."""
    source, library = Path(__file__).with_name("device_guard.cpp"), folder / "libguard.so"
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    subprocess.run(["g++", *flags, source, "-lc10", "-o", library], check=True)
    return library


@contextlib.contextmanager
def pretending(library: str, guard: str) -> Iterator[tuple[PretendedDevice, list[int]]]:
    """A pretended device, and where the tensors are that a stream is recorded of. Inside, tensors
    are on it that are put there, as by `tensor.to("cuda:0")`. For a process of its own."""
    ctypes.CDLL(guard)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) goes through the mode
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # parameters are OnDevice
    mode = _Pretending()
    stream = patch("torch.cuda.current_stream", lambda *_: Mock())  # TorchRec waits for it
    with patch("torch.cuda._lazy_init", lambda: None), stream, mode:
        yield PretendedDevice(library), mode.streams
