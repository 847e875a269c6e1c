"""Compiled kernels: the operators of the extension `oper._C`, which is loaded once.

from oper.base import native

native.ops().name_of_the_operator(...)

Constants and structs that Python and the kernels both declare go through `shared`, which compares
the two, so that an extension of another version is detected before it computes anything.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from oper.base import process_signals
from oper.base.errors import OperError, first_line

Value = TypeVar("Value", bound="int | str | np.dtype[Any]")

_shared: dict[str, str] = {}  # declarations of Python, as text
_of_kernels: dict[str, str] = {}  # declarations of the kernels, once they are loaded


@functools.cache
def ops() -> Any:
    """Return the operators `torch.ops.oper`.

    Raises:
        OperError: the extension is not built, was built for another torch or Python, or is of
            another version than the Python code.
    """
    # Ctrl-C in the middle of an import may be caught there, or leave half a module.
    with process_signals.held():
        import torch  # loads libtorch, which the extension is linked to

        try:
            importlib.import_module("oper._C")
        except ImportError as error:
            raise OperError(
                f"cannot load the native kernels, oper._C, under torch {torch.__version__}: "
                f"{error}. Build them with `make install` in a checkout, or with "
                "`pip install --force-reinstall --no-deps --no-build-isolation .` where torch and "
                "a C++20 compiler are present."
            ) from error
    try:
        of_kernels = dict(torch.ops.oper.declarations())
    except AttributeError:
        raise _other_version("they do not say what they were built for") from None
    _compare(_shared, of_kernels)
    _of_kernels.update(of_kernels)
    return torch.ops.oper


@functools.cache
def device_ops() -> Any:
    """Return `ops()` after loading the kernels of devices, oper/_cuda.so.

    Raises:
        OperError: as `ops()`, or the library of device kernels is not built or of another version.
    """
    library = Path(__file__).resolve().parents[1] / "_cuda.so"
    try:
        ops().load_device_library(str(library))
    except RuntimeError as error:
        raise OperError(
            f"cannot load the device kernels: {first_line(error)}. Build them with "
            "`python scripts/build_cuda.py` in a checkout; that needs a CUDA compiler"
        ) from error
    return ops()


@functools.cache
def load_nvshmem() -> None:
    """Load the kernels for NVSHMEM, oper/_nvshmem.so, and NVSHMEM.

    Raises:
        OperError: one of the two is missing, or of another version.
    """
    library = Path(__file__).resolve().parents[1] / "_nvshmem.so"
    host = "libnvshmem_host.so.3"  # found by the dynamic loader, unless there is a package
    with contextlib.suppress(ModuleNotFoundError):
        package = importlib.util.find_spec("nvidia.nvshmem")
        for folder in (package and package.submodule_search_locations) or ():
            if (Path(folder) / "lib" / host).exists():
                host = str(Path(folder) / "lib" / host)
    try:
        ops().load_nvshmem_library(str(library), host)
    except RuntimeError as error:
        raise OperError(
            f"the plan's transport is nvshmem: {first_line(error)}. Install NVSHMEM "
            "(`pip install nvidia-nvshmem-cu13`) and build the kernels with "
            "`python scripts/build_cuda.py` in a checkout; or serve on CPU ranks, which need "
            "neither"
        ) from error


class Kernels(Protocol):
    """A device of the runtime, on which operators run."""

    kind: str  # cpu or cuda

    @property
    def stream(self) -> int:
        """Stream on which work is started, in the form for operators."""

    def ops(self) -> Any:
        """Return the operators on tensors that are there."""


def shared(name: str, value: Value) -> Value:
    """Return a constant or the fields of a struct, which the kernels declare by the same name in
    csrc/shared_constants.cpp. They are compared when the kernels are loaded, or now if they are.

    Args:
        value: a number, a struct's dtype, or any text.

    Returns:
        `value` itself.

    Raises:
        OperError: the kernels are loaded and say otherwise.
    """
    text = str(value)
    if isinstance(value, np.dtype):
        text = ", ".join(f"{value[field]} {field}" for field in value.names or ())
    _shared[name] = text
    if _of_kernels:
        _compare({name: text}, _of_kernels)
    return value


def _compare(of_python: Mapping[str, str], of_kernels: Mapping[str, str]) -> None:
    for name, text in of_python.items():
        declared = of_kernels.get(name)
        if declared != text:
            raise _other_version(f"{name} is {declared or 'unknown'} to them, and {text} to Python")


def _other_version(difference: str) -> OperError:
    path = getattr(importlib.import_module("oper._C"), "__file__", "oper._C")
    return OperError(
        f"the native kernels, {path}, are of another version than the Python code: {difference}. "
        "Build them again: `make install` in a checkout, or "
        "`pip install --force-reinstall --no-deps --no-build-isolation .`"
    )
