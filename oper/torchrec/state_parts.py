"""The `state` of `oper.save` and `oper.load`: parts of a checkpoint in addition to the model.

A part is an object with a `state_dict`, such as a dense optimizer, or a dict. A save refuses a part
that could not be loaded again; a load gives each part the containers that were saved.
"""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from oper.base.errors import OperError, check_type, one_line
from oper.checkpoint.delta_rows import TOUCHED, UPON
from oper.checkpoint.saved_index import SavedIndex
from oper.checkpoint.saved_tables import MODEL, OPTIMIZER, is_fused_state
from oper.torchrec.streamed_table import Streamed

_RESERVED = {MODEL: "the model", OPTIMIZER: "the model", TOUCHED: "a delta", UPON: "a delta"}
Paths = dict[str, tuple[Any, ...]]


def check_parts(function: str, folder: Any, state: Any) -> None:
    """Raise OperError if the folder is not a path, or `state` not a mapping of free names."""
    check_type(function, "folder", folder, str, os.PathLike)
    check_type(function, "state", state, Mapping, type(None))
    for name in state or {}:
        check_type(function, "a name in state", name, str)
        # Checkpoints of older versions may have parts with the names that deltas use now.
        if name in _RESERVED and (function != "load" or name in (MODEL, OPTIMIZER)):
            raise OperError(
                f"state: {name!r} is {_RESERVED[name]}'s own name in a checkpoint; choose another "
                "one"
            )


def parts_of(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state dict of each part."""
    parts = (state or {}).items()
    return {name: part.state_dict() if is_stateful(part) else part for name, part in parts}


def is_stateful(value: Any) -> bool:
    """Return whether a value, such as an optimizer, has a state dict without being one."""
    return callable(getattr(value, "state_dict", None))


def flattened(function: str, content: Mapping[str, Any]) -> tuple[dict[str, Any], Paths]:
    """Return the values of nested dicts and lists by dotted names, and the path of each name.

    Raise OperError if two values would have one name.
    """
    try:
        return flatten_state_dict(dict(content))
    except ValueError as error:
        raise OperError(
            f"{function}: two values of the state would be saved under one name "
            f"({one_line(error)}), so that only one could be loaded; rename one of the keys"
        ) from error


def check_loadable(content: Mapping[str, Any]) -> None:
    """Raise OperError if two values have one name, or a value can be read only by running code."""
    for name, value in flattened("save", content)[0].items():
        if isinstance(value, torch.Tensor | Streamed):
            continue
        try:
            box = io.BytesIO()
            torch.save(value, box)
            box.seek(0)
            torch.load(box, weights_only=True)
        except Exception as error:  # Objects may raise anything when they are pickled.
            raise OperError(
                f"state: {name!r} is a {type(value).__name__}, which could not be loaded again "
                "without running code of the checkpoint; save tensors, numbers, texts, and lists "
                "and dicts of these"
            ) from error


def drop_unsaved_states(
    parts: Mapping[str, Any], index: SavedIndex, content: Mapping[str, Any]
) -> None:
    """Remove from optimizers' state dicts the states of parameters that had taken no step when the
    optimizer was saved, so that they take their first step again."""
    known = {path[0] for path in index.paths.values()}
    saved = {tuple(map(str, path[:3])) for path in index.paths.values()}
    for name, part in parts.items():
        if name not in known or not isinstance(part, torch.optim.Optimizer):
            continue
        states = content[name].get("state", {})
        for key, values in list(states.items()):
            of_table = any(isinstance(value, Streamed) for value in values.values())
            if values and not of_table and (name, "state", str(key)) not in saved:
                del states[key]


def take_saved_names(
    parts: Iterable[str], index: SavedIndex, flat: dict[str, Any], paths: Paths
) -> None:
    """Replace the present names of parts by the saved ones.

    An optimizer that has taken no step has no state yet, and a list may have other lengths. States
    of tables that the model lacks are left out.
    """
    saved = {path: name for name, path in index.paths.items()}
    inner = {path[:end] for path in saved for end in range(1, len(path))}
    part_names = {*parts}
    for name, path in list(paths.items()):
        in_leaf = any(path[:end] in saved for end in range(1, len(path)))
        if path[0] in part_names and name not in index.paths and (path in inner or in_leaf):
            del flat[name], paths[name]
    for path, name in saved.items():
        if path[0] in part_names and name not in flat and not is_fused_state(name):
            tensor = index.tensors.get(name)
            flat[name] = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype)
            paths[name] = path


def put(content: Any, path: Sequence[str | int], value: Any) -> None:
    """Put a value into nested dicts and lists, and make containers that are absent."""
    for key, following in pairwise((*path, None)):
        at: Any = key
        if isinstance(content, list):
            content += [None] * (at + 1 - len(content))
            absent = content[at] is None
        else:
            at = _own_key(content, at)
            absent = content.get(at) is None
        if following is None:
            content[at] = value
            return
        kind = list if isinstance(following, int) else dict
        if absent or not isinstance(content[at], list if kind is list else Mapping):
            content[at] = kind()
        content = content[at]


def _own_key(content: Mapping[Any, Any], key: str | int) -> Any:
    """Return a dict's key for a saved key. Torch saves all keys as texts; those of a torch
    optimizer's parameters are numbers."""
    if key in content:
        return key
    unknown = int(key) if str(key).isdecimal() else key
    return next((candidate for candidate in content if str(candidate) == str(key)), unknown)


def load_part(part: Any, saved: Mapping[str, Any]) -> None:
    """Give a part its state dict."""
    if isinstance(part, KeyedOptimizer):
        _take_states(part, saved.get("state", {}))
    part.load_state_dict(saved)


def _take_states(optimizer: Any, saved: Mapping[str, Any], prefix: str = "") -> None:
    """Give parameters their saved states, and remove the states of parameters without a saved one:
    TorchRec's optimizers load only into existing states."""
    if isinstance(optimizer, CombinedOptimizer):
        for key, part in optimizer.optimizers:
            inner = CombinedOptimizer.prepend_opt_key(key, prefix) if key else prefix
            _take_states(part, saved, inner)
    elif not isinstance(optimizer, FusedOptimizer):
        for key, parameter in optimizer.params.items():
            states = saved.get(CombinedOptimizer.prepend_opt_key(key, prefix))
            if not states:
                optimizer.state.pop(parameter, None)
            elif optimizer.state.get(parameter, {}).keys() != states.keys():
                optimizer.state[parameter] = dict(states)
