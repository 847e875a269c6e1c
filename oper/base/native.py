"""The compiled kernels: loads the extension `oper._C` once and returns its operators.

from oper.base import native

native.ops().name_of_the_operator(...)
"""

import functools
import importlib
from typing import Any

from oper.base.errors import OperError


@functools.cache
def ops() -> Any:
    """The operators `torch.ops.oper`.

    Raises:
        OperError: the extension is not built, or was built for another torch or Python.
    """
    import torch  # loads libtorch, which the extension is linked to

    try:
        importlib.import_module("oper._C")
    except ImportError as error:
        raise OperError(
            f"cannot load the native kernels, oper._C, under torch {torch.__version__}: {error}. "
            "Build them with `make install` in a checkout, or with "
            "`pip install --force-reinstall --no-deps --no-build-isolation .` where torch and "
            "a C++17 compiler are present."
        ) from error
    return torch.ops.oper
