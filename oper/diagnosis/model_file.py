"""The user's model, from a function in a Python file: `model.py:make`."""

import contextlib
import difflib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from oper.base.errors import OperError
from oper.base.process_signals import Stopped
from oper.plan.plan import Plan

_MOST_LETTERS = 300  # The message of a user's error may contain a whole array.


def make_model(spec: str, plan: Plan) -> nn.Module:
    """Call the function that `spec` names, without arguments or with the plan, and return its
    model.

    Raise OperError if the function is missing or returns no module, or for an error in the user's
    file, with its last line and place.
    """
    name, colon, wanted = spec.rpartition(":")
    path = Path(name)
    if not colon or not wanted or path.suffix != ".py":
        raise OperError(
            f"model {spec!r}: expected a Python file and a function in it, such as model.py:make"
        )
    if not path.is_file():
        raise OperError(f"model {spec!r}: {path}: no such file")
    function = getattr(_loaded(path), wanted, None)
    if not callable(function):
        raise OperError(f"model {spec!r}: {path} has no function {wanted!r}{_near(path, wanted)}")
    arguments = (plan,) if _takes_plan(function, spec) else ()
    model = _called(path, function, *arguments)
    if not isinstance(model, nn.Module):
        raise OperError(
            f"model {spec!r}: expected to return a torch.nn.Module, got {type(model).__name__}"
        )
    return model


def _loaded(path: Path) -> ModuleType:
    """Load the file as a module, which can import its neighbours, as if it were run."""
    spec = importlib.util.spec_from_file_location(f"_oper_doctor_{path.stem}", path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses and its pickles need that.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        _called(path, spec.loader.exec_module, module)
    finally:
        sys.path.pop(0)
    return module


def _called(path: Path, function: Any, *arguments: Any) -> Any:
    try:
        # Output of the user's file is kept out of the findings.
        with contextlib.redirect_stdout(sys.stderr):
            return function(*arguments)
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames_of_file = [f for f in frames if Path(f.filename).resolve() == path.resolve()]
        line = (
            frames_of_file[-1].lineno if frames_of_file else getattr(error, "lineno", None)
        )  # of a SyntaxError
        last = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
        where = f"{path}, line {line}" if line else f"{path}"
        raise OperError(f"{where}: {last[:_MOST_LETTERS]}") from error


def _takes_plan(function: Any, spec: str) -> bool:
    needed = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > 1 or any(p.kind == p.KEYWORD_ONLY for p in needed):
        raise OperError(
            f"model {spec!r}: expected a function of no arguments, or of the plan alone, got one "
            f"that takes {', '.join(p.name for p in needed)}"
        )
    return bool(needed)


def _near(path: Path, wanted: str) -> str:
    module = sys.modules[f"_oper_doctor_{path.stem}"]
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; it has {', '.join(names[:8])}" if names else "; it has none"
