"""The tables of a checkpoint, found by TorchRec's names of them, whoever wrote it.

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
# Of rows that are read at once.
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class SavedTable:
    """A table: its weight [rows, dim], and the states of its optimizer by their names, [rows, dim]
    or [rows]."""

    name: str
    weight: SavedTensor
    states: dict[str, SavedTensor]

    @property
    def tensors(self) -> dict[str, SavedTensor]:
        """The weight and the states, by their names."""
        return {"weight": self.weight, **self.states}

    @property
    def bytes(self) -> int:
        """Bytes of its rows with all states."""
        return sum(tensor.bytes for tensor in self.tensors.values())


def tables_of(index: SavedIndex) -> dict[str, SavedTable]:
    """The tables of a checkpoint by their names."""
    weights = {
        match["table"]: tensor
        for name, tensor in index.tensors.items()
        if (match := _WEIGHT.fullmatch(name)) and len(tensor.shape) == 2 and tensor.bytes
    }
    found = {table: SavedTable(table, weight, {}) for table, weight in weights.items()}
    for name, tensor in index.tensors.items():
        match = _STATE.fullmatch(name)
        if match and match["table"] in found and _is_of_rows(tensor, weights[match["table"]]):
            found[match["table"]].states[match["state"]] = tensor
    return found


def _is_of_rows(state: SavedTensor, weight: SavedTensor) -> bool:
    """Whether a state has values for each row, unlike Adam's number of steps, [1]."""
    return state.dtype.is_floating_point and state.shape[:1] == weight.shape[:1]


def table_of(index: SavedIndex, name: str) -> SavedTable:
    """The table of a name; OperError where there is none."""
    tables = tables_of(index)
    if name not in tables:
        shown = ", ".join(map(repr, [*tables][:5])) or "none"
        raise OperError(
            f"table {name!r}: is not in the checkpoint; its tables are {shown}"
            f"{', …' if len(tables) > 5 else ''}"
        )
    return tables[name]


def pieces(row_bytes: int, first: int, rows: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each piece of rows, which fits in memory many times."""
    each = max(_PIECE_BYTES // max(row_bytes, 1), 1)
    for begin in range(first, first + rows, each):
        yield begin, min(each, first + rows - begin)
