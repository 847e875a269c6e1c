"""`oper checkpoint export`: one table of a checkpoint in a file that other programs read.

safetensors: tensors `weight`, [rows, dim], and each state of the optimizer by its name. Parquet: a
row for each row of the table, with its number `row`, `weight` as a list of dim values, and the
states. Rows are written in pieces. For a delta, the table is assembled from all links of its chain.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from oper.base.errors import OperError
from oper.checkpoint.chain import Chain
from oper.checkpoint.saved_tables import SavedTable, pieces, table_of
from oper.checkpoint.soundness import open_chain
from oper.files.overwrite_rules import FILE_MARK
from oper.files.storage import atomic_file

Advance = Callable[[float], None]

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_ALIGNED_BYTES = 8  # to which a safetensors header is filled up with spaces
SAFETENSORS, PARQUET = ".safetensors", ".parquet"


def export(
    checkpoint: Chain | Path | str,
    table: str,
    output: Path | str,
    overwrite: bool = False,
    advance: Advance = lambda amount: None,
) -> SavedTable:
    """Write a table of a checkpoint, or of the newest in a folder of checkpoints, to a safetensors
    or Parquet file, by the ending of `output`. Call `advance` with the number of bytes written.

    Raise OperError if the table is unknown, the ending is another one, or a file is damaged.
    """
    writers = {SAFETENSORS: _write_safetensors, PARQUET: _write_parquet}
    write = writers.get(Path(output).suffix)
    if write is None:
        raise OperError(
            f"{output}: expected a name that ends in {' or '.join(writers)}, got "
            f"{Path(output).suffix!r}"
        )
    chain = open_chain(checkpoint)
    exported = table_of(chain.index, table)
    for name, tensor in exported.tensors.items():
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise OperError(f"table {table!r}: {name} has dtype {tensor.dtype}, which is not known")
    with atomic_file(output, overwrite) as made:
        write(chain, exported, made, advance)
    return exported


def _write_safetensors(chain: Chain, table: SavedTable, path: Path, advance: Advance) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", FILE_MARK: ""}}
    end = 0
    for name, tensor in table.tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in table.tensors.values():
            for first, rows in pieces(tensor.row_bytes, 0, tensor.shape[0]):
                values = chain.read_rows(tensor.name, first, rows).contiguous()
                file.write(cast(Any, values.view(torch.uint8).numpy()))
                advance(values.nbytes)


def _write_parquet(chain: Chain, table: SavedTable, path: Path, advance: Advance) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row_bytes = sum(tensor.row_bytes for tensor in table.tensors.values())
    writer = None
    try:
        for first, rows in pieces(row_bytes, 0, table.weight.shape[0]):
            columns = {"row": pa.array(range(first, first + rows), pa.int64())}
            for name, tensor in table.tensors.items():
                values = chain.read_rows(tensor.name, first, rows)
                if values.dtype == torch.bfloat16:  # not supported by Parquet
                    values = values.float()
                flat = pa.array(values.reshape(-1).numpy())
                lists = values.dim() > 1
                columns[name] = (
                    pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if lists else flat
                )
            piece = pa.table(columns).replace_schema_metadata({FILE_MARK: ""})
            writer = writer or pq.ParquetWriter(path, piece.schema)
            writer.write_table(piece)
            advance(rows * row_bytes)
    finally:
        if writer is not None:
            writer.close()
