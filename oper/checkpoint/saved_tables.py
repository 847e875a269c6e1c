"""Tables of a checkpoint, found by TorchRec's names of them, whatever program wrote it.

A collection names a weight `….embedding_bags.TABLE.weight` or `….embeddings.TABLE.weight`; its
optimizer names a state after the weight, `….embedding_bags.TABLE.weight.TABLE.momentum1`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from oper.base.errors import OperError
from oper.checkpoint.saved_index import SavedIndex, SavedTensor

_COLLECTION = r"(?:.*\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight"
_WEIGHT = re.compile(_COLLECTION)
_STATE = re.compile(_COLLECTION + r"\.(?:(?P=table)\.)?(?P<state>[^.]+)")
# Fused optimizers, which step in backward, name the table twice.
_FUSED_STATE = re.compile(
    r"(?:.*\.)?(?:embedding_bags|embeddings)\.(?P<table>.+)\.weight\.(?P=table)\..+"
)
MODEL, OPTIMIZER = "model", "optimizer"  # the parts that every checkpoint has
# Bytes of the rows that are read at once.
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class SavedTable:
    """Table: its weight [rows, dim], and the states of its optimizer by their names, [rows, dim] or
    [rows]."""

    name: str
    weight: SavedTensor
    states: dict[str, SavedTensor]

    @property
    def tensors(self) -> dict[str, SavedTensor]:
        """Weight and states, by their names."""
        return {"weight": self.weight, **self.states}

    @property
    def bytes(self) -> int:
        """Bytes of its rows with all states."""
        return sum(tensor.bytes for tensor in self.tensors.values())


def tables_of(index: SavedIndex) -> dict[str, SavedTable]:
    """Return the tables of a checkpoint by their names.

    If several tensors have the name of one table's weight or state, for example of an optimizer
    that is saved alone and within another, those of the model and its optimizer come first.
    """
    saved: dict[str, SavedTable] = {}
    tables = table_of_tensors(index)
    for name in sorted(tables, key=lambda name: name.partition(".")[0] not in (MODEL, OPTIMIZER)):
        if _WEIGHT.fullmatch(name):
            weight = index.tensors[name]
            saved.setdefault(tables[name], SavedTable(tables[name], weight, {}))
    for name in sorted(tables, key=lambda name: name.partition(".")[0] != OPTIMIZER):
        match, tensor = _STATE.fullmatch(name), index.tensors[name]
        if match and tensor.shape[:1] == saved[tables[name]].weight.shape[:1]:
            saved[tables[name]].states.setdefault(match["state"], tensor)
    return saved


def table_of_tensors(index: SavedIndex) -> dict[str, str]:
    """Return the table of each tensor that has rows of a table, by the tensor's name."""
    weights: dict[str, str] = {}
    rows: dict[str, set[int]] = {}
    for name, tensor in index.tensors.items():
        match = _WEIGHT.fullmatch(name)
        if match and len(tensor.shape) == 2 and tensor.bytes:
            weights[name] = match["table"]
            rows.setdefault(match["table"], set()).add(tensor.shape[0])
    states = {
        name: match["table"]
        for name, tensor in index.tensors.items()
        if (match := _STATE.fullmatch(name))
        # Unlike Adam's number of steps, [1], a state has values for each row.
        and tensor.dtype.is_floating_point
        and {*tensor.shape[:1]} & rows.get(match["table"], set())
    }
    return weights | states


def is_fused_state(name: str) -> bool:
    """Return whether a name is that of a state of a table's fused optimizer."""
    return _FUSED_STATE.fullmatch(name) is not None


def table_of(index: SavedIndex, name: str) -> SavedTable:
    """Return the table of a name; raise OperError if there is none."""
    tables = tables_of(index)
    if name not in tables:
        shown = ", ".join(map(repr, [*tables][:5])) or "none"
        raise OperError(
            f"table {name!r}: is not in the checkpoint; its tables are {shown}"
            f"{', …' if len(tables) > 5 else ''}"
        )
    return tables[name]


def pieces(row_bytes: int, first: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and number of rows of each piece, which fits in memory many times."""
    piece = max(_PIECE_BYTES // max(row_bytes, 1), 1)
    for begin in range(first, first + rows, piece):
        yield begin, min(piece, first + rows - begin)
