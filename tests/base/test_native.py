"""What Python and the kernels both declare: complete, and compared when the kernels are loaded."""

import importlib
import pkgutil
import re

import numpy as np
import pytest

import oper
from oper.base import native
from oper.base.errors import OperError


def test_python_declares_all_that_the_kernels_do() -> None:
    for module in pkgutil.walk_packages(oper.__path__, "oper."):
        if not module.name.startswith(("oper.torchrec", "oper.cli", "oper._C")):
            importlib.import_module(module.name)
    assert native._shared == dict(native.ops().declarations())
    assert native._shared["slot bits"] == "40"
    assert native._shared["struct PatternStep"] == "uint16 owner, uint16 before, uint32 copies"
    assert native._shared["optimizer partial_rowwise_adam"] == "momentum1[dim], exp_avg_sq[1]"


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        ("slot bits", 41, "slot bits is 40 to them, and 41 to Python"),
        (
            "struct PatternStep",
            np.dtype([("owner", np.uint16), ("copies", np.uint32), ("before", np.uint16)]),
            "struct PatternStep is uint16 owner, uint16 before, uint32 copies to them, and "
            "uint16 owner, uint32 copies, uint16 before to Python",
        ),
        ("colour", 7, "colour is unknown to them, and 7 to Python"),
    ],
)
def test_another_version_of_the_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: "int | np.dtype", difference: str
) -> None:
    native.ops()
    monkeypatch.setattr(native, "_shared", dict(native._shared))
    says = f"another version than the Python code: {re.escape(difference)}.*make install"
    with pytest.raises(OperError, match=says):
        native.shared(name, value)  # the kernels are loaded
    native.ops.cache_clear()
    with pytest.raises(OperError, match=says):
        native.ops()  # when they are loaded
    native._shared.clear()
    native.ops()
