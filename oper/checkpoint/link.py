"""One folder of a checkpoint: its index and its marker, read and not yet checked (soundness.py)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oper.checkpoint.delta_rows import TOUCHED, UPON
from oper.checkpoint.marker import FORMAT, Delta, Marker, is_there, newest
from oper.checkpoint.saved_index import INDEX, SavedIndex, SavedTensor, read_index
from oper.checkpoint.saved_tables import SavedTable, tables_of


@dataclass(frozen=True)
class Description:
    """Checkpoint: its folder, its index, and its marker, which checkpoints by torch alone lack."""

    folder: Path
    index: SavedIndex
    marker: Marker | None

    @property
    def tables(self) -> list[SavedTable]:
        """Tables, in the order of the index."""
        return list(tables_of(self.index).values())

    @property
    def others(self) -> list[SavedTensor]:
        """Tensors outside the tables."""
        of_tables = {tensor.name for table in self.tables for tensor in table.tensors.values()}
        if self.delta is not None:
            of_tables |= {f"{TOUCHED}.{table}" for table in self.delta.tables}
        return [tensor for name, tensor in self.index.tensors.items() if name not in of_tables]

    @property
    def objects(self) -> list[str]:
        """Names of its objects, such as learning rates."""
        return [name for name in self.index.objects if name != UPON]

    @property
    def delta(self) -> Delta | None:
        """Description of the continued save, of a delta; None for a whole checkpoint."""
        return None if self.marker is None else self.marker.delta

    def rows_of(self, table: SavedTable) -> int:
        """Return the number of a table's rows, of which a delta has only some."""
        if self.delta is None or table.name not in self.delta.tables:
            return table.weight.shape[0]
        return int(self.delta.tables[table.name]["rows"])

    @property
    def files(self) -> int:
        """Number of files that hold the parts."""
        return len({extent.file for _, extent in self.index.extents()})

    @property
    def bytes(self) -> int:
        """Bytes of all values."""
        return sum(tensor.bytes for tensor in self.index.tensors.values())

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON."""
        marker = self.marker
        return {
            "checkpoint": str(self.folder),
            "step": marker and marker.step,
            "plan": marker and marker.plan,
            "ranks": marker and marker.ranks,
            "upon": self.delta and self.delta.upon,
            "files": self.files,
            "bytes": self.bytes,
            "tables": [
                {
                    "name": table.name,
                    "rows": self.rows_of(table),
                    **({} if self.delta is None else {"touched_rows": table.weight.shape[0]}),
                    "dim": table.weight.shape[1],
                    **{name: _described(tensor) for name, tensor in table.tensors.items()},
                }
                for table in self.tables
            ],
            "tensors": [_described(tensor) for tensor in self.others],
            "objects": self.objects,
        }


def read_link(folder: Path | str) -> Description:
    """Read the index and the marker of a checkpoint, or of the newest in a folder of checkpoints.

    Raise OperError if there is none, or its index or marker is damaged.
    """
    path = Path(folder)
    if not is_there(path / INDEX):
        path = newest(path)
    marker = Marker.read(path) if is_there(path / FORMAT.marker) else None
    return Description(path, read_index(path), marker)


def dtype_name(tensor: SavedTensor) -> str:
    """Return the name of a tensor's type, such as float32."""
    return str(tensor.dtype).removeprefix("torch.")


def _described(tensor: SavedTensor) -> dict[str, Any]:
    return {
        "tensor": tensor.name,
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor),
        "bytes": tensor.bytes,
        "shards": len(tensor.shards),
    }
