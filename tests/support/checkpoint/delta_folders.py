"""Bases and deltas of one table with a state, as `oper.save` and `oper.save_delta` lay them out."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from oper.checkpoint.marker import FORMAT, Delta, Marker
from oper.files.manifest import describe_files
from tests.support.checkpoint.saved_folders import STATE, WEIGHT, Part, write


def write_base(folder: Path, weight: torch.Tensor, state: torch.Tensor) -> Marker:
    """A base, in two shards, with a dense tensor and an object that say that it is one."""
    half = len(weight) // 2
    parts = [Part(edges) for edges in pairwise([0, half, len(weight)]) if edges[0] < edges[1]]
    tensors = {WEIGHT: (weight, parts), STATE: (state, [Part((0, len(state)))])}
    return _marked(folder, tensors, 0, None)


def write_delta(
    folder: Path,
    upon: tuple[str, Marker],
    ids: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    rows: int,
    cuts: list[int] | None = None,
    step: int = 1,
) -> Marker:
    """A delta of rows `ids`, in shards that end at `cuts`, of a table of so many rows."""
    tables = {"t": {"rows": rows, "tensors": [WEIGHT, STATE]}}
    delta = Delta(upon[0], upon[1].digest, tables)
    edges = sorted({0, len(ids), *(cuts or [])})
    parts = [Part(part) for part in pairwise(edges)]
    tensors = {"touched.t": (ids, parts), WEIGHT: (weight, parts), STATE: (state, parts)}
    return _marked(folder, tensors if len(ids) else {}, step, delta)


def _marked(folder: Path, tensors: Any, step: int, delta: Delta | None) -> Marker:
    dense = {"model.over.weight": (torch.full((5,), float(step)), [Part((0, 5))])}
    write(folder, tensors | dense, {"optimizer.lr": 0.5 + step})
    marker = Marker(step, None, 1, describe_files(folder), delta)
    marker.write(folder)
    assert Marker.read(folder) == marker
    assert (folder / FORMAT.marker).exists()
    return marker
