"""Inputs that are of another kind than a command takes, found before anything else is asked for.

`oper plan log.csv` lacks a topology as well, but naming one would not help.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oper.files.input_files import refuse_url
from oper.files.manifest import open_folder
from oper.files.overwrite_rules import Format

# By the name of an argument: the marker of the folder that it takes.
_MARKERS = {"PROFILE": "profile.json", **dict.fromkeys(("PLAN", "OLD", "NEW"), "plan.json")}


def check_input(kind: str, value: str) -> None:
    """Raise OperError if an argument of a kind, such as `PLAN`, is a URL, or a path of something
    else than a folder of this kind; its content is not read."""
    refuse_url(value)
    if kind not in _MARKERS:
        return
    folder = Path(value)
    if kind == "PROFILE" and not folder.exists():
        folder = Path(value.rpartition("@")[0] or value)  # PROFILE@3 is one of its windows
    try:
        found = (folder / _MARKERS[kind]).is_file()
    except OSError:  # Its own opening says why.
        found = False
    if not found:
        open_folder(folder, _format(kind))


def _format(kind: str) -> Format:
    if kind == "PROFILE":
        from oper.profiling import profile

        return profile.FORMAT
    from oper.plan import plan

    return plan.FORMAT


def check_before_missing(kind: str, value: str) -> None:
    """Raise OperError if an argument cannot be what a command takes, where another is missing."""
    if check := _OPENED.get(kind):
        check(value)


def _log(value: str) -> None:
    from oper.logs.log import check_path

    check_path(Path(value))


def _checkpoint(value: str) -> None:
    from oper.checkpoint.chain import read_chain

    read_chain(value)


def _workload(value: str) -> None:
    from oper.synth.recipes import load_recipe

    load_recipe(value)


_OPENED: dict[str, Callable[[str], Any]] = {
    "LOG": _log,
    "CHECKPOINT": _checkpoint,
    "WORKLOAD": _workload,
}
