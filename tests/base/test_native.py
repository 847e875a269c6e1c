"""Declarations shared by Python and the kernels: complete, and compared as kernels are loaded."""

import importlib
import pkgutil
import re

import numpy as np
import pytest
import torch

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


EMPTY = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("operator", "arguments", "error", "text"),
    [
        (
            "largest_in_order",
            (torch.zeros(5, dtype=torch.int32), torch.tensor([0, 5]), torch.tensor([1])),
            TypeError,
            "wanted: expected dtype bool, got Long",
        ),
        (
            "draw_ranks",
            (torch.zeros(1, dtype=torch.float64), 5, -0.5, EMPTY, EMPTY.double()),
            ValueError,
            "exponent: expected 0 to 1000, got -0.5",
        ),
        (
            "count_rows",
            (EMPTY, EMPTY, EMPTY.int(), torch.zeros(2, 3, 4)),
            ValueError,
            "counts: expected [classes, columns], got [2, 3, 4]",
        ),
        (
            "reused_tensor",
            (-1, torch.float32),
            ValueError,
            "elements: expected 0 to 1099511627776, got -1",
        ),
        ("load_device_library", ("no-such.so",), RuntimeError, "cannot load "),
    ],
)
def test_errors_of_operators_name_what_was_expected_and_given(
    operator: str, arguments: tuple, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}") as refused:
        getattr(native.ops(), operator)(*arguments)
    assert "\n" not in str(refused.value)
